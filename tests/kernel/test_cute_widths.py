"""The widths that the CuTe DSL kernels serve: their tiles, operands, programs and refusals."""

import pytest
import torch

pytest.importorskip("cutlass", reason="needs the cute extra: nvidia-cutlass-dsl")

from mla_var3.attention import CacheView, mla_latent_attention
from mla_var3.attention.backends.latent import LatentBackend
from mla_var3.kernel.cute_python.mla.flash_mla.flash_mla import flash_mla
from mla_var3.kernel.cute_python.mla.hopper.widths import LATENT_WIDTHS, LatentWidths
from mla_var3.kernel.cute_python.mla.latent import call as latent_call
from mla_var3.kernel.cute_python.mla.latent.operands import (
    LATENT_FIELDS,
    LatentOperands,
    LatentOptions,
)
from mla_var3.kernel.cute_python.mla.latent.producer import block_parts
from tests.unit.attention.attention_support import registered

from .noted_calls import meta_call


@pytest.mark.parametrize("widths", LATENT_WIDTHS, ids=str)
def test_the_parts_of_a_block_cover_its_columns_once(widths):
    """Every step of the scores' product once; the own half first, the rope part with the other."""
    for own, parts in enumerate(block_parts(widths)):
        steps = [step for part in parts for step in part.steps]
        assert sorted(steps) == list(range((widths.k + widths.p) // 16))
        assert [part.half for part in parts] == [own, 1 - own]
        assert [part.has_rope for part in parts] == [False, widths.p > 0]
        assert all(len(part.tiles) == widths.tiles // 2 + part.has_rope for part in parts)


def test_each_pair_of_widths_is_a_program_of_its_own(calls):
    for widths in LATENT_WIDTHS * 2:
        flash_mla.attend(*meta_call(2, 4, 16, k=widths.k, p=widths.p)[1:])
    assert len(latent_call._programs) == len(LATENT_WIDTHS)


def test_rows_without_a_rope_part_bring_none(calls):
    flash_mla.attend(*meta_call(2, 4, 16, p=0)[1:])
    named = dict(zip(LATENT_FIELDS, calls[0][1], strict=True))
    assert named["q_rope"] is None and named["rope"] is None
    assert named["q_rope_stride"] == named["rope_stride"] == 0


def test_a_call_without_rope_reaches_the_kernel():
    """Zero-width tensors of the public call become absent operands, and count as aligned."""
    seen: list[LatentOperands] = []

    def attend(operands: LatentOperands, options: LatentOptions) -> None:
        seen.append(operands)
        operands.o_latent.zero_()
        operands.lse.zero_()

    rows = torch.zeros(2, 64, 512, dtype=torch.bfloat16)
    cache = CacheView(rows, rows[..., 512:], torch.tensor([64, 3], dtype=torch.int32))
    q = torch.zeros(2, 1, 8, 512, dtype=torch.bfloat16)
    with registered(LatentBackend("zeros", "torch", attend, runs_on_cpu=True)):
        mla_latent_attention(q, q.new_empty(2, 1, 8, 0), cache, kernel="zeros", scale=0.1)
    (operands,) = seen
    assert operands.q_rope is None and operands.rope is None
    assert operands.widths == LatentWidths(512, 0)
