"""FlashMLA's dense decoding: its test's cases at small sizes, against plain PyTorch in float64."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from mla_var3.errors import InvalidArgumentError, UnsupportedError
from mla_var3.integrations.flash_mla import (
    FlashMLASchedMeta,
    flash_mla_with_kvcache,
    get_mla_metadata,
)
from mla_var3.op.compare import compare
from mla_var3.op.mla.cache_formats import FORMATS, cache_format, dequantise
from mla_var3.op.mla.window.quantise import E4M3

from ..attention.attention_support import attended, paged, pool_in_8_bits, visible_tokens

ROOT = Path(__file__).resolve().parents[3]
PAGE = 64
WILD = 2147480000


def make_case(
    lengths: list[int], s: int, h: int, h_k: int, *, width: int = 576, dtype: torch.dtype
) -> dict[str, Any]:
    """Shuffled pages; what lies beyond the tokens is NaN, what names it a wild page number."""
    generator = torch.Generator().manual_seed(len(lengths) * 100 + s * 10 + h)
    b, columns = len(lengths), max(1, -(-max(lengths) // PAGE)) + 1

    def normal(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) / 10).clamp(-1, 1).to(dtype)

    order = torch.randperm(b * columns, generator=generator)
    tokens = [normal(length, h_k * width) for length in lengths]
    pool, table = paged(tokens, PAGE, columns, order, WILD)
    return {
        "q": normal(b, s, h, width),
        "k_cache": pool.unflatten(-1, (h_k, width)),
        "block_table": table,
        "cache_seqlens": torch.tensor(lengths, dtype=torch.int32),
    }


def expected(
    case: dict[str, Any], values: int, causal: bool, scale: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """In float64; a query that sees no token has an LSE of +inf."""
    outputs, sums = [], []
    for request, length in enumerate(case["cache_seqlens"].tolist()):
        q, pages = case["q"][request], case["block_table"][request, : -(-length // PAGE)].long()
        rows = case["k_cache"][pages].flatten(0, 1)[:length]  # [m, h_k, width]
        keys = rows.repeat_interleave(q.shape[1] // rows.shape[1], 1).transpose(0, 1)
        visible = visible_tokens(len(q), length, causal=causal)
        found = attended(q, keys, keys[..., :values], visible, scale or q.shape[-1] ** -0.5)
        outputs.append(found[0])
        sums.append(found[1].mT)
    lse = torch.stack(sums)
    return torch.stack(outputs), lse.masked_fill(lse == -torch.inf, torch.inf)


def near(found: Any, wanted: Any, rows: float = 1e-2, sums: float = 1e-4) -> None:
    assert compare(found[0], wanted[0]).relative_frobenius < rows
    assert compare(found[1], wanted[1]).max_abs < sums


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("s", [1, 3])
@pytest.mark.parametrize("lengths", [[20], [140, 140], [140, 64, 0, 7, 0]])
@pytest.mark.parametrize(("h", "h_k"), [(1, 1), (3, 3), (6, 2)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dense_decoding(causal, s, lengths, h, h_k, dtype):
    case = make_case(lengths, s, h, h_k, width=72, dtype=dtype)
    metadata, num_splits = get_mla_metadata()
    output, lse = flash_mla_with_kvcache(
        **case, head_dim_v=64, tile_scheduler_metadata=metadata, num_splits=num_splits,
        causal=causal,
    )  # fmt: skip
    assert output.shape == (len(lengths), s, h, 64) and output.dtype is dtype
    assert lse.shape == (len(lengths), h, s) and lse.dtype is torch.float32
    rows = 1e-2 if dtype is torch.bfloat16 else 2e-3
    near((output, lse), expected(case, 64, causal), rows)


@pytest.mark.parametrize("eight_bit_queries", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_an_fp8_cache(name, eight_bit_queries):
    """576-byte rows with scales of their own as in vLLM's fork, 656 as upstream, and 644."""
    lengths, k = [140, 64, 0, 7], 512
    case = make_case(lengths, 2, 3, 1, dtype=torch.float32)
    rows, fmt = case["k_cache"].squeeze(2), cache_format(name)
    scale = torch.tensor([0.003]) if fmt.scale_columns is None else None
    pool, values = pool_in_8_bits(rows[..., :k], rows[..., k:], fmt, scale)
    descale_q = torch.tensor([0.01]) if eight_bit_queries else None
    q = case["q"].bfloat16() if descale_q is None else (case["q"] / descale_q).to(E4M3)
    found = flash_mla_with_kvcache(
        q, pool.view(E4M3).unsqueeze(2), case["block_table"], case["cache_seqlens"], k,
        get_mla_metadata()[0], causal=True, is_fp8_kvcache=True, descale_q=descale_q,
        descale_k=scale,
    )  # fmt: skip
    worth = torch.cat(dequantise(values, torch.float64), dim=-1).unsqueeze(2)
    q = q.double() if descale_q is None else q.double() * descale_q
    want = expected({**case, "q": q, "k_cache": worth}, k, True)
    assert found[0].dtype is torch.bfloat16
    near(found, want, sums=1e-3)


