"""Launches a whole call on the CPU, on a driver that only notes; see the test.

    python -m tests.kernel.whole_launch compile
    CUTE_DSL_LIBS=libdriver.so python -m tests.kernel.whole_launch launch

The first compiles into the cache; with another driver than the compiler's own that is not possible.
The second launches once for each of `SIZES`, then the first of them by addresses: all of them, and
with those between the steps fixed.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from mla_var3.kernel.cute_python.mla import latent_call, whole_call
from mla_var3.kernel.cute_python.mla.absorbed_attention import FlashMLASm90, FlashMLATiling
from mla_var3.kernel.cute_python.mla.schedule import ROWS, gang_shape
from mla_var3.runtime import cute_kernel, cute_launch
from mla_var3.runtime.cute_arguments import kinds_of
from mla_var3.runtime.cute_launch import CuteProgram, short_entry

SIZES = ((4, 2, 64), (3, 2, 16), (5, 1, 128), (129, 1, 16))
"""Requests, queries and heads."""
SMS = 132
NO_GPU, STREAM = -1, 4711
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
        gang_shape(-(-s * h // ROWS), b, SMS),
    )  # fmt: skip
    weights = zeros(h, 128, 512), zeros(h, 512, 128)
    return whole_call.whole_arguments(
        attention, zeros(b, s, h, 128), *weights, zeros(b, s, h, 128), SMS
    )


def host(few: int = 0) -> whole_call.WholeCall:
    element = latent_call.ELEMENT_TYPES[torch.bfloat16]
    return whole_call.WholeCall(FlashMLASm90, element, few)


def main() -> None:
    """Compile, or launch everything in order."""
    given = [arguments("cpu", *sizes) for sizes in SIZES]
    args = given[0]
    kinds, made = kinds_of(args), host()
    key = cute_kernel._key(FlashMLASm90.flash_mla, made, kinds, FlashMLATiling(), "sm_90a")
    compiled = cute_kernel._compile(key, made, kinds)
    if sys.argv[1] == "compile":
        return
    cute_launch.current_device_index = lambda: NO_GPU
    cute_launch.raw_stream = lambda device: STREAM
    function = cute_kernel._link(key, compiled)
    program = CuteProgram(key.name, kinds, NO_GPU, short_entry(function.capi_func), (function,))
    for each in given:
        program(*each)
    pointers = [arg for arg in args if arg is None or isinstance(arg, torch.Tensor)]
    addresses = [0 if arg is None else arg.data_ptr() for arg in pointers]
    repeated = program.repeated(*args)
    repeated(*addresses)
    assert repeated.on_stream(STREAM, *addresses[CHANGING:])(*addresses[:CHANGING])


if __name__ == "__main__":
    main()
