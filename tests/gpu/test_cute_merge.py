"""The merge at the end of the absorbed kernel on a Hopper GPU: who waits, who leaves, what is left.

Results are compared bit by bit with those of an undisturbed launch, which `test_cute_flash_mla.py`
compares with the reference.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass", reason="needs the cute extra: nvidia-cutlass-dsl")

import cuda.bindings.driver as cuda
from cutlass import Int32, cute

from mla_var3.kernel.cute_python.mla.hopper.compat import SmemAllocator
from mla_var3.kernel.cute_python.mla.latent.merge import CtaState
from mla_var3.runtime.check import poison_outputs
from mla_var3.runtime.cute_kernel import program_for
from mla_var3.runtime.plan import Tiling

from .gpu_support import outputs_of, relaunched, require_equal
from .test_cute_flash_mla import CUT, DEVICE, Case, named_arguments, planned

pytestmark = pytest.mark.usefixtures("hopper")

SHARED_WORDS = 40_000
"""More than the absorbed kernel leaves free on an SM."""


class Hold:
    """Keeps SMs from the absorbed kernel: blocks with much shared memory that end after a while."""

    @cute.jit
    def __call__(
        self, ended: cute.Pointer, blocks: Int32, nanoseconds: Int32, stream: cuda.CUstream
    ):
        @cute.struct
        class Shared:
            words: cute.struct.MemRange[Int32, SHARED_WORDS]

        self.Shared = Shared
        self.hold(cute.make_tensor(ended, cute.make_layout(blocks)), nanoseconds).launch(
            grid=(blocks, 1, 1), block=(32, 1, 1), stream=stream
        )

    @cute.kernel
    def hold(self, ended: cute.Tensor, nanoseconds: Int32):
        block, _, _ = cute.arch.block_idx()
        words = SmemAllocator().allocate(self.Shared).words.get_tensor(cute.make_layout(32))
        words[cute.arch.lane_idx()] = block
        begin = cute.arch.globaltimer()
        now = begin
        while now - begin < nanoseconds:
            now = cute.arch.globaltimer()
        if cute.arch.lane_idx() == 0:
            ended[block] = words[0] + 1


def hold_sms(count: int, microseconds: int) -> Tensor:
    """Take some SMs on the current stream; returns what counts to `count` when they are free."""
    ended = torch.zeros(count, dtype=torch.int32, device=DEVICE)
    args = (ended, count, microseconds * 1000)
    program_for(Hold.hold, Hold(), args, Tiling(), ended.device)(*args)
    return ended


def words_of(stage: Any) -> Tensor:
    """The records and states of a stage's kernel, as numbers of 64 bits."""
    (kernel,) = stage.kernels()
    merges: Tensor = named_arguments(kernel.args_fn(kernel.tiling))["merges"]
    return merges.view(torch.int64)


@pytest.mark.gpu
@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("share", [0.25, 0.9])
def test_blocks_without_an_sm_are_not_waited_for(share: float, few: bool) -> None:
    """Others hold SMs until long after the first blocks have ended; those have to leave."""
    case = Case(1, 1, 9000, 16, "equal") if few else CUT
    plan, _, stage = planned(case)
    hold_sms(1, 1)
    stage.launch()
    wanted = outputs_of(stage)
    holder, own = torch.cuda.Stream(), torch.cuda.Stream()
    for _ in range(3):
        poison_outputs(stage)
        torch.cuda.synchronize()
        with torch.cuda.stream(holder):
            ended = hold_sms(int(plan.sm_count * share), 1000)
        with torch.cuda.stream(own):
            stage.launch()
        require_equal(outputs_of(stage), wanted)
        assert ended.tolist() == list(range(1, len(ended) + 1))


@pytest.mark.gpu
@pytest.mark.parametrize("filling", [0, -1, 0x7FC00000, 1])
def test_the_memory_needs_no_preparation_and_is_left_without_states(filling: int) -> None:
    _, _, stage = planned(CUT)
    stage.launch()
    wanted = outputs_of(stage)
    words = words_of(stage)
    for _ in range(3):
        words.view(torch.int32).fill_(filling)
        require_equal(relaunched(stage), wanted)
        assert not any(bool((words == int(state)).any()) for state in CtaState)


@pytest.mark.gpu
def test_a_launch_without_splits_writes_no_record() -> None:
    case = Case(4, 1, 512, 128, "equal", group_ctas=2, sms=8)
    plan, _, stage = planned(case)
    words = words_of(stage)
    words.fill_(-3)
    stage.launch()
    torch.cuda.synchronize()
    shape = case.shape(plan)
    assert shape.group_count > 1 and plan.b * shape.visits % shape.group_count == 0
    assert bool((words == -3).all())
