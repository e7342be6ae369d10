"""CuTe DSL kernels compiled once for all workers of a test run, with what the assembler said."""

from __future__ import annotations

import fcntl
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mla_var3.runtime.compile import CompileReport

SERIALISED = re.compile(r"C75\d\d\b|wgmma\S* instructions are serialized", re.IGNORECASE)
"""How the assembler says that matrix products wait for each other (C7510, C7512, C7515, C7520)."""


class Compiled:
    """All variants, compiled once: reports and what the assembler said, by variant and kernel.

    Attributes:
        reports: by "<variant> <kernel>".
        remarks: the assembler's, likewise.
        cache: where the compiled code lies.
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
    """In a process of its own, because the assembler's remarks are asked for by the environment.

    Once for all workers of a parallel run: the first one compiles, the others wait for it.

    Args:
        name: of the folder that the workers share.
        program: Python; gets the variants as JSON in its first argument, writes "== <variant>
            <kernel>" to standard error before each compilation and the reports as JSON at the end.
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
            reports, remarks = _compile(program, variants, environment, cache)
            result.write_text(json.dumps({"reports": reports, "remarks": remarks}))
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
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1]), done.stderr
