"""Compiles the programs of a test module in several processes, before its first launch.

Compiling needs no GPU. The launches then find the programs in the cache on the disk.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch

TARGET = "sm_90a"
MOST_PROCESSES = 12


def compile_ahead(jobs: Sequence[tuple[Callable[..., None], tuple[Any, ...]]]) -> None:
    """Run jobs in processes of their own; each is a function of a module and its arguments."""
    workers = min(MOST_PROCESSES, len(jobs), os.cpu_count() or 1)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        for done in [pool.submit(function, *arguments) for function, arguments in jobs]:
            done.result()


def compile_stage(kernel: str, fields: dict[str, Any]) -> None:
    """Compile the kernels of a plan in CuTe DSL."""
    from mla_var3.runtime.paths import find_kernel, plan_class

    cls: Any = plan_class(find_kernel(kernel, language="cute-dsl"))
    plan = cls(**fields).for_target("sm_90")
    for stage in plan.plan(*plan.prepare_inputs("meta")).kernels():
        stage.compile("sm_90")


def compile_call(sizes: dict[str, int], **options: Any) -> None:
    """Compile the program of a latent call, or of a whole call where `sizes` has d and v.

    Args:
        sizes: b, s, h, k and p; perhaps d and v.
        options: `paged` and `packed`, whether there is a block table and `cu_seqlens_q`; others are
            those of `LatentOptions`.
    """
    from mla_var3.kernel.cute_python.mla.flash_mla.flash_mla import flash_mla
    from mla_var3.kernel.cute_python.mla.latent import call as latent_call
    from mla_var3.kernel.cute_python.mla.latent.operands import (
        LatentOperands,
        LatentOptions,
        ProjectionOperands,
    )
    from mla_var3.runtime.cute.arguments import kinds_of
    from mla_var3.runtime.cute_kernel import compile_program

    class Compiled:
        """Stands for a program that nobody launches."""

        def __call__(self, *args: Any) -> None:
            pass

        def repeated(self, *args: Any) -> None:
            pass

    def program_for(kernel_fn: Any, host: Any, args: Any, tiling: Any, device: Any) -> Compiled:
        compile_program(kernel_fn, host, kinds_of(args), tiling, TARGET)
        return Compiled()

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    latent: Any = latent_call
    latent.program_for, latent.require_arch = program_for, lambda *args: None
    latent.sm_count_of = lambda index: 132
    latent.partials_for = lambda device, sms, overlap: latent.allocate_partials(device, sms)
    b, s, h, k, p = (sizes[name] for name in ("b", "s", "h", "k", "p"))
    paged, packed = options.pop("paged", False), options.pop("packed", False)
    rows, slots = (b * s, h) if packed else (b, s, h), (8, 64) if paged else (b, 64)
    int32 = {"dtype": torch.int32}
    operands = LatentOperands.allocate(
        rows, empty(*rows, k), empty(*rows, p) if p else None, empty(*slots, k),
        empty(*slots, p) if p else None, empty(b, **int32),
        empty(b, 1, **int32) if paged else None,
        cu_seqlens_q=empty(b + 1, **int32) if packed else None,
    )  # fmt: skip
    given = LatentOptions(s, True, 0.1, **options)
    if "d" not in sizes:
        flash_mla.attend(operands, given)
        return
    d, v = sizes["d"], sizes["v"]
    projections = ProjectionOperands(
        empty(h, d, k), empty(h, k, v), empty(*rows, d), empty(*rows, v)
    )
    assert flash_mla.whole.serves(projections)
    flash_mla.whole.attend(projections, operands, given)
