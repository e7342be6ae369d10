"""Calls of a step: which ones find the schedule, and that no call reads that of another pass."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch

from mla_var3.attention import CacheView, Step, call, explain, mla_latent_attention
from mla_var3.attention.backends.latent import LatentBackend
from mla_var3.errors import InvalidArgumentError, UnknownNameError
from mla_var3.kernel.cute_python.mla.latent.operands import LatentOperands, LatentOptions

from .attention_support import registered

KERNEL, B, S, H, K, P, T = "follower", 2, 1, 3, 8, 8, 16


class Follower:
    """A kernel that knows lengths from its schedule alone, and notes who found one."""

    def __init__(self) -> None:
        self.found: list[bool] = []
        self.fails = False

    def __call__(self, operands: LatentOperands, options: LatentOptions) -> None:
        if self.fails:
            raise RuntimeError("no memory")
        schedule, lengths = operands.schedule, operands.lengths
        if schedule is not None:
            self.found.append(not options.scheduled)
            heads = operands.lse.shape[-1]
            if options.scheduled:
                assert schedule[0] == heads, "the schedule is that of other sizes"
                lengths = schedule[1 : 1 + len(lengths)]
            else:
                schedule[0] = heads
                schedule[1 : 1 + len(lengths)] = lengths
        for request, length in enumerate(lengths.tolist()):
            # The mean of the tokens that count.
            mean = operands.latent[request, :length].mean(0)
            operands.o_latent[request] = mean
            operands.lse[request] = 0.0


@pytest.fixture
def kernel() -> Iterator[Follower]:
    made = Follower()
    with registered(LatentBackend(KERNEL, "torch", made, runs_on_cpu=True, sliding_window=True)):
        yield made


class Layer:
    """A layer with its cache; all share the lengths."""

    def __init__(self, seed: int, lengths: torch.Tensor, h: int = H) -> None:
        g = torch.Generator().manual_seed(seed)
        self.q = torch.randn((B, S, h, K + P), generator=g).bfloat16()
        rows = torch.randn((B, T, K + P), generator=g).bfloat16()
        self.cache = CacheView(rows[..., :K].contiguous(), rows[..., K:].contiguous(), lengths)

    def __call__(self, step: Any, **options: Any) -> torch.Tensor:
        q = self.q
        given: Any = {"step": step, "kernel": KERNEL, **options}
        return mla_latent_attention(q[..., :K], q[..., K:], self.cache, **given)[0]


@pytest.fixture
def lengths() -> torch.Tensor:
    return torch.tensor([5, 9], dtype=torch.int32)


@pytest.fixture
def layers(lengths) -> list[Layer]:
    return [Layer(seed, lengths) for seed in range(3)]


def same(layers: list[Layer], step: Step, **options: Any) -> None:
    for layer in layers:
        assert torch.equal(layer(step, **options), layer(None, **options))


@pytest.mark.parametrize("again", [lambda step: step, Step.next], ids=["again", "next"])
def test_the_first_layer_of_every_pass_finds_the_schedule(kernel, layers, lengths, again):
    step = Step("cpu")
    for new in ([5, 9], [7, 2], [16, 1]):
        lengths.copy_(torch.tensor(new))
        step = again(step)
        same(layers, step)
    assert kernel.found == 3 * [True, False, False]


def test_a_schedule_is_read_where_it_was_written(kernel, layers, lengths):
    """Lengths that change within a pass, which callers must not do, show what is read."""
    step = Step("cpu")
    layers[0](step)
    lengths.fill_(1)
    assert not torch.equal(layers[1](step), layers[1](None))
    same(layers, step)


def test_a_layer_of_other_sizes_finds_its_own(kernel, layers, lengths):
    step, wide = Step("cpu"), Layer(7, lengths, h=2 * H)
    for new in ([5, 9], [7, 2]):
        lengths.copy_(torch.tensor(new))
        same([layers[0], layers[1], wide, layers[2], layers[1]], step)
    assert kernel.found == 2 * [True, False, True, True, False]


def test_a_layer_on_a_cache_of_another_dtype_finds_its_own(kernel, layers, lengths):
    """Its kernel may have query tiles of other rows."""
    step, other = Step("cpu"), Layer(7, lengths)
    other.q = other.q.half()
    other.cache = CacheView(other.cache.latent.half(), other.cache.rope.half(), lengths)
    same([layers[0], layers[1], other, layers[2]], step)
    assert kernel.found == [True, False, True, True]


@pytest.mark.parametrize("options", [{"causal": False}, {"sliding_window": 4}, {"max_kv": 16}])
def test_a_layer_of_other_options_finds_its_own(kernel, layers, options):
    step = Step("cpu")
    same(layers[:2], step)
    same(layers[2:], step, **options)
    assert kernel.found == [True, False, True]


def test_a_call_that_fails_leaves_no_schedule(kernel, layers, lengths):
    step = Step("cpu")
    same(layers, step)
    kernel.fails = True
    with pytest.raises(RuntimeError, match="no memory"):
        layers[0](step)
    kernel.fails = False
    lengths.copy_(torch.tensor([3, 3]))
    same(layers[1:], step)


def test_checked_calls_take_no_part(kernel, layers, lengths, monkeypatch):
    """Where values are checked, nothing is repeated; a pass that begins so is not joined."""
    step = Step("cpu")
    same(layers, step)
    lengths.copy_(torch.tensor([3, 3]))
    with monkeypatch.context() as debug:
        debug.setattr(call, "checks_values", lambda: True)
        same(layers[:1], step)
    same(layers[1:], step)
    assert kernel.found == [True, False, False, True, False]


def test_a_step_is_of_the_device_of_its_calls(kernel, layers):
    with pytest.raises(InvalidArgumentError, match="step"):
        layers[0](Step("meta"))


class Repeats:
    """A launch that notes the pointers of its operands, and by which program it was made."""

    workspace: ClassVar[dict[str, int]] = {}

    def __init__(self, scheduled: bool, seen: list[tuple[bool, dict[str, int]]]) -> None:
        self.scheduled, self.seen = scheduled, seen

    def stream(self) -> int:
        return 0

    def bind(self, names: Any, fixed: Any) -> Any:
        def launch(pointers: Any) -> bool:
            given = dict(zip(names, pointers, strict=True))
            self.seen.append((self.scheduled, {**given, **fixed}))
            return True

        return launch, None


def test_repeated_calls_bring_the_schedule(lengths):
    """Each launch with the memory of its own step, and only behind a layer that finds it."""
    seen: list[tuple[bool, dict[str, int]]] = []
    full = []

    def kernel(operands: LatentOperands, options: LatentOptions) -> Repeats:
        full.append(options.scheduled)
        return Repeats(options.scheduled, seen)

    layers = [Layer(seed, lengths) for seed in range(3)]
    steps = [Step("cpu"), Step("cpu")]
    with registered(LatentBackend(KERNEL, "torch", kernel, runs_on_cpu=True)):
        for step in (steps[0], steps[1], steps[0].next()):
            for layer in layers:
                layer(step)
    assert full == [False, True]  # one program each
    memory = [step._memory.data_ptr() for step in (steps[0], steps[1], steps[0])]
    caches = [layer.cache.latent.data_ptr() for layer in layers]
    repeated = [(n > 0, memory[turn], caches[n]) for turn in range(3) for n in range(3)][2:]
    assert [(by, at["schedule"], at["latent"]) for by, at in seen] == repeated


def test_a_step_changes_no_choice(kernel, layers):
    q, cache = layers[0].q, layers[0].cache
    given = q[..., :K], q[..., K:], cache
    with_step = explain(*given, kernel=KERNEL, step=Step("cpu"))
    assert with_step == explain(*given, kernel=KERNEL)


def test_what_is_wrong_is_named_as_without_a_step(kernel, layers):
    with pytest.raises(InvalidArgumentError, match="step"):
        layers[0](True)
    layers[0].cache = CacheView(None, None, None)
    with pytest.raises(InvalidArgumentError, match="c_kv"):
        layers[0](Step("cpu"))


def test_no_option_goes_around_a_step(layers):
    with pytest.raises(UnknownNameError, match="scheduled"):
        layers[0](None, scheduled=True)
