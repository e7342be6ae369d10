"""Launches the absorbed attention on the CPU, on a driver that only notes; see the test.

    python -m tests.kernel.noted_launch compile
    CUTE_DSL_LIBS=libdriver.so python -m tests.kernel.noted_launch launch

The first compiles into the cache; with another driver than the compiler's own that is not possible.
The second launches once with tensors, then twice by addresses.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from mla_var3.kernel.cute_python.mla import latent_call
from mla_var3.kernel.cute_python.mla.flash_mla.flash_mla import flash_mla
from mla_var3.kernel.cute_python.mla.schedule import gang_shape
from mla_var3.runtime import cute_kernel, cute_launch
from mla_var3.runtime.cute_arguments import kinds_of
from mla_var3.runtime.cute_launch import CuteProgram, short_entry

B, S, H, SMS = 4, 2, 64, 132
TILES = S * H // 64
NO_GPU, STREAM = -1, 4711


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
        0.1, S, H, True, gang_shape(TILES, B, SMS),
    )  # fmt: skip


def main() -> None:
    """Compile, or launch everything in order."""
    args = arguments()
    kinds = kinds_of(args)
    kernel_fn = flash_mla.FlashMLASm90.flash_mla
    host = flash_mla.FlashMLASm90(latent_call.ELEMENT_TYPES[torch.bfloat16])
    key = cute_kernel._key(kernel_fn, host, kinds, flash_mla.FlashMLATiling(), "sm_90a")
    compiled = cute_kernel._compile(key, host, kinds)
    if sys.argv[1] == "compile":
        return
    cute_launch.current_device_index = lambda: NO_GPU
    cute_launch.raw_stream = lambda device: STREAM
    function = cute_kernel._link(key, compiled)
    program = CuteProgram(key.name, kinds, NO_GPU, short_entry(function.capi_func), (function,))
    program(*args)
    pointers = [arg for arg in args if arg is None or isinstance(arg, torch.Tensor)]
    addresses = [0 if arg is None else arg.data_ptr() for arg in pointers]
    repeated = program.repeated(*args)
    repeated(*addresses)
    assert repeated.on_stream(STREAM, *addresses[10:])(*addresses[:10])


if __name__ == "__main__":
    main()
