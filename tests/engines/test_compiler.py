"""The kernels compile with the oldest release of their compiler that an engine pins.

All other tests run with the newest one, which accepts more.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from .test_pins import ROOT, requirements

pytest.importorskip("cutlass", reason="no wheel of nvidia-cutlass-dsl for this machine")

PROGRAM = """
import json, sys
from tests.kernel.compile_once import kernel_of
for variant in json.loads(sys.argv[1]):
    assert kernel_of(variant).compile("sm_90").cubin, variant
    print(variant, flush=True)
"""
VARIANTS = (
    "few", "bfloat16", "latent fp8, 16 columns", "schedule", "heads", "8 bits", "queries",
    "outputs",
)  # fmt: skip


def test_what_engines_launch_compiles(tmp_path: Path) -> None:
    found = importlib.metadata.version("nvidia-cutlass-dsl")
    [wanted] = [line for line in requirements("cute") if line.startswith("nvidia-cutlass-dsl")]
    assert wanted.split(",")[0].endswith(f">={found.removesuffix('.0')}"), "not the oldest one"
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(VARIANTS)], cwd=ROOT, text=True,
        env=os.environ | {"HYPER_MLA_CACHE_DIR": str(tmp_path)}, timeout=600,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
    )  # fmt: skip
    assert run.returncode == 0 and VARIANTS[-1] in run.stdout, run.stdout[-3000:]
