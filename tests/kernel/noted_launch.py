"""Launches the absorbed attention on a driver that only notes, see `noting_driver.py`.

Once with tensors, then twice by addresses.
"""

from __future__ import annotations

from typing import Any

import torch

from mla_var3.kernel.cute_python.mla.flash_mla.flash_mla import flash_mla
from mla_var3.kernel.cute_python.mla.latent import call as latent_call
from mla_var3.kernel.cute_python.mla.latent.scheduler import group_shape
from tests.unit.runtime.cute.noting_driver import STREAM, addresses_of, program_for_step

B, S, H, SMS = 4, 2, 64, 132
TILES = S * H // 64


def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def arguments() -> tuple[Any, ...]:
    """Arguments of the host function, without the stream."""
    partials = latent_call.allocate_partials(torch.device("cpu"), SMS)
    out, lse = zeros(B, S, H, 512), zeros(B, S, H, dtype=torch.float32)
    index = torch.int32
    return latent_call.attention_arguments(
        zeros(B, S, H, 512), zeros(B, S, H, 64), zeros(16, 64, 512), zeros(16, 64, 64),
        zeros(B, 4, dtype=index), zeros(B, dtype=index), None, None, out, lse, partials,
        0.1, S, H, True, group_shape(TILES, B, SMS),
    )  # fmt: skip


def main() -> None:
    """Compile, or launch everything in order."""
    args = arguments()
    host = flash_mla.FlashMLASm90(latent_call.ELEMENT_TYPES[torch.bfloat16])
    tiling = flash_mla.FlashMLATiling()
    program = program_for_step(flash_mla.FlashMLASm90.flash_mla, host, args, tiling)
    if program is None:
        return
    program(*args)
    addresses = addresses_of(args)
    repeated = program.repeated(*args)
    repeated(*addresses)
    assert repeated.on_stream(STREAM, *addresses[10:])(addresses[:10])


if __name__ == "__main__":
    main()
