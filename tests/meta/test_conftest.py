"""The shared test setup does what it promises."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

PROBE = """
import os
import pytest
import torch

@pytest.mark.gpu
def test_needs_a_gpu():
    assert torch.cuda.is_available()

def test_one_thread():
    assert torch.get_num_threads() == 1

def test_generator_is_seeded(generator):
    first = torch.rand(3, generator=generator)
    assert torch.equal(first, torch.rand(3, generator=torch.Generator().manual_seed(0)))

def test_no_display():
    assert os.environ["MPLBACKEND"] == "Agg"
"""


def test_outputs_stay_out_of_the_checkout(repo_root: Path) -> None:
    for variable in ("HYPER_MLA_CACHE_DIR", "HYPER_MLA_OUT_DIR"):
        assert not Path(os.environ[variable]).resolve().is_relative_to(repo_root)


def test_workers_and_markers(repo_root: Path, tmp_path: Path) -> None:
    shutil.copy(repo_root / "pyproject.toml", tmp_path)
    (tmp_path / "tests").mkdir()
    shutil.copy(repo_root / "tests" / "conftest.py", tmp_path / "tests")
    (tmp_path / "tests" / "test_probe.py").write_text(PROBE)
    # This test may itself run in a worker; the inner pytest must not take that for its own.
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    inherited["CUDA_VISIBLE_DEVICES"] = ""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        inherited.pop(name, None)
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "1", "tests"],
        cwd=tmp_path,
        env=inherited,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert "3 passed, 1 skipped" in result.stdout, result.stdout + result.stderr
    assert "needs a CUDA device: torch.cuda.is_available() is False" in result.stdout
