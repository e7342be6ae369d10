"""CuTe DSL kernels compiled once for all workers of a test run, with the assembler's remarks.

`python -m tests.kernel.compile_once '["bfloat16"]'` compiles some of `VARIANTS`, writes "== <name>"
and the remarks to standard error, and reports, PTX and `stale_halves` as JSON to standard output. A
name of
`WHOLE_CALLS` stands for a program of `whole_launch.py`, which has no report.
"""

import contextlib
import copy
import fcntl
import functools
import inspect
import json
import os
import re
import sys
import types
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from mla_var3.kernel.cute_python.mla.hopper.constants import FP8_FORMATS
from mla_var3.runtime.compile import CompileReport, compile_report, disassemble
from mla_var3.runtime.paths import find_kernel, plan_class
from mla_var3.runtime.plan import Constraints, Tiling
from tests.programs import run_program

SMALL: dict[str, Any] = {"b": 2, "s": 2, "t": 300, "h": 64, "seed": 0}
LATENT, DECOMPRESSED, COMBINE = "flash_mla", "decompressed_attention", "decompress_combine"
PROJECTION, LATENT_FP8 = "project_queries", "latent_fp8"
SCHEDULE = "schedule"
RING = {"ring": "mla_var6_plus", "8-bit ring": "mla_var6_plus_v5"}
"""Plans of a mix whose window is a ring."""

Variant = tuple[str, str, dict[str, Any], dict[str, Any]]
"""A kernel, its plan, the plan's fields and the kernel's tiling."""


def latent(few: int = 0, **fields: Any) -> Variant:
    return LATENT, "flash_mla", fields, {"few": few}


def heads(
    plan: str = "flash_attention", splits: int = 1, kv_block: int = 0, **fields: Any
) -> Variant:
    return DECOMPRESSED, plan, fields, {"splits": splits, "kv_block": kv_block}


VARIANTS: dict[str, Variant] = {
    "bfloat16": latent(page=64),
    "float16, sliding window": latent(dtype="float16", sliding_window=100, page=64),
    "few": latent(few=8, s=1, h=8, page=64),
    "p=0, empty positive": latent(p=0),
    "few, empty positive": latent(few=16, s=1, h=16),
    "k=256, p=64": latent(k=256),
    "k=256, p=32": latent(k=256, p=32, page=64),
    "few, k=256, p=32, overlap second": latent(few=16, k=256, p=32, s=1, h=16),
    "few, sliding window, overlap first": latent(few=16, sliding_window=100, s=1, h=16),
    "heads": heads(),
    "tiles": heads(s=100),
    "split": heads(splits=3),
    "long blocks": heads(s=100, kv_block=128),
    "d=192, v=256": heads(d=192, v=256),
    "d=192, v=256, tiles": heads(d=192, v=256, s=100),
    "d=256, p=0, split": heads(splits=3, d=256, p=0, v=256),
    "d=64, v=128": heads(d=64, v=128, k=256),
    "d=64, p=32, tiles": heads(d=64, p=32, k=256, s=100),
    "8 bits": heads("mla_var6_plus_v5", n=100),
    "prefix": heads("mla_var6_plus_v6", prefix=100, s=40),
    "ring, heads": heads("ring", n=128),
    "ring, tiles": heads("ring", n=128, s=100),
    "8 bits, ring, split": heads("8-bit ring", splits=2, n=128),
    "8 bits, ring, 48 columns": heads("8-bit ring", n=128, s=40),
    "8 bits, ring, tiles": heads("8-bit ring", n=128, s=100),
    "mix": (COMBINE, "mla_var6_plus", {"n": 100}, {}),
    "queries": (PROJECTION, "bfloat16", {}, {}),
    "queries, d=64": (PROJECTION, "bfloat16", {"d": 64, "k": 256}, {}),
    "queries, d=192": (PROJECTION, "bfloat16", {"d": 192}, {}),
    "queries, d=256": (PROJECTION, "bfloat16", {"d": 256}, {}),
    "outputs": (COMBINE, "bfloat16", {"columns": 128}, {}),
    "outputs, half": (COMBINE, "bfloat16", {"columns": 64}, {}),
    "outputs, quarter": (COMBINE, "bfloat16", {"columns": 32}, {}),
    "outputs, v=256": (COMBINE, "bfloat16", {"columns": 128, "v": 256}, {}),
    "outputs, k=256": (COMBINE, "bfloat16", {"columns": 64, "k": 256, "v": 64}, {}),
    **{
        f"latent {fmt}, {columns} columns": (LATENT_FP8, fmt, {"columns": columns}, {})
        for fmt in FP8_FORMATS
        for columns in (16, 48, 64)
    },
    SCHEDULE: latent(page=64),
    "latent fp8, 64 columns, schedule": (LATENT_FP8, "fp8", {"columns": 64, "schedule": True}, {}),
    "latent fp8, float16": (LATENT_FP8, "fp8", {"columns": 64, "dtype": torch.float16}, {}),
}
"""A ring is a plan of `RING` on a window that is one. The projections of whole calls have no plan:
their dtype, widths and columns per CTA. Nor has the latent kernel on 8-bit caches: format, columns
of the second product.

One variant for each path through the device code. One stands for its neighbours where they differ
in the element type, in a number between those of two others, or in a comparison or a wait, and has
several options where these meet in no line of the device code."""