def test_the_older_interface():
    """Metadata are tensors that callers copy into buffers of their own, and calls take splits.

    At the widths of the models.
    """
    case = make_case([70, 5], 2, 4, 1, dtype=torch.bfloat16)
    metadata, splits = get_mla_metadata(case["cache_seqlens"], 8, 1)
    buffers = torch.empty_like(metadata).copy_(metadata), torch.empty_like(splits).copy_(splits)
    old = flash_mla_with_kvcache(
        *case.values(), 512, *buffers, softmax_scale=0.1, causal=True, descale_q=None
    )
    new = flash_mla_with_kvcache(
        **case, head_dim_v=512, tile_scheduler_metadata=get_mla_metadata()[0], softmax_scale=0.1,
        causal=True,
    )  # fmt: skip
    for one, other in zip(old, new, strict=True):
        assert torch.equal(one, other)
    near(new, expected(case, 512, True, 0.1))


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_the_newest_arguments(batch_invariant):
    """By place, as FlashMLA's interface in vLLM 0.33 has them."""
    case = make_case([70, 5], 2, 4, 1, width=72, dtype=torch.bfloat16)
    out = torch.empty(2, 2, 4, 64, dtype=torch.bfloat16)
    metadata = get_mla_metadata()[0]
    sparse = [None] * 6
    for _ in range(2):
        found, lse = flash_mla_with_kvcache(
            *case.values(), 64, metadata, None, 0.1, True, False, *sparse, out, batch_invariant
        )
        assert found.data_ptr() == out.data_ptr()
        near((out, lse), expected(case, 64, True, 0.1))
        out.zero_()
    with pytest.raises(InvalidArgumentError, match="enable_batch_invariant"):
        flash_mla_with_kvcache(
            *case.values(), 64, metadata, causal=True, enable_batch_invariant=not batch_invariant
        )


def output_of(folder: Path, *arguments: str) -> list[str]:
    """What Python prints with a folder on its path."""
    environment = {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(folder)])}
    command = [sys.executable, *arguments]
    options: dict[str, Any] = {"cwd": folder, "env": os.environ | environment, "text": True}
    return subprocess.check_output(command, **options).split()


@pytest.mark.parametrize("as_module", [True, False])
def test_standing_in_for_the_module(tmp_path, as_module):
    script = tmp_path / "engine.py"
    script.write_text(
        "import sys\nfrom flash_mla import flash_mla_with_kvcache\n"
        "import flash_mla.flash_mla_interface\n"
        "print(flash_mla_with_kvcache.__module__, sys.argv[1:])\n"
    )
    run = ["-m", "engine"] if as_module else [str(script)]
    said = output_of(tmp_path, "-m", "mla_var3.integrations.flash_mla", *run, "--flag")
    assert said == ["mla_var3.integrations.flash_mla", "['--flag']"]


def test_a_file_of_its_name_stands_in_for_the_module(tmp_path):
    """For workers, which import `flash_mla` in a process of their own."""
    lines = "from mla_var3.integrations import flash_mla\n\nflash_mla.stand_in()\n"
    (tmp_path / "flash_mla.py").write_text(lines)
    assert lines in (ROOT / "docs" / "serving.md").read_text()
    code = "import flash_mla.flash_mla_interface; print(flash_mla.get_mla_metadata.__module__)"
    assert output_of(tmp_path, "-c", code) == ["mla_var3.integrations.flash_mla"]


def pages(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(3, *sizes, dtype=dtype)


def fp8(width: int, h_k: int = 1, **more: Any) -> dict[str, Any]:
    """Arguments of a call on an fp8 cache."""
    return {"is_fp8_kvcache": True, "k_cache": pages(64, h_k, width, dtype=torch.uint8), **more}


E4M3_QUERIES = torch.zeros(1, 1, 2, 72).to(E4M3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"is_fp8_kvcache": True}, "k_cache: expected dtype torch.uint8"),
        ({"descale_k": torch.ones(1)}, "descale_k: expected None"),
        (fp8(73), r"k_cache: expected rows of 72 \(fp8\), "),
        (
            fp8(72, q=E4M3_QUERIES, descale_q=0.5),
            "descale_q: expected a tensor of one element, got float",
        ),
        (
            fp8(72, descale_q=torch.ones(1)),
            "descale_q: expected None beside queries in torch.bfloat16, got a scale",
        ),
        (fp8(84, 2), r"k_cache: expected h_k of 1 \(fp8_per_token\), got 2"),
        ({"num_splits": torch.zeros(1)}, "num_splits: expected None"),
        ({"tile_scheduler_metadata": 3}, "tile_scheduler_metadata: .* got int"),
        ({"q": torch.zeros(1, 2, 3)}, r"q: expected \[b, s, h, k\+p\]"),
        ({"q": torch.zeros(1, 1, 2, 72)}, "q: expected dtype torch.bfloat16"),
        ({"head_dim_v": 73}, r"head_dim_v: expected .* k\+p=72, got 73"),
        ({"k_cache": pages(64, 1, 71)}, r"k_cache: expected \[.* k\+p=72\]"),
        (
            {"k_cache": pages(64, 2, 72), "out": torch.zeros(1, 1, 2, 64).bfloat16()},
            "out: expected None with h_k=2",
        ),
        ({"k_cache": pages(32, 1, 72)}, "k_cache: .* multiple of 64, got 32"),
        ({"k_cache": pages(64, 3, 72)}, "k_cache: .* divides h=2, got 3"),
        ({"block_table": None}, "block_table: expected a tensor"),
        ({"cache_seqlens": None}, "cache_seqlens: expected a tensor"),
    ],
)
def test_what_is_refused(changes, message):
    case = make_case([20], 1, 2, 1, width=72, dtype=torch.bfloat16)
    given = {**case, "head_dim_v": 64, "tile_scheduler_metadata": FlashMLASchedMeta()}
    with pytest.raises(InvalidArgumentError, match=message):
        flash_mla_with_kvcache(**given | changes)
    for name in ("indices", "attn_sink"):
        with pytest.raises(UnsupportedError, match=f"{name}: expected None"):
            flash_mla_with_kvcache(**given, **{name: torch.zeros(1)})
