"""Whole calls whose products are the kernel's own: one launch, the same results, nothing mixed."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from mla_var3.attention.backends import latent as absorbed
from mla_var3.attention.call import mla_attention
from mla_var3.attention.replay import key as forms
from mla_var3.attention.replay import pointers as addresses
from mla_var3.attention.replay import replay as fast_path
from mla_var3.attention.replay import scratch
from mla_var3.attention.replay.whole_form import WholeForm

from .repeat_support import KERNEL, RepeatableKernel, RepeatableWhole
from .test_fast_path import (
    DTYPE,
    MAKES,
    MODEL,
    B,
    D,
    H,
    K,
    Make,
    S,
    cache_of,
    queries,
    same,
)

WEIGHTS = MODEL.w_uk, MODEL.w_uv


@pytest.fixture
def whole() -> RepeatableWhole:
    return RepeatableWhole()


def form_of(operands: Any, **options: Any) -> Any:
    return forms.find_form(fast_path.full_parts(*operands, KERNEL, options))


def shifted(tensor: torch.Tensor) -> torch.Tensor:
    """The same content at an address that is not aligned."""
    return torch.empty(tensor.numel() + 1, dtype=tensor.dtype)[1:].view(tensor.shape).copy_(tensor)


@pytest.mark.parametrize("largest", [0, scratch.LARGEST_BYTES])
@pytest.mark.parametrize("give_out", [False, True])
@pytest.mark.parametrize("make", MAKES)
def test_one_launch_does_everything(
    make: Make,
    give_out: bool,
    largest: int,
    whole: RepeatableWhole,
    kernel: RepeatableKernel,
    generator: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With memory between the steps that is kept, and with one for each call."""
    monkeypatch.setattr(scratch, "LARGEST_BYTES", largest)
    monkeypatch.setattr(absorbed, "project_heads", None)  # no product is left to torch
    results = []
    for turn, asked in enumerate((True, False, True, False)):
        cache, options = make(generator)
        operands = (*queries(generator, D), cache, *WEIGHTS)
        wanted = mla_attention(*operands, kernel="torch_tiled", return_lse=True, **options)
        if give_out:
            options["out"] = torch.full((B, S, H, D), torch.nan, dtype=DTYPE)
        found = mla_attention(*operands, kernel=KERNEL, return_lse=asked, **options)
        assert (whole.calls, whole.repeats, kernel.calls, kernel.repeats) == (1, turn, 0, 0)
        result = found if asked else (found,)
        assert not give_out or result[0] is options["out"]
        results.append((result, wanted if asked else wanted[:1]))
    for result, wanted in results:  # no later call has written into an earlier result
        same(result, wanted)


def test_repeated_calls_give_what_first_calls_give(
    whole: RepeatableWhole, kernel: RepeatableKernel, generator: torch.Generator
) -> None:
    """Bit for bit, also where the products are not the kernel's own."""
    cache = cache_of(generator)
    for serves in (True, False):
        whole.serves = serves
        forms.forget_forms()
        known = [(*queries(generator, D), cache, *WEIGHTS) for _ in range(3)]
        repeated = [mla_attention(*operands, kernel=KERNEL) for operands in known]
        assert isinstance(form_of(known[0]), WholeForm) is serves
        for operands, found in zip(known, repeated, strict=True):
            forms.forget_forms()
            assert torch.equal(mla_attention(*operands, kernel=KERNEL), found)


@pytest.mark.parametrize("place", range(4))
def test_an_address_that_is_not_aligned(
    place: int, whole: RepeatableWhole, kernel: RepeatableKernel, generator: torch.Generator
) -> None:
    """Torch multiplies, before and after the form is known, and nothing is kept for it."""
    cache, q = cache_of(generator), queries(generator, D)
    tensors = [q[0], *WEIGHTS, torch.empty(B, S, H, D, dtype=DTYPE)]
    odd = [shifted(tensor) if i == place else tensor for i, tensor in enumerate(tensors)]

    def call(q_nope: Any, w_uk: Any, w_uv: Any, out: Any) -> Any:
        return mla_attention(q_nope, q[1], cache, w_uk, w_uv, out=out, kernel=KERNEL).clone()

    first = call(*odd)
    assert (whole.calls, kernel.calls) == (0, 1)
    wanted = call(*tensors)
    assert (whole.calls, kernel.calls, kernel.repeats) == (1, 1, 0)
    later = call(*odd)
    assert (whole.calls, whole.repeats, kernel.calls, kernel.repeats) == (1, 0, 2, 0)
    assert torch.equal(first, later)
    same((first,), (wanted,))


