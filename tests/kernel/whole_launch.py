"""Launches a whole call on a driver that only records, see `noting_driver.py`.

Once for each of `SIZES`, then the first of them by pointers: all of them, and with the workspace
fixed. Last the first of them on a cache in 8 bits.
"""

from typing import Any

import torch

from mla_var3.kernel.cute_python.mla.latent import call as latent_call
from mla_var3.kernel.cute_python.mla.latent import whole_call
from mla_var3.kernel.cute_python.mla.latent.operands import (
    WHOLE_FIELDS,
    LatentOperands,
    LatentOptions,
    ProjectionOperands,
    ProjectionSizes,
    groups_of,
)
from mla_var3.kernel.cute_python.mla.latent.programs import latent_program
from tests.unit.runtime.cute.noting_driver import STREAM, linked_program, pointers_of

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


def programs(fmt: str) -> list[tuple[Any, Any, tuple[Any, ...], Any]]:
    """Kernel function, host, arguments and tiling: of a whole call, and of its attention alone.

    For few rows, the other one with clusters in either format. Sizes are arguments of a program.
    """
    args = arguments("meta", 2, 1, 16 if fmt else 8, fmt)
    _, _, attention = groups_of(args, ProjectionOperands, ProjectionSizes)
    operands, _ = groups_of(attention, LatentOperands)
    kernel_fn, host, tiling, constants = latent_program(operands, LatentOptions(1, True, 0.1))
    element = latent_call.ELEMENT_TYPES[torch.bfloat16]
    whole = whole_call.WholeCall(element, host, **constants)
    alone = host(element, early=True, **{**constants, "clusters": not fmt})
    return [(kernel_fn, whole, args, tiling), (kernel_fn, alone, attention, tiling)]


def linked(fmt: str, args: tuple[Any, ...]) -> Any:
    kernel_fn, host, _, tiling = programs(fmt)[0]
    return linked_program(kernel_fn, host, args, tiling)


def main() -> None:
    """Launch everything in order."""
    given = [arguments("cpu", *sizes) for sizes in SIZES]
    args = given[0]
    program = linked("", args)
    for each in given:
        program(*each)
    pointers = pointers_of(args)
    repeated = program.repeated(*args)
    repeated(*pointers.values())
    places = [WHOLE_FIELDS.index(name) for name in ("q_latent", "o_latent")]
    fixed = {place: pointers[place] for place in places}
    changing = {place: pointer for place, pointer in pointers.items() if place not in fixed}
    assert repeated.on_stream(STREAM, list(changing), fixed)(list(changing.values()))
    in_8_bits = arguments("cpu", *SIZES[0], "fp8")
    linked("fp8", in_8_bits)(*in_8_bits)


if __name__ == "__main__":
    main()
