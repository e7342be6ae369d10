"""Replays give what first calls give, and refuse the same calls."""

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from mla_var3.attention.cache.latent_cache import LatentCache
from mla_var3.attention.cache.view import CacheView
from mla_var3.attention.call import mla_attention, mla_latent_attention
from mla_var3.attention.replay import key as keys
from mla_var3.attention.replay import replay as replays
from mla_var3.errors import InvalidArgumentError
from mla_var3.runtime.call_state import CALL_STATE
from mla_var3.runtime.cute import torch_fast

from ..attention_support import filled_cache, make_model, normal
from .replay_support import KERNEL, MemoryLaunch, repeatable_kernel

B, S, H, D, P, K, T = 3, 4, 2, 16, 16, 32, 130
DTYPE = torch.float16
MODEL = make_model(torch.Generator().manual_seed(5), H, D, K, DTYPE)


def pair(generator: torch.Generator) -> tuple[Any, dict[str, Any]]:
    return tuple(normal(generator, B, T, w, dtype=DTYPE) for w in (K, P)), {}


def pair_with_lengths(generator: torch.Generator) -> tuple[Any, dict[str, Any]]:
    return pair(generator)[0], {"lengths": torch.tensor([130, 5, 70], dtype=torch.int32)}


def cache_of(generator: torch.Generator, **options: Any) -> LatentCache:
    options = {"dtype": DTYPE, **options}
    return filled_cache(generator, [100, 31, 9], MODEL, p=P, t=T, **options)[0]


def dense(generator: torch.Generator) -> tuple[Any, dict[str, Any]]:
    return cache_of(generator), {}


def paged(generator: torch.Generator) -> tuple[Any, dict[str, Any]]:
    return cache_of(generator, page_size=64), {"scale": 0.3}


def with_window(generator: torch.Generator) -> tuple[Any, dict[str, Any]]:
    return cache_of(generator, window=16).view(), {"causal": False}


def tree(generator: torch.Generator) -> tuple[Any, dict[str, Any]]:
    mask = torch.rand(B, S, S, generator=generator) < 0.5
    return cache_of(generator).view(), {"tree_mask": mask | torch.eye(S, dtype=torch.bool)}


def eight_bits(generator: torch.Generator) -> tuple[Any, dict[str, Any]]:
    return cache_of(generator, dtype=torch.bfloat16, cache_dtype="fp8"), {}


def eight_bits_per_token(generator: torch.Generator) -> tuple[Any, dict[str, Any]]:
    cache = cache_of(generator, dtype=torch.bfloat16, cache_dtype="fp8_per_token", page_size=64)
    return cache.view(), {}


MAKES = [
    pair, pair_with_lengths, dense, paged, with_window, tree, eight_bits, eight_bits_per_token,
]  # fmt: skip


def queries(generator: torch.Generator, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    shapes = ((B, S, H, width), (B, S, H, P))
    first, second = (normal(generator, *shape, dtype=DTYPE) for shape in shapes)
    return first, second


def same(found: Any, wanted: Any) -> None:
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-3, atol=2e-3)


def require_repeats(kernel: Any, made: Iterable[Any]) -> None:
    """Latent calls of one key, each on queries, cache and options of its own."""
    for turn, (q, cache, options) in enumerate(made):
        found = mla_latent_attention(*q, cache, kernel=KERNEL, **options)
        assert (kernel.calls, kernel.repeats) == (1, turn)
        same(found, mla_latent_attention(*q, cache, kernel="torch_tiled", **options))


@pytest.mark.parametrize("make", MAKES)
def test_the_latent_call(make, kernel, generator):
    require_repeats(kernel, ((queries(generator, K), *make(generator)) for _ in range(3)))


