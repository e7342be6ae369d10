"""CuTe DSL kernels compiled once for all workers of a test run, with what the assembler said."""

from __future__ import annotations

import fcntl
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from mla_var3.runtime.compile import CompileReport

SERIALISED = re.compile(r"C75\d\d\b|wgmma\S* instructions are serialized", re.IGNORECASE)
"""How the assembler says that matrix products wait for each other (C7510, C7512, C7515, C7520)."""


SMALL: dict[str, Any] = {"b": 2, "s": 2, "t": 300, "h": 64, "seed": 0}
LATENT, DECOMPRESSED, COMBINE = "flash_mla", "decompressed_attention", "decompress_combine"
RING = "ring"

VARIANTS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "bfloat16": (LATENT, "flash_mla", {}, {}),
    "float16": (LATENT, "flash_mla", {"dtype": "float16"}, {}),
    "paged": (LATENT, "flash_mla", {"page": 64}, {}),
    "heads": (DECOMPRESSED, "flash_attention", {}, {"splits": 1}),
    "heads float16": (DECOMPRESSED, "flash_attention", {"dtype": "float16"}, {"splits": 1}),
    "tiles": (DECOMPRESSED, "flash_attention", {"s": 100}, {"splits": 1}),
    "split": (DECOMPRESSED, "flash_attention", {}, {"splits": 3}),
    "8 bits": (DECOMPRESSED, "mla_var6_plus_v5", {"n": 100}, {"splits": 1}),
    "8 bits, 48 columns": (DECOMPRESSED, "mla_var6_plus_v5", {"n": 100, "s": 40}, {"splits": 1}),
    "8 bits, tiles": (DECOMPRESSED, "mla_var6_plus_v5", {"n": 100, "s": 100}, {"splits": 1}),
    "prefix": (DECOMPRESSED, "mla_var6_plus_v6", {"prefix": 100, "s": 40}, {"splits": 1}),
    "ring, heads": (DECOMPRESSED, RING, {"n": 128}, {"splits": 1}),
    "ring, tiles": (DECOMPRESSED, RING, {"n": 128, "s": 100}, {"splits": 1}),
    "ring, split": (DECOMPRESSED, RING, {"n": 128}, {"splits": 2}),
    "ring, alone": (DECOMPRESSED, RING, {"n": 128, "t": 128}, {"splits": 1}),
    "mix": (COMBINE, "mla_var6_plus", {"n": 100}, {}),
    "latent only": (COMBINE, "mla_var6_plus", {"n": 0}, {}),
    "latent only float16": (COMBINE, "mla_var6_plus", {"n": 0, "dtype": "float16"}, {}),
}
"""Per variant, each other machine code: the kernel, its plan, the plan's fields and the kernel's
tiling. A ring is mla_var6_plus on a window that is one."""

COMPILE = """
import contextlib, json, sys
from mla_var3.kernel.cute_python.mla.decompressed.stage import DecompressedOperands
from mla_var3.kernel.cute_python.mla.mix.plan import LatentTokens
from mla_var3.runtime import cute_kernel
from mla_var3.runtime.compile import compile_report
from mla_var3.runtime.paths import find_kernel, plan_class
cute_kernel.quiet_compiler = contextlib.nullcontext

def stage_of(name, fields):
    design = "mla_var6_plus" if name == "ring" else name
    plan = plan_class(find_kernel(design, language="cute-dsl"))(**fields).for_target("sm_90")
    inputs = plan.prepare_inputs("meta")
    if name != "ring":
        return plan.plan(*inputs)
    q_nope, q_latent, q_rope, c_kv, k_rope, k_new, v_new, rope_new, w_uv, lengths = inputs
    latent = LatentTokens(q_latent, q_rope, c_kv, k_rope, lengths, seen_by_all=True)
    tensors = q_nope, q_rope, k_new, v_new, rope_new, lengths
    return plan.plan_parts(latent, DecompressedOperands(*tensors, starts=lengths.clone()), w_uv)

reports = {}
for variant, (wanted, name, fields, tiling) in json.loads(sys.argv[1]).items():
    [kernel] = [kernel for kernel in stage_of(name, fields).kernels() if kernel.name == wanted]
    if tiling:
        kernel.tiling = type(kernel.tiling)(**tiling)
    print(f"== {variant}", file=sys.stderr, flush=True)
    reports[variant] = compile_report(kernel, "sm_90").to_dict()
print(json.dumps(reports))
"""


class Compiled:
    """All variants, compiled once.

    Attributes:
        reports: compile reports, by the name that the program gave them.
        remarks: the assembler's remarks, likewise.
        cache: folder of the compiled code.
    """

    def __init__(self, reports: dict[str, Any], remarks: str, cache: Path) -> None:
        self.cache = cache
        self.reports = {name: CompileReport.from_dict(values) for name, values in reports.items()}
        parts = re.split(r"^== (.+)$", remarks, flags=re.MULTILINE)
        self.remarks = dict(zip(parts[1::2], parts[2::2], strict=True))


def compile_once(
    name: str,
    program: str,
    variants: dict[str, Any],
    environment: dict[str, str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Compiled:
    """Compile in a process of its own, because the environment asks for the assembler's remarks.

    Once for all workers of a parallel run: the first one compiles, the others wait for it.

    Args:
        name: of the folder that the workers share.
        program: Python; gets the variants as JSON in its first argument, writes "== <name>" to
            standard error before each compilation and the reports by name as JSON at the end.
        variants: what to compile.
        environment: of a process that finds the package.
        tmp_path_factory: pytest's.
    """
    root = tmp_path_factory.getbasetemp()
    folder = (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / name
    folder.mkdir(exist_ok=True)
    cache, result = folder / "cache", folder / "result.json"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not result.is_file():
            # Two processes: as many as the cores of the machines that run the tests.
            names = list(variants)
            halves = [{name: variants[name] for name in names[i::2]} for i in range(2)]
            with ThreadPoolExecutor() as pool:
                done = pool.map(lambda half: _compile(program, half, environment, cache), halves)
            reports, remarks = zip(*done, strict=True)
            merged = {name: report for half in reports for name, report in half.items()}
            result.write_text(json.dumps({"reports": merged, "remarks": "".join(remarks)}))
    return Compiled(**json.loads(result.read_text()), cache=cache)


def _compile(
    program: str, variants: dict[str, Any], environment: dict[str, str], cache: Path
) -> tuple[dict[str, Any], str]:
    done = subprocess.run(
        [sys.executable, "-c", program, json.dumps(variants)],
        env={
            **environment,
            "HYPER_MLA_CACHE_DIR": str(cache),
            "CUTE_DSL_COMPILER_OPT": "remarks{ptx}",
            "PYTHONPATH": os.pathsep.join([environment["PYTHONPATH"], *filter(None, sys.path)]),
        },
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1]), done.stderr
