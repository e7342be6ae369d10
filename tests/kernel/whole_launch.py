"""Launches a whole call on a driver that only records, see `noting_driver.py`.

Once for each of `SIZES`, then the first of them by pointers: all of them, and with the workspace
fixed. Last the first of them on a cache in 8 bits.
"""

from typing import Any

import torch

from mla_var3.kernel.cute_python.mla.latent import call as latent_call
from mla_var3.kernel.cute_python.mla.latent import whole_call
from mla_var3.kernel.cute_python.mla.latent.kernel import FlashMLASm90, FlashMLATiling
from mla_var3.kernel.cute_python.mla.latent.operands import WHOLE_FIELDS, ProjectionOperands
from mla_var3.kernel.cute_python.mla.latent_fp8.kernel import LatentFp8Sm90
from tests.unit.runtime.cute.noting_driver import STREAM, pointers_of, program_for_step

from . import noted_launch
from .noted_launch import SMS

SIZES = ((4, 2, 64), (3, 2, 16), (5, 1, 128), (129, 1, 16))
"""Requests, queries and heads."""


def arguments(device: str, b: int, s: int, h: int, fmt: str = "") -> tuple[Any, ...]:
    """Arguments of the host entry for a paged cache, without the stream."""

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.bfloat16, device=device)

    projections = ProjectionOperands(
        zeros(h, 128, 512), zeros(h, 512, 128), zeros(b, s, h, 128), zeros(b, s, h, 128)
    )
    latent = noted_launch.arguments(noted_launch.paged_operands(device, b, s, h, fmt))
    return whole_call.whole_arguments(projections, latent, SMS)


def host(attention: Any, **constants: Any) -> whole_call.WholeCall:
    element = latent_call.ELEMENT_TYPES[torch.bfloat16]
    return whole_call.WholeCall(element, attention, **constants)


def main() -> None:
    """Compile, or launch everything in order."""
    given = [arguments("cpu", *sizes) for sizes in SIZES]
    args = given[0]
    program = program_for_step(FlashMLASm90.flash_mla, host(FlashMLASm90), args, FlashMLATiling())
    in_8_bits = arguments("cpu", *SIZES[0], "fp8_per_token")
    program_in_8_bits = program_for_step(
        LatentFp8Sm90.latent_fp8, host(LatentFp8Sm90), in_8_bits, FlashMLATiling()
    )
    if program is None or program_in_8_bits is None:
        return
    for each in given:
        program(*each)
    pointers = pointers_of(args)
    repeated = program.repeated(*args)
    repeated(*pointers.values())
    places = [WHOLE_FIELDS.index(name) for name in ("q_latent", "o_latent")]
    fixed = {place: pointers[place] for place in places}
    changing = {place: pointer for place, pointer in pointers.items() if place not in fixed}
    assert repeated.on_stream(STREAM, list(changing), fixed)(list(changing.values()))
    program_in_8_bits(*in_8_bits)


if __name__ == "__main__":
    main()