@pytest.mark.parametrize("give_out", [False, True])
@pytest.mark.parametrize("make", MAKES)
def test_the_whole_call(make, give_out, kernel, generator):
    for turn in range(3):
        cache, options = make(generator)
        q = queries(generator, D)
        operands = (*q, cache, MODEL.w_uk, MODEL.w_uv)
        wanted = mla_attention(*operands, kernel="torch_tiled", return_lse=True, **options)
        if give_out:
            options["out"] = torch.full((B, S, H, D), torch.nan, dtype=DTYPE)
        found = mla_attention(*operands, kernel=KERNEL, return_lse=True, **options)
        assert (kernel.calls, kernel.repeats) == (1, turn)
        assert not give_out or found[0] is options["out"]
        same(found, wanted)


def test_packed_queries(kernel, generator):
    cache, made = cache_of(generator), []
    for bounds in ([0, 1, 4, 6], [0, 0, 3, 6]):
        q = [normal(generator, 6, H, w, dtype=DTYPE) for w in (K, P)]
        bounds = torch.tensor(bounds, dtype=torch.int32)
        made.append((q, cache, {"cu_seqlens_q": bounds, "max_q": 3}))
    require_repeats(kernel, made)


COPIED: dict[str, Callable[[Any], tuple[Any, dict[str, Any]]]] = {
    "uneven queries": lambda q: ((q[0].transpose(1, 2).contiguous().transpose(1, 2), q[1]), {}),
    "a list of lengths": lambda q: (q, {"lengths": [100, 31, 9]}),
    "lengths of 64 bits": lambda q: (q, {"lengths": torch.tensor([100, 31, 9])}),
    "lengths with a stride": lambda q: (
        q,
        {"lengths": torch.tensor([[100, 1], [31, 2], [9, 3]], dtype=torch.int32)[:, 0]},
    ),
    "total lengths of 64 bits": lambda q: (q, {"total_lengths": torch.tensor([110, 31, 20])}),
    "a tuple of total lengths": lambda q: (q, {"total_lengths": (110, 31, 20)}),
    "parents": lambda q: (q, {"tree_mask": torch.tensor([-1, 0, 0, 1])}),
    "an output with strides": lambda q: (
        q,
        {"out": torch.empty(B, S, K, H, dtype=DTYPE).transpose(2, 3)},
    ),
}


@pytest.mark.parametrize("change", COPIED.values(), ids=COPIED)
def test_what_is_copied_goes_the_full_path(change, kernel, generator):
    cache = cache_of(generator)
    for _ in range(2):
        q, options = change(queries(generator, K))
        found = mla_latent_attention(*q, cache, kernel=KERNEL, **options)
        options.pop("out", None)
        same(found, mla_latent_attention(*q, cache, kernel="torch_tiled", **options))
    assert (kernel.calls, kernel.repeats) == (2, 0)


@pytest.mark.parametrize("change", ["out", "q_nope"])
def test_a_whole_call_with_strides_goes_the_full_path(change, kernel, generator):
    cache = cache_of(generator)
    for _ in range(2):
        q, options = list(queries(generator, D)), {}
        if change == "out":
            options["out"] = torch.empty(B, S, D, H, dtype=DTYPE).transpose(2, 3)
        else:
            q[0] = q[0].transpose(1, 2).contiguous().transpose(1, 2)
        operands = (*q, cache, MODEL.w_uk, MODEL.w_uv)
        found = mla_attention(*operands, kernel=KERNEL, return_lse=True, **options)
        same(found, mla_attention(*operands, kernel="torch_tiled", return_lse=True))
    assert (kernel.calls, kernel.repeats) == (2, 0)


def test_a_launch_that_is_not_ready(kernel, generator):
    cache, q = cache_of(generator), queries(generator, K)
    mla_latent_attention(*q, cache, kernel=KERNEL)
    kernel.stream = None
    found = mla_latent_attention(*q, cache, kernel=KERNEL)
    assert (kernel.calls, kernel.repeats) == (2, 0)
    same(found, mla_latent_attention(*q, cache, kernel="torch_tiled"))


