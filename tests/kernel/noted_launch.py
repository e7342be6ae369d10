"""Launches the latent attention on a driver that only records, see `noting_driver.py`.

Once with tensors, then twice by pointers; then as the first two layers of a step.
"""

from typing import Any

import torch

from mla_var3.kernel.cute_python.mla.hopper.constants import ROWS, SCHEDULE_SIZE
from mla_var3.kernel.cute_python.mla.latent import call as latent_call
from mla_var3.kernel.cute_python.mla.latent.groups import group_shape
from mla_var3.kernel.cute_python.mla.latent.kernel import FlashMLASm90, FlashMLATiling
from mla_var3.kernel.cute_python.mla.latent.operands import (
    LatentOperands,
    LatentOptions,
    latent_arguments,
)
from tests.unit.runtime.cute.noting_driver import STREAM, linked_program, pointers_of

from .noted_calls import fp8_parts

B, S, H, SMS = 4, 2, 64, 132
TILES = S * H // ROWS


def paged_operands(
    device: str,
    b: int,
    s: int,
    h: int,
    fmt: str = "",
    element: torch.dtype = torch.bfloat16,
    schedule: bool = False,
) -> LatentOperands:
    """Operands for a paged cache, of an 8-bit format or else in 16 bits; perhaps of a step."""

    def zeros(*shape: int, dtype: torch.dtype = element) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    cache = {"latent": zeros(16, 64, 512), "rope": zeros(16, 64, 64)}
    if fmt:
        cache = fp8_parts(fmt, device, 16)
    return LatentOperands.allocate(
        (b, s, h), zeros(b, s, h, 512), zeros(b, s, h, 64), lengths=zeros(b, dtype=torch.int32),
        block_table=zeros(b, 4, dtype=torch.int32), **cache,
        schedule=zeros(SCHEDULE_SIZE, dtype=torch.int32) if schedule else None,
    )  # fmt: skip


def arguments(operands: LatentOperands, scheduled: bool = False) -> tuple[Any, ...]:
    """Arguments of the host entry, without the stream."""
    b, s, h = operands.lse.shape
    shape = group_shape(-(-s * h // ROWS), b, SMS)
    partials = latent_call.allocate_partials(operands.lse.device, SMS)
    options = LatentOptions(s, True, 0.1, scheduled=scheduled)
    return latent_arguments(operands, partials, options, shape)


def main() -> None:
    """Launch everything in order."""
    args = arguments(paged_operands("cpu", B, S, H))
    host = FlashMLASm90(latent_call.ELEMENT_TYPES[torch.bfloat16])
    program = linked_program(FlashMLASm90.flash_mla, host, args, FlashMLATiling())
    program(*args)
    pointers = pointers_of(args)
    repeated = program.repeated(*args)
    repeated(*pointers.values())
    assert repeated.on_stream(STREAM, [0], pointers)([pointers[0]])
    # The layers of a step: the first one's launch, and that of another.
    operands = paged_operands("cpu", B, S, H, schedule=True)
    args = arguments(operands)
    program = linked_program(FlashMLASm90.flash_mla, host, args, FlashMLATiling())
    program(*args)
    program(*arguments(operands, scheduled=True))


if __name__ == "__main__":
    main()
