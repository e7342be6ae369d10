"""Launches a whole call on a driver that only notes, see `noting_driver.py`.

Once for each of `SIZES`, then the first of them by addresses: all of them, and with those between
the steps fixed.
"""

from __future__ import annotations

from typing import Any

import torch

from mla_var3.kernel.cute_python.mla.hopper.constants import ROWS
from mla_var3.kernel.cute_python.mla.latent import call as latent_call
from mla_var3.kernel.cute_python.mla.latent import whole_call
from mla_var3.kernel.cute_python.mla.latent.kernel import FlashMLASm90, FlashMLATiling
from mla_var3.kernel.cute_python.mla.latent.scheduler import group_shape
from tests.unit.runtime.cute.noting_driver import STREAM, addresses_of, program_for_step

SIZES = ((4, 2, 64), (3, 2, 16), (5, 1, 128), (129, 1, 16))
"""Requests, queries and heads."""
SMS = 132
CHANGING = 12
"""Addresses that every call brings, before those between the steps."""


def arguments(device: str, b: int, s: int, h: int) -> tuple[Any, ...]:
    """Arguments of the host function for a paged cache, without the stream."""

    def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    partials = latent_call.allocate_partials(torch.device(device), SMS)
    attention = latent_call.attention_arguments(
        zeros(b, s, h, 512), zeros(b, s, h, 64), zeros(16, 64, 512), zeros(16, 64, 64),
        zeros(b, 4, dtype=torch.int32), zeros(b, dtype=torch.int32), None, None,
        zeros(b, s, h, 512), zeros(b, s, h, dtype=torch.float32), partials, 0.1, s, h, True,
        group_shape(-(-s * h // ROWS), b, SMS),
    )  # fmt: skip
    weights = zeros(h, 128, 512), zeros(h, 512, 128)
    return whole_call.whole_arguments(
        attention, zeros(b, s, h, 128), *weights, zeros(b, s, h, 128), SMS
    )


def host(few: int = 0) -> whole_call.WholeCall:
    element = latent_call.ELEMENT_TYPES[torch.bfloat16]
    return whole_call.WholeCall(element, few)


def main() -> None:
    """Compile, or launch everything in order."""
    given = [arguments("cpu", *sizes) for sizes in SIZES]
    args = given[0]
    program = program_for_step(FlashMLASm90.flash_mla, host(), args, FlashMLATiling())
    if program is None:
        return
    for each in given:
        program(*each)
    addresses = addresses_of(args)
    repeated = program.repeated(*args)
    repeated(*addresses)
    assert repeated.on_stream(STREAM, *addresses[CHANGING:])(addresses[:CHANGING])


if __name__ == "__main__":
    main()