def test_a_captured_call_is_not_kept(kernel, generator):
    """Lengths that it made hold nothing before its graph has run."""
    cache, q = pair(generator)[0], queries(generator, K)
    kernel.stream = None
    mla_latent_attention(*q, cache, kernel=KERNEL)
    kernel.stream = 0
    mla_latent_attention(*q, cache, kernel=KERNEL)
    assert (kernel.calls, kernel.repeats) == (2, 0)
    mla_latent_attention(*q, cache, kernel=KERNEL)
    assert (kernel.calls, kernel.repeats) == (2, 1)


def test_a_pointer_that_is_not_aligned(kernel, generator):
    cache, q = cache_of(generator), queries(generator, K)
    mla_latent_attention(*q, cache, kernel=KERNEL)
    shifted = torch.empty(q[0].numel() + 1, dtype=DTYPE)[1:].view(q[0].shape).copy_(q[0])
    found = mla_latent_attention(shifted, q[1], cache, kernel=KERNEL)
    assert (kernel.calls, kernel.repeats) == (2, 0)
    same(found, mla_latent_attention(*q, cache, kernel="torch_tiled"))


def test_the_checks_of_values(kernel, generator, monkeypatch):
    cache, q = cache_of(generator), queries(generator, K)
    mla_latent_attention(*q, cache, kernel=KERNEL)
    monkeypatch.setenv("HYPER_MLA_DEBUG", "1")
    lengths = torch.tensor([T + 1, 1, 1], dtype=torch.int32)
    with pytest.raises(InvalidArgumentError, match=r"lengths\[0\]"):
        mla_latent_attention(*q, cache, kernel=KERNEL, lengths=lengths)
    with pytest.raises(InvalidArgumentError, match=r"lengths\[0\]"):
        mla_latent_attention(*q, replace(cache.view(), lengths=lengths), kernel=KERNEL)
    assert kernel.repeats == 0