def test_a_launch_that_is_not_ready(
    whole: RepeatableWhole, kernel: RepeatableKernel, generator: torch.Generator
) -> None:
    operands = (*queries(generator, D), cache_of(generator), *WEIGHTS)
    wanted = mla_attention(*operands, kernel=KERNEL)
    whole.stream = None
    assert torch.equal(mla_attention(*operands, kernel=KERNEL), wanted)
    assert (whole.calls, whole.repeats) == (2, 0)


def test_what_is_copied_is_not_kept(
    whole: RepeatableWhole, kernel: RepeatableKernel, generator: torch.Generator
) -> None:
    cache = cache_of(generator)
    for turn in range(2):
        q_nope, q_rope = queries(generator, D)
        uneven = q_rope.transpose(1, 2).contiguous().transpose(1, 2)
        found = mla_attention(q_nope, uneven, cache, *WEIGHTS, kernel=KERNEL)
        assert (whole.calls, whole.repeats, kernel.calls) == (turn + 1, 0, 0)
        same((found,), (mla_attention(q_nope, q_rope, cache, *WEIGHTS, kernel="torch_tiled"),))


def test_threads_have_memory_of_their_own(
    whole: RepeatableWhole, kernel: RepeatableKernel, generator: torch.Generator
) -> None:
    """Each binds the launch once, to memory that no other uses."""
    cache = cache_of(generator)
    given = [(*queries(generator, D), cache, *WEIGHTS) for _ in range(3)]
    wanted = [mla_attention(*operands, kernel=KERNEL) for operands in given]
    form = form_of(given[0])
    assert isinstance(form, WholeForm)
    wrong: list[int] = []

    def work(index: int) -> None:
        for _ in range(3):
            if not torch.equal(mla_attention(*given[index], kernel=KERNEL), wanted[index]):
                wrong.append(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(given))]
    for thread in threads:
        thread.start()
        thread.join()
    assert not wrong
    # That of a thread that has ended may be another's later; this one lives.
    here, *there = form.launch.bindings  # type: ignore[attr-defined]
    assert len(there) == len(given) and here not in there


def test_weights_that_learn_give_no_gradients(
    whole: RepeatableWhole, kernel: RepeatableKernel, generator: torch.Generator
) -> None:
    weights = [torch.nn.Parameter(weight) for weight in WEIGHTS]
    cache = cache_of(generator)
    for turn in range(2):
        output = mla_attention(*queries(generator, D), cache, *weights, kernel=KERNEL)
        assert isinstance(output, torch.Tensor) and not output.requires_grad
        assert whole.repeats == turn


def test_room_between_the_steps_does_not_overlap(
    whole: RepeatableWhole, kernel: RepeatableKernel, generator: torch.Generator
) -> None:
    operands = (*queries(generator, D), cache_of(generator), *WEIGHTS)
    mla_attention(*operands, kernel=KERNEL)
    form = form_of(operands)
    _, _, sums, (memory, _) = form.prepared(0, False)
    ((q_latent, o_latent),) = form.launch.bindings
    rows = B * S * H
    assert sums == memory.data_ptr() and sums + rows * 4 <= q_latent
    assert q_latent + rows * K * DTYPE.itemsize <= o_latent
    assert o_latent + rows * K * DTYPE.itemsize <= sums + memory.numel()
    assert all(address % 16 == 0 for address in (sums, q_latent, o_latent))


NAMES = ("w_uk", "w_uv", "q", "q_rope", "latent", "rope")


@pytest.mark.parametrize("more", [("lengths",), ("block_table", "lengths")])
def test_frequent_orders_of_addresses_are_the_common_one(
    more: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    for names in ((*NAMES, *more), (*NAMES[2:], *more)):
        tensors = tuple(torch.empty(4) for _ in names)
        found = addresses.address_reader(names, None)(tensors, 4096, 8192)
        with monkeypatch.context() as patch:
            patch.setattr(addresses, "_FREQUENT", {})
            assert addresses.address_reader(names, None)(tensors, 4096, 8192) == found
        order = ("q_rope", "latent", "rope", "block_table", "lengths", "cu_seqlens_q", "tree_mask")
        known = dict(zip(names, (tensor.data_ptr() for tensor in tensors), strict=True))
        wanted = tuple(known.get(name, 0) for name in (*names[: names.index("q") + 1], *order))
        assert found == (*wanted, 4096, 8192)