WITHOUT, WITH = {"clusters": False}, {"clusters": True}
HOST: dict[str, dict[str, Any]] = {
    "float16, sliding window": WITHOUT,
    "few": {**WITH, "early": True},
    "p=0, empty positive": {**WITHOUT, "empty_positive": True},
    "few, empty positive": {**WITH, "empty_positive": True},
    "k=256, p=64": WITHOUT,
    "k=256, p=32": WITH,
    "few, k=256, p=32, overlap second": {**WITHOUT, "overlap": "second"},
    "few, sliding window, overlap first": {**WITHOUT, "overlap": "first"},
    "latent fp8_per_token, 16 columns": WITH,
    "latent fp8_per_token, 48 columns": WITH,
    "latent fp8_per_token, 64 columns": WITHOUT,
    "latent fp8, 16 columns": WITHOUT,
    "latent fp8, 48 columns": WITHOUT,
    "latent fp8, 64 columns": WITH,
    "latent fp8, float16": WITHOUT,
    "latent fp8, 64 columns, schedule": WITHOUT,
}
"""What the host code of a variant is told. A latent program has two kernels, without and with
clusters; one of them is compiled where other variants have the other."""

WHOLE_CALLS = {"whole call": "", "whole call in 8 bits": "fp8"}
"""Programs of `whole_launch.py` -> format of the cache. Their attention alone is `few` and
`latent fp8, 16 columns`."""


class Compiled:
    """All variants, compiled once.

    Attributes:
        reports: compile reports by variant.
        ptx: what the assembler got, by variant.
        stale: `stale_halves` by variant of the latent kernel on 8-bit caches.
        remarks: what it remarked.
        cache: folder of the compiled code.
    """

    def __init__(
        self,
        reports: dict[str, Any],
        ptx: dict[str, str],
        stale: dict[str, list[str]],
        remarks: str,
        cache: Path,
    ) -> None:
        self.cache, self.ptx, self.stale = cache, ptx, stale
        self.reports = {name: CompileReport.from_dict(values) for name, values in reports.items()}
        parts = re.split(r"^== (.+)$", remarks, flags=re.MULTILINE)
        self.remarks = dict(zip(parts[1::2], parts[2::2], strict=True))