class Layer(torch.nn.Module):
    """A call on a pair of tensors, to be traced."""

    def forward(self, *operands: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return mla_latent_attention(*operands[:2], (operands[2], operands[3]), kernel=KERNEL)


@pytest.mark.parametrize("way", ["compile", "export", "export strictly"])
def test_traced_programs_of_a_known_key(way, kernel, generator):
    """They hold the operator, which is asked anew whenever they run."""
    layer, operands = Layer(), (*queries(generator, K), *pair(generator)[0])
    wanted = [layer(*operands) for _ in range(2)][1]
    assert (kernel.calls, kernel.repeats) == (1, 1)
    traced: Any
    if way == "compile":
        traced = torch.compile(layer, fullgraph=True, backend="aot_eager")
    else:
        program = torch.export.export(layer, operands, strict=way == "export strictly")
        names = [str(node.target) for node in program.graph.nodes]
        assert sum("hyper_mla.latent_attention" in name for name in names) == 1
        traced = program.module()
    same(traced(*operands), wanted)
    assert (kernel.calls, kernel.repeats) == (2, 1)


BAD: list[Any] = [
    ("causal", lambda q, view: ((*q, view), {"causal": 1})),
    ("causal", lambda q, view: ((*q, view), {"causal": None})),
    ("d", lambda q, view: ((*q, view), {"d": 128.0})),
    ("scale", lambda q, view: ((*q, view), {"scale": True})),
    ("max_kv", lambda q, view: ((*q, view), {"max_kv": True})),
    ("q_rope", lambda q, view: ((q[0], q[1].float(), view), {})),
    ("q_rope", lambda q, view: ((q[0], q[1][:, :, :1], view), {})),
    ("q_rope", lambda q, view: ((q[0], q[1].to("meta"), view), {})),
    ("cache.lengths", lambda q, view: ((*q, replace(view, lengths=view.lengths.long())), {})),
    ("cache.lengths", lambda q, view: ((*q, replace(view, lengths=view.lengths[:2])), {})),
    ("cache.c_kv", lambda q, view: ((*q, replace(view, latent=view.latent.float())), {})),
    ("cache.block_table", lambda q, view: ((*q, replace(view, block_table=view.lengths)), {})),
    ("out", lambda q, view: ((*q, view), {"out": torch.empty(B, S, H, K + 1, dtype=DTYPE)})),
    ("cache", lambda q, view: ((*q, (1, 2, 3)), {})),
]


@pytest.mark.parametrize(("name", "change"), BAD)
def test_a_bad_call_beside_a_known_key(name, change, kernel, generator):
    view = cache_of(generator, page_size=64).view()
    view.lengths.clamp_(max=1)  # as many as the least bound below
    q = queries(generator, K)
    known: list[dict[str, Any]] = [{}, {"causal": True}, {"scale": 1}, {"max_kv": 1}, {"d": 128}]
    for options in known:
        mla_latent_attention(*q, view, kernel=KERNEL, **options)
    before = kernel.repeats
    operands, options = change(q, view)
    with pytest.raises(InvalidArgumentError) as raised:
        mla_latent_attention(*operands, kernel=KERNEL, **options)
    assert str(raised.value).startswith(name)
    assert kernel.repeats == before


LONE_PARTS = [name for name in keys._FURTHER if name not in ("k_new", "k_prefix", "scales")]


@pytest.mark.parametrize("name", LONE_PARTS)
def test_a_part_without_the_others_is_refused_beside_a_known_key(name, kernel, generator):
    """The key of a view without copies once stood for it, so that only first calls refused it."""
    view = cache_of(generator).view()
    operands = (*queries(generator, D), view, MODEL.w_uk, MODEL.w_uv)
    mla_attention(*operands, kernel=KERNEL)
    lone = replace(view, **{name: torch.zeros(B, H, 4, D, dtype=DTYPE)})
    for _ in range(2):
        with pytest.raises(InvalidArgumentError, match="expected one beside its other parts"):
            mla_attention(*operands[:2], lone, *operands[3:], kernel=KERNEL)
    assert (kernel.calls, kernel.repeats) == (1, 0)


def test_replays_go_with_their_backend(kernel, generator):
    cache, q = cache_of(generator), queries(generator, K)
    mla_latent_attention(*q, cache, kernel=KERNEL)
    assert keys._replays and keys._recent
    with repeatable_kernel() as other:
        assert not keys._replays and not keys._recent
        mla_latent_attention(*q, cache, kernel=KERNEL)
        assert (kernel.calls, kernel.repeats, other.calls) == (1, 0, 1)
    assert not keys._replays


def test_one_replay_at_a_time_is_evicted(kernel, generator, monkeypatch):
    """Many batch sizes cost one first call each, and never all of them again."""
    monkeypatch.setattr(keys._replays, "maxsize", 4)
    cache, q = cache_of(generator), queries(generator, K)

    def attend(s: int, max_kv: int) -> None:
        part = tuple(rows[:, :s].contiguous() for rows in q)
        mla_latent_attention(*part, cache, kernel=KERNEL, max_kv=max_kv)

    shapes = [(s, max_kv) for s in (1, 2) for max_kv in (100, 110, 120)]
    for shape in shapes:
        attend(*shape)
        assert len(keys._replays) <= 4
        assert sum(map(len, keys._recent.values())) <= 4
    assert kernel.calls == 6
    for shape in shapes[2:]:
        attend(*shape)
    assert (kernel.calls, kernel.repeats) == (6, 4)
    attend(*shapes[0])
    assert (kernel.calls, kernel.repeats) == (7, 4)
    for shape in shapes[3:]:
        attend(*shape)
    assert (kernel.calls, kernel.repeats) == (7, 7)


def test_subclasses_of_tensors_have_no_key(kernel, generator):
    class Odd(torch.Tensor):
        """Stands for tensors that are not plain memory."""

    q = queries(generator, K)
    view: CacheView = cache_of(generator).view()
    odd = q[0].as_subclass(Odd)
    mla_latent_attention(*q, view, kernel=KERNEL)

    def found(*operands: Any, **options: Any) -> Any:
        return keys.find_replay(keys.latent_key(*operands, 128, KERNEL, options))

    assert found(*q, view) is not None
    assert found(odd, q[1], view) is None
    assert found(*q, view, lengths=odd) is None
    keys.store_replay(keys.latent_key(odd, q[1], view, 128, KERNEL, {}), "odd")
    assert found(odd, q[1], view) is None


Known = Callable[..., Any]


@pytest.fixture(params=["checks", "keys"])
def known(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Known]:
    """Keeps a name for tensors and values, or finds it, with and without the check of torch."""
    if request.param == "keys":
        monkeypatch.setattr(torch_fast, "_guards", None)
    CALL_STATE.clear()

    def call(*tensors: Any, keep: str | None = None, values: tuple[Any, ...] = ()) -> Any:
        if keep is not None:
            keys.store_replay((values, tensors), keep)
        return keys.find_replay((values, tensors))

    yield call
    CALL_STATE.clear()


def test_a_key_is_everything_but_memory_and_content(known):
    plain = torch.zeros(4, 1, 6)
    other = torch.zeros(3, dtype=torch.int32)
    assert known(plain, other, keep="kept") == "kept"
    assert known(torch.ones(5, 1, 6)[1:], torch.ones(3, dtype=torch.int32)) == "kept"
    different = [
        plain.half(),
        plain[:3],
        plain.as_strided((4, 1, 6), (6, 99, 1)),  # a stride that reaches nothing
        torch.zeros(6, 1, 4).transpose(0, 2),
        plain.to("meta"),
        plain.view(4, 6),
        None,
        3,
    ]
    for tensor in different:
        assert known(tensor, other) is None
    assert known(plain, other, values=("more",)) is None


def test_more_keys_of_the_same_values_than_are_checked(known):
    sizes = range(1, 2 * keys.RECENT + 1)
    for size in sizes:
        known(torch.zeros(size), keep=f"size {size}")
    for _ in range(2):
        for size in sizes:
            assert known(torch.ones(size)) == f"size {size}"
    assert all(len(recent) <= keys.RECENT for recent in keys._recent.values())


def test_a_key_in_every_state_of_torch(known):
    kept = torch.zeros(3)
    known(kept, keep="kept")
    with torch.inference_mode():
        for _ in range(2):
            assert known(torch.ones(3)) == "kept" and known(kept) == "kept"
    parameter = torch.nn.Parameter(torch.zeros(3))
    for _ in range(2):
        assert known(parameter) == "kept" and known(torch.ones(3)) == "kept"
        with torch.no_grad():
            assert known(parameter) == "kept" and known(torch.ones(3)) == "kept"


def test_lengths_of_the_cache_given_once_more(kernel, generator):
    q, view = queries(generator, K), cache_of(generator).view()
    require_repeats(kernel, 3 * [(q, view, {"lengths": view.lengths})])
    shorter = torch.ones_like(view.lengths)
    for _ in range(2):
        found = mla_latent_attention(*q, view, kernel=KERNEL, lengths=shorter)
        same(found, mla_latent_attention(*q, view, kernel="torch_tiled", lengths=shorter))


@pytest.mark.parametrize("largest", [0, replays.LARGEST_BYTES])
def test_whole_calls_in_and_outside_of_inference_mode(largest, kernel, generator, monkeypatch):
    monkeypatch.setattr(replays, "LARGEST_BYTES", largest)
    cache = cache_of(generator)
    results = []
    for inference in (True, False, True, False):
        with torch.inference_mode(inference):
            operands = (*queries(generator, D), cache, MODEL.w_uk, MODEL.w_uv)
            found = mla_attention(*operands, kernel=KERNEL, return_lse=True)
            wanted = mla_attention(*operands, kernel="torch_tiled", return_lse=True)
            results.append((found, wanted))
    for found, wanted in results:  # no later call has written into an earlier result
        same(found, wanted)
    assert (kernel.calls, kernel.repeats) == (1, 3)


@pytest.mark.parametrize("largest", [0, replays.LARGEST_BYTES])
def test_an_lse_that_is_not_returned(largest, kernel, generator, monkeypatch):
    """It takes no memory of its own, and none that another result lies in."""
    monkeypatch.setattr(replays, "LARGEST_BYTES", largest)
    made: list[tuple[int, ...]] = []

    def maker(device: torch.device) -> Any:
        def empty(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Any:
            made.append(shape)
            return torch.empty_strided(shape, strides, dtype=dtype, device=device)

        return empty

    monkeypatch.setattr(replays, "tensor_maker", maker)
    cache = cache_of(generator)
    found = []
    for asked in (True, False, True, False, False, True):
        operands = (*queries(generator, D), cache, MODEL.w_uk, MODEL.w_uv)
        wanted = mla_attention(*operands, kernel="torch_tiled", return_lse=True)
        made.clear()
        result = mla_attention(*operands, kernel=KERNEL, return_lse=asked)
        assert isinstance(result, tuple) is asked
        if largest and kernel.repeats:
            *lses, output = made
            assert output == (B, S, H, D) and (asked or not lses)
        found.append((result if asked else (result,), wanted if asked else wanted[:1]))
    assert kernel.repeats == 5
    for result, wanted in found:
        same(result, wanted)


@pytest.mark.parametrize("way", [torch_fast.without_gradients, torch.no_grad])
def test_the_state_of_gradients_is_restored(way, kernel, generator, monkeypatch):
    monkeypatch.setattr(replays, "without_gradients", way)
    weights = [torch.nn.Parameter(weight) for weight in (MODEL.w_uk, MODEL.w_uv)]
    operands = (*queries(generator, D), cache_of(generator), *weights)
    mla_attention(*operands, kernel=KERNEL)
    factor = torch.ones(1, requires_grad=True)
    for wanted in (True, False):
        with torch.set_grad_enabled(wanted):
            output = mla_attention(*operands, kernel=KERNEL)
            assert isinstance(output, torch.Tensor) and not output.requires_grad
            assert torch.is_grad_enabled() is wanted
            assert (factor * 2).requires_grad is wanted
    assert kernel.repeats == 2


def test_an_error_between_the_projections_leaves_gradients_on(kernel, generator, monkeypatch):
    weights = MODEL.w_uk, MODEL.w_uv
    operands = (*queries(generator, D), cache_of(generator), *weights)
    mla_attention(*operands, kernel=KERNEL)

    def fail(launch: MemoryLaunch, given: Any, fixed: Any) -> bool:
        raise RuntimeError("the launch failed")

    monkeypatch.setattr(MemoryLaunch, "launch", fail)
    with pytest.raises(RuntimeError, match="the launch failed"):
        mla_attention(*operands, kernel=KERNEL)
    assert (torch.ones(1, requires_grad=True) * 2).requires_grad


def test_memory_is_of_one_thread_and_has_few_sizes():
    device = torch.device("cpu")
    here = replays.shared_memory(device, replays.SMALLEST_BYTES + 1)
    assert here is not None and here.numel() == 2 * replays.SMALLEST_BYTES
    assert replays.shared_memory(device, 2 * replays.SMALLEST_BYTES) is here
    assert replays.shared_memory(device, 1) is not here
    assert replays.shared_memory(device, replays.LARGEST_BYTES + 1) is None
    there: list[Any] = []
    thread = threading.Thread(
        target=lambda: there.append(replays.shared_memory(device, here.numel()))
    )
    thread.start()
    thread.join()
    assert there[0] is not here


def test_queries_that_are_columns_of_one_tensor_are_not_copied(kernel, generator):
    cache = cache_of(generator)
    both = (normal(generator, B, S, H, K + P, dtype=DTYPE) for _ in range(2))
    require_repeats(kernel, ((q.split([K, P], -1), cache, {}) for q in both))
