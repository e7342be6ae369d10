"""The attention call on a GPU: against the oracle, captured in a graph, with the checks on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import mla_var3
from mla_var3.attention.cache.latent_cache import LatentCache
from mla_var3.errors import InvalidArgumentError, UnsupportedError
from mla_var3.kernel.cute_python.mla.hopper.constants import FP8_FORMATS
from mla_var3.op.mla.cache_formats import FORMATS

from ..unit.attention.attention_support import (
    Model,
    assert_close,
    make_model,
    normal,
    oracle,
    random_parents,
)
from .gpu_support import replayed_steps
from .test_gpu_repeated_calls import same

pytestmark = pytest.mark.gpu

B, S, H, D, P, K, T = 2, 3, 16, 128, 64, 512, 512


@pytest.fixture
def model(generator: torch.Generator) -> Model:
    made = make_model(generator, H, D, K, torch.bfloat16)
    return Model(made.w_uk.cuda(), made.w_uv.cuda())


def make_cache(**options: Any) -> LatentCache:
    cache = LatentCache.allocate(B, T, device="cuda", heads=H, head_dim=D, **options)
    # 0xFF are bytes of NaN in every dtype.
    cache.buffer.fill_(0xFF if cache.buffer.dtype is torch.uint8 else torch.nan)
    return cache


def require_right(
    output: torch.Tensor,
    lse: torch.Tensor,
    q: tuple[torch.Tensor, torch.Tensor],
    cache: LatentCache,
    model: Model,
) -> None:
    """Compare with the oracle over the tokens that the cache holds."""
    view, weights = cache.view(), Model(model.w_uk.cpu(), model.w_uv.cpu())
    for request, length in enumerate(cache.lengths.tolist()):
        positions = torch.arange(length, device="cuda").expand(B, -1)
        latent, rope = (rows[request].cpu() for rows in view.rows(positions))
        expected, expected_lse = oracle(
            q[0][request].cpu(), q[1][request].cpu(), latent, rope, weights
        )
        assert_close(output[request].cpu(), expected, lse[request].cpu(), expected_lse)


@pytest.mark.parametrize("page_size", [None, 64])
@pytest.mark.parametrize("dtype", FORMATS)
def test_an_eight_bit_cache(
    dtype: str, page_size: int | None, model: Model, generator: torch.Generator
) -> None:
    cache = make_cache(dtype=dtype, page_size=page_size)
    rows = normal(generator, B, 300, K + P, dtype=torch.bfloat16).cuda()
    cache.append(rows[..., :K], rows[..., K:], [300, 77])
    q = tuple(normal(generator, B, S, H, w, dtype=torch.bfloat16).cuda() for w in (D, P))
    operands = (*q, cache, model.w_uk, model.w_uv)
    exact = mla_var3.mla_attention(*operands, kernel="torch_tiled", return_lse=True)
    require_right(*exact, q, cache, model)
    for kernel in ("flash_mla:cutile-dsl", "flash_mla_split_kv:cutile-dsl"):  # in 16 bits, too
        require_right(
            *mla_var3.mla_attention(*operands, kernel=kernel, return_lse=True), q, cache, model
        )
    refusing = ["mla_var6_plus"] + (["flash_mla:cute-dsl"] if dtype not in FP8_FORMATS else [])
    for kernel in refusing:
        with pytest.raises(UnsupportedError, match="an 8-bit cache"):
            mla_var3.mla_attention(*operands, kernel=kernel)


@pytest.mark.parametrize("options", [{}, {"page_size": 64}, {"window": 128}])
@pytest.mark.parametrize("kernel", ["auto", "torch_tiled", "mla_var6_plus", "flash_mla:cutile-dsl"])
def test_every_path(
    options: dict[str, int], kernel: str, model: Model, generator: torch.Generator
) -> None:
    cache = make_cache(**options)
    rows = normal(generator, B, 300, K + P, dtype=torch.bfloat16).cuda()
    weights = {"w_uk": model.w_uk, "w_uv": model.w_uv} if "window" in options else {}
    cache.append(rows[..., :K], rows[..., K:], [300, 77], **weights)
    q = tuple(normal(generator, B, S, H, w, dtype=torch.bfloat16).cuda() for w in (D, P))
    operands = (*q, cache, model.w_uk, model.w_uv)
    if "page_size" in options and kernel == "mla_var6_plus":
        with pytest.raises(UnsupportedError, match="a paged cache"):
            mla_var3.mla_attention(*operands, kernel=kernel)
        return
    output, lse = mla_var3.mla_attention(*operands, kernel=kernel, return_lse=True)
    require_right(output, lse, (q[0], q[1]), cache, model)


@pytest.mark.parametrize("counts", [None, (5, 2)])
@pytest.mark.parametrize("h", [4, H])
@pytest.mark.parametrize(
    ("kernel", "page_size"),
    [
        *(("flash_mla:cute-dsl", page) for page in (None, 64)),
        *(("flash_mla:cutile-dsl", page) for page in (None, 64, 128)),
        *(("flash_mla_split_kv:cutile-dsl", page) for page in (None, 64, 128)),
    ],
)
def test_trees_and_packed_queries(
    kernel: str,
    h: int,
    counts: tuple[int, int] | None,
    page_size: int | None,
    generator: torch.Generator,
) -> None:
    """Against the PyTorch path, which is compared with the oracle elsewhere; 20 and 80 rows."""
    s = 5
    options = {} if page_size is None else {"page_size": page_size}
    cache = make_cache(**options)
    rows = normal(generator, B, 300, K + P, dtype=torch.bfloat16).cuda()
    cache.append(rows[..., :K], rows[..., K:], [300, 131])
    shape = (B, s) if counts is None else (sum(counts),)
    q = [normal(generator, *shape, h, w, dtype=torch.bfloat16).cuda() for w in (K, P)]
    call: dict[str, Any] = {"tree_mask": random_parents(generator, B, s).cuda()}
    if counts is not None:
        call |= {"cu_seqlens_q": torch.tensor([0, *counts], dtype=torch.int32).cumsum(0).int()}
        call["cu_seqlens_q"] = call["cu_seqlens_q"].cuda()
        call["max_q"] = s
    for options in (call, {name: value for name, value in call.items() if name != "tree_mask"}):
        found = mla_var3.mla_latent_attention(*q, cache, kernel=kernel, **options)
        wanted = mla_var3.mla_latent_attention(*q, cache, kernel="torch_tiled", **options)
        same(found, wanted)


@pytest.mark.parametrize("page_size", [None, 64])
@pytest.mark.parametrize(("h", "s"), [(16, 1), (16, 4), (24, 1)])
def test_masks_where_two_cta_groups_share_every_request(
    h: int, s: int, page_size: int | None, generator: torch.Generator
) -> None:
    """64 requests of the cute-dsl kernel (`cluster.py`), some shorter than a half of the others.

    Against the PyTorch path; with all options that say which tokens a query sees.
    """
    b, t = 64, 700
    options = {} if page_size is None else {"page_size": page_size}
    cache = LatentCache.allocate(b, T * 2, device="cuda", heads=h, head_dim=D, **options)
    cache.buffer.fill_(torch.nan)
    rows = normal(generator, b, t, K + P, dtype=torch.bfloat16).cuda()
    cache.append(rows[..., :K], rows[..., K:], [s, 65, *(t - 5 * i for i in range(b - 2))])
    q = [normal(generator, b, s, h, width, dtype=torch.bfloat16).cuda() for width in (K, P)]
    tree = random_parents(generator, b, s).cuda()
    for options in ({}, {"tree_mask": tree}, {"sliding_window": 400}, {"causal": False}):
        found = mla_var3.mla_latent_attention(*q, cache, kernel="flash_mla:cute-dsl", **options)
        wanted = mla_var3.mla_latent_attention(*q, cache, kernel="torch_tiled", **options)
        same(found, wanted)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("kernel", ["flash_mla:cutile-dsl", "flash_mla_split_kv:cutile-dsl"])
@pytest.mark.parametrize(("page_size", "q_dtype"), [(128, torch.bfloat16), (64, torch.float16)])
def test_options_of_cutile_on_an_eight_bit_cache(
    page_size: int, q_dtype: torch.dtype, kernel: str, dtype: str, generator: torch.Generator
) -> None:
    """Against the PyTorch path, which dequantises the same tiles to the same numbers."""
    s, counts = 5, (5, 2)
    cache = make_cache(dtype=dtype, page_size=page_size)
    rows = normal(generator, B, 300, K + P, dtype=torch.bfloat16).cuda()
    cache.append(rows[..., :K], rows[..., K:], [300, 131])
    q = [normal(generator, sum(counts), H, w, dtype=q_dtype).cuda() for w in (K, P)]
    bounds = torch.tensor([0, *counts]).cumsum(0).int().cuda()
    call: dict[str, Any] = {"cu_seqlens_q": bounds, "max_q": s, "scale": 0.05}
    tree = random_parents(generator, B, s).cuda()
    for options in ({}, {"tree_mask": tree}, {"sliding_window": 70}, {"causal": False}):
        found = mla_var3.mla_latent_attention(*q, cache, kernel=kernel, **call, **options)
        wanted = mla_var3.mla_latent_attention(*q, cache, kernel="torch_tiled", **call, **options)
        same(found, wanted)


@pytest.mark.parametrize(
    ("kernel", "options"),
    [
        ("torch_tiled", {"window": 64}),
        ("flash_mla:cute-dsl", {"window": 64}),
        *(("torch_tiled", {"dtype": name}) for name in FORMATS),
        *(("flash_mla:cutile-dsl", {"dtype": name}) for name in FORMATS),
    ],
)
def test_a_captured_step(
    kernel: str, options: dict[str, Any], model: Model, generator: torch.Generator
) -> None:
    """Append, attend and drop in one graph; replayed with other drafts and other rejections."""
    cache = make_cache(page_size=64, **options)
    latent, rope = (torch.zeros(B, S, w, dtype=torch.bfloat16, device="cuda") for w in (K, P))
    q_nope, q_rope = (torch.zeros(B, S, H, w, dtype=torch.bfloat16, device="cuda") for w in (D, P))
    rejected = torch.zeros(B, dtype=torch.int32, device="cuda")
    out = torch.empty_like(q_nope)
    lse = torch.empty(B, S, H, device="cuda")
    weights = {"w_uk": model.w_uk, "w_uv": model.w_uv} if "window" in options else {}

    def step() -> None:
        cache.truncate(rejected, **weights, most=S)
        cache.append(latent, rope, **weights)
        result = mla_var3.mla_attention(
            q_nope, q_rope, cache, model.w_uk, model.w_uv, kernel=kernel, out=out, return_lse=True,
        )  # fmt: skip
        lse.copy_(result[1])

    inputs = (latent, rope, q_nope, q_rope)
    for turn in replayed_steps(step, cache, inputs, rejected, generator, 40):
        if turn % 8 == 7:
            require_right(out, lse, (q_nope, q_rope), cache, model)
    cache.check()


def test_the_checks_refuse_a_capture(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = make_cache()
    q_nope, q_rope = (torch.zeros(B, S, H, w, dtype=torch.bfloat16, device="cuda") for w in (D, P))
    monkeypatch.setenv("HYPER_MLA_DEBUG", "1")
    mla_var3.mla_attention(q_nope, q_rope, cache, model.w_uk, model.w_uv, kernel="torch_tiled")
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(UnsupportedError, match="HYPER_MLA_DEBUG"), torch.cuda.graph(graph):
        mla_var3.mla_attention(q_nope, q_rope, cache, model.w_uk, model.w_uv, kernel="torch_tiled")


def test_wrong_values_on_the_device_are_clamped_and_the_checks_name_them(
    model: Model, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = LatentCache.allocate(B, T, device="cuda", page_size=64)
    rows = normal(generator, B, 9, K + P, dtype=torch.bfloat16).cuda()
    new = rows[..., :K], rows[..., K:]
    cache.append(*new)
    q = tuple(normal(generator, B, S, H, w, dtype=torch.bfloat16).cuda() for w in (D, P))

    def int32(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device="cuda")

    def attend(**options: Any) -> None:
        output = mla_var3.mla_attention(
            *q, cache, model.w_uk, model.w_uv, kernel="torch_tiled", **options
        )
        torch.cuda.synchronize()
        assert not isinstance(output, tuple) and output.isfinite().all()

    calls: dict[str, Callable[[], object]] = {
        r"lengths\[0\]": lambda: attend(lengths=int32(T + 1, 5)),
        r"lengths\[1\]": lambda: attend(lengths=int32(3, -1)),
        r"tree_mask\[0\]": lambda: attend(tree_mask=int32(7, 0, 1)),
        r"counts\[0\]": lambda: cache.append(*new, int32(10, -1)),
    }
    for call in calls.values():
        call()
    cache.evict([0, 1])
    cache.append(*new)
    monkeypatch.setenv("HYPER_MLA_DEBUG", "1")
    for name, call in calls.items():
        with pytest.raises(InvalidArgumentError, match=name):
            call()