def compile_once(
    root: Path, environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Compiled:
    """Compile `VARIANTS` in processes whose environment asks for the assembler's remarks.

    The first worker of a parallel run compiles, the others wait for it.

    Args:
        root: top folder of the checkout.
        environment: of a process that finds the package.
        tmp_path_factory: pytest's.
    """
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "cute-kernels"
    folder.mkdir(exist_ok=True)
    cache, result = folder / "cache", folder / "result.json"

    def run(names: list[str]) -> tuple[dict[str, Any], dict[str, str], dict[str, list[str]], str]:
        done = run_program(
            [sys.executable, "-m", "tests.kernel.compile_once", json.dumps(names)],
            env={
                **environment,
                "HYPER_MLA_CACHE_DIR": str(cache),
                "CUTE_DSL_COMPILER_OPT": "remarks{ptx}",
                "PYTHONPATH": os.pathsep.join([environment["PYTHONPATH"], *filter(None, sys.path)]),
            },
            cwd=root,
            timeout=1800,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return *json.loads(done.stdout.splitlines()[-1]), done.stderr

    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not result.is_file():
            # Two processes: as many as the cores of the machines that run the tests.
            with ThreadPoolExecutor() as pool:
                parts = pool.map(run, halves(longest_first()))
                *found, remarks = zip(*parts, strict=True)
            merged = {
                name: first | second
                for name, (first, second) in zip(("reports", "ptx", "stale"), found, strict=True)
            }
            result.write_text(json.dumps({**merged, "remarks": "".join(remarks)}))
    return Compiled(**json.loads(result.read_text()), cache=cache)


@functools.cache
def _module_code(path: str) -> types.CodeType:
    return compile(Path(path).read_text(), path, "exec")


def as_written(function: Any) -> Any:
    """A device function for plain numbers.

    From its source: tracing a program replaces the code of the functions that it uses.
    """
    plain = inspect.unwrap(function)
    codes = _module_code(plain.__code__.co_filename).co_consts
    code = next(one for one in codes if getattr(one, "co_name", "") == plain.__name__)
    return types.FunctionType(code, plain.__globals__, plain.__name__, plain.__defaults__)


def longest_first() -> list[str]:
    """All there is to compile: two latent kernels in a program, one, and the others."""

    def rank(name: str) -> int:
        if VARIANTS[name][0] not in (LATENT, LATENT_FP8):
            return 2
        return int("clusters" in HOST.get(name, {}))

    return [*WHOLE_CALLS, *sorted(VARIANTS, key=rank)]


def halves(names: list[str]) -> list[list[str]]:
    return [names[0::2], names[1::2]]


@dataclass
class AnyTiling(Tiling):
    """For kernels that have no tiling of their own."""

    def validate(self, pd: Any) -> Constraints:
        return Constraints()


def kernel_without_plan(kernel_fn: Any, host: Any, arguments: tuple[Any, ...]) -> Any:
    """A kernel to compile, with its host function and arguments."""
    from mla_var3.runtime.cute_kernel import CuteKernel

    return CuteKernel(
        kernel_fn=kernel_fn, host_fn=lambda tiling: copy.copy(host),
        args_fn=lambda tiling: arguments, requires_arch="sm_90a", tiling=AnyTiling(),
        input_tensors=[], output_tensors=[], algorithmic_flops_bytes_fn=lambda tiling: (0.0, 0.0),
    )  # fmt: skip


def projection_kernel(wanted: str, dtype: str, **constants: int) -> Any:
    """The kernel of a projection, as whole calls launch it."""
    from mla_var3.kernel.cute_python.mla.latent.call import ELEMENT_TYPES
    from mla_var3.kernel.cute_python.mla.projections.outputs import DecompressCombineSm90
    from mla_var3.kernel.cute_python.mla.projections.queries import ProjectQueriesSm90

    rows = torch.empty(8, dtype=getattr(torch, dtype), device="meta")
    element = ELEMENT_TYPES[rows.dtype]
    host: Any = ProjectQueriesSm90(element, **constants) if wanted == PROJECTION else None
    arguments: tuple[Any, ...] = (rows, rows, rows, 1, 1, 1)
    if wanted == COMBINE:
        host = DecompressCombineSm90(element, True, **constants)
        arguments = (rows, rows, None, None, None, rows, None, 1, 1, 1)
    return kernel_without_plan(getattr(type(host), wanted), host, arguments)


def fp8_kernel(
    fmt: str, columns: int, dtype: torch.dtype = torch.bfloat16, schedule: bool = False
) -> Any:
    """The latent kernel on pages of an 8-bit format, as whole calls or layers launch it."""
    from mla_var3.kernel.cute_python.mla.latent.call import ELEMENT_TYPES
    from mla_var3.kernel.cute_python.mla.latent_fp8.kernel import LatentFp8Sm90

    from . import noted_launch

    operands = noted_launch.paged_operands("meta", 2, 1, columns, fmt, dtype, schedule)
    per_token = fmt == "fp8_per_token"
    host = LatentFp8Sm90(ELEMENT_TYPES[dtype], columns, per_token, early=not schedule)
    return kernel_without_plan(LatentFp8Sm90.latent_fp8, host, noted_launch.arguments(operands))


def stage_of(name: str, fields: dict[str, Any]) -> Any:
    """The stage of a plan on tensors without memory."""
    cls: Any = plan_class(find_kernel(RING.get(name, name), language="cute-dsl"))
    plan = cls(**{**SMALL, **fields}).for_target("sm_90")
    if name in RING:
        return plan.plan_parts(*ring_operands(plan))
    return plan.plan(*plan.prepare_inputs("meta"))


def ring_operands(plan: Any) -> tuple[Any, Any, torch.Tensor]:
    """Operands of `plan_parts` whose window is a ring, on tensors without memory."""
    from mla_var3.kernel.cute_python.mla.decompressed.stage import DecompressedOperands
    from mla_var3.kernel.cute_python.mla.mix.plan import LatentTokens

    inputs = plan.prepare_inputs("meta")
    q_nope, q_latent, q_rope, c_kv, k_rope, keys, values, *scales, rope, w_uv, lengths = inputs
    latent = LatentTokens(q_latent, q_rope, c_kv, k_rope, lengths, seen_by_all=True)
    tensors = q_nope, q_rope, keys, values, rope, lengths, *scales
    return latent, DecompressedOperands(*tensors, starts=lengths.clone()), w_uv


def kernel_of(variant: str) -> Any:
    """The kernel of one of `VARIANTS`."""
    from . import noted_launch

    wanted, name, fields, tiling = VARIANTS[variant]
    if hasattr(torch, name):
        kernel = projection_kernel(wanted, name, **fields)
    elif wanted == LATENT_FP8:
        kernel = fp8_kernel(name, **fields)
    else:
        [kernel] = [k for k in stage_of(name, fields).kernels() if k.name == wanted]
    if variant == SCHEDULE:  # as layers of a step launch it
        operands = noted_launch.paged_operands("meta", 2, 2, 64, schedule=True)
        kernel.args_fn = lambda tiling: noted_launch.arguments(operands)
    if tiling:
        kernel.tiling = type(kernel.tiling)(**tiling)
    if variant in HOST:
        host = kernel.host_fn(kernel.tiling)
        vars(host).update(HOST[variant])
        kernel.host_fn = lambda tiling: copy.copy(host)
    return kernel


def main(names: list[str]) -> None:
    """Compile some variants for sm_90."""
    from cutlass.base_dsl import dsl

    from mla_var3.runtime import cute_kernel

    from . import whole_launch

    cute_kernel.quiet_compiler = contextlib.nullcontext
    # Remarks make the compiler look up the source line of every operation, a fifth of its time.
    dsl._set_enable_frame_filtering = lambda wanted: None
    reports, ptx, stale = {}, {}, {}
    for variant in names:
        print(f"== {variant}", file=sys.stderr, flush=True)
        if variant in WHOLE_CALLS:
            kernel_fn, host, args, made_for = whole_launch.programs(WHOLE_CALLS[variant])[0]
            kinds = cute_kernel.kinds_of(args)
            cute_kernel.compile_program(kernel_fn, host, kinds, made_for, "sm_90a")
            continue
        kernel, wanted = kernel_of(variant), VARIANTS[variant][0]
        reports[variant] = compile_report(kernel, "sm_90").to_dict()
        compiled = kernel.compile("sm_90")
        ptx[variant] = compiled.artifacts[f"{wanted}.ptx"].decode()
        if wanted == LATENT_FP8:
            stale[variant] = stale_halves(disassemble(compiled.cubin).sass)
    print(json.dumps([reports, ptx, stale]))


def stale_halves(sass: str) -> list[str]:
    """Conversions to e4m3 that keep half of a register into which none has been written before.

    Four numbers become a word in two conversions, of which the second keeps the result of the
    first. An assembler's mistake let one keep what no instruction had written.
    """
    lines = re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s+(.*?);", sass, re.MULTILINE)
    pack = re.compile(r"F2FP\.\S*E4M3\.F32\.PACK_AB_MERGE_C (R\d+), \S+, \S+, (R\w+)")
    found, written = [], {"RZ"}
    for line in lines:
        if match := pack.search(line):
            result, kept = match.groups()
            found += [line] if kept not in written else []
            written.add(result)
    return found


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
