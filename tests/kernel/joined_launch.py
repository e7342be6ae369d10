"""Launches the attention and its merge on the CPU, on a driver that only notes; see the test.

    python -m tests.kernel.joined_launch compile
    CUTE_DSL_LIBS=libdriver.so python -m tests.kernel.joined_launch launch

The first compiles into the cache; with another driver than the compiler's own that is not possible.
The second launches one by one, then both in one, then twice more by addresses.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from mla_var3.kernel.cute_python.mla import latent_call
from mla_var3.kernel.cute_python.mla.flash_mla.flash_mla import flash_mla
from mla_var3.kernel.cute_python.mla.merge_partials import MergePartials, MergeTiling
from mla_var3.kernel.cute_python.mla.schedule import gang_shape
from mla_var3.runtime import cute_kernel, cute_launch
from mla_var3.runtime.cute_arguments import kinds_of
from mla_var3.runtime.cute_launch import CuteProgram, short_entry

B, S, H, SMS = 4, 2, 64, 132
NO_GPU, STREAM = -1, 4711


def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def programs(link: bool) -> list[tuple[CuteProgram | None, tuple[Any, ...]]]:
    """Attention, merge and both, each with its arguments; None for programs without linking."""
    partials = latent_call.allocate_partials(torch.device("cpu"), SMS)
    out, lse = zeros(B, S, H, 512), zeros(B, S, H, dtype=torch.float32)
    shape = gang_shape(S * H // 64, B, SMS)
    index = torch.int32
    attention = latent_call.attention_arguments(
        zeros(B, S, H, 512), zeros(B, S, H, 64), zeros(16, 64, 512), zeros(16, 64, 64),
        zeros(B, 4, dtype=index), zeros(B, dtype=index), None, None, out, lse, partials,
        0.1, S, H, True, shape,
    )  # fmt: skip
    blocks = SMS * latent_call.MERGE_TILING.blocks_per_sm
    merge = (*partials, out, lse, lse.numel(), shape.gang, shape.parts, blocks)
    element, host = latent_call.ELEMENT_TYPES[torch.bfloat16], flash_mla.FlashMLASm90
    both = latent_call.AttentionAndMerge(host, element, 0)
    made: list[tuple[CuteProgram | None, tuple[Any, ...]]] = []
    for kernel_fn, host_fn, args, tiling in (
        (host.flash_mla, host(element, 0), attention, flash_mla.FlashMLATiling()),
        (MergePartials.merge_partials, MergePartials(element), merge, MergeTiling()),
        (host.flash_mla, both, (*attention, blocks), flash_mla.FlashMLATiling()),
    ):
        kinds = kinds_of(args)
        key = cute_kernel._key(kernel_fn, host_fn, kinds, tiling, "sm_90a")
        compiled = cute_kernel._compile(key, host_fn, kinds)
        program = None
        if link:
            function = cute_kernel._link(key, compiled)
            entry = short_entry(function.capi_func)
            program = CuteProgram(key.name, kinds, NO_GPU, entry, (function,))
        made.append((program, args))
    return made


def main() -> None:
    """Compile, or launch everything in order."""
    if sys.argv[1] == "compile":
        programs(link=False)
        return
    cute_launch.current_device_index = lambda: NO_GPU
    cute_launch.raw_stream = lambda device: STREAM
    made = programs(link=True)
    for program, args in made:
        assert program is not None
        program(*args)
    program, args = made[-1]
    assert program is not None
    pointers = [arg for arg in args if arg is None or isinstance(arg, torch.Tensor)]
    addresses = [0 if arg is None else arg.data_ptr() for arg in pointers]
    repeated = program.repeated(*args)
    repeated(*addresses)
    assert repeated.on_stream(STREAM, *addresses[10:])(*addresses[:10])


if __name__ == "__main__":
    main()
