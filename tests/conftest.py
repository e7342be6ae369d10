"""What every test gets: its own cache and output folders, one thread per worker, no display."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import torch

ROOT = Path(__file__).resolve().parents[1]

# Set before anything imports torch or matplotlib, and inherited by the programs that tests start.
os.environ["MPLBACKEND"] = "Agg"
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["MKL_NUM_THREADS"] = "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the long tests, and skip those marked `gpu` where torch sees no CUDA device.

    Workers that are left with long tests in the end would let cores idle. Those of compiled kernels
    come first: they start two processes, and one worker waits for these.
    """
    items.sort(
        key=lambda item: (
            "compiled" not in getattr(item, "fixturenames", ()),
            item.get_closest_marker("slow") is None,
        )
    )
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch

    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device: torch.cuda.is_available() is False")
    for item in gpu_items:
        item.add_marker(skip)


def pytest_collection_finish() -> None:
    """Keep each xdist worker on one thread, so that workers do not fight for the cores."""
    if "PYTEST_XDIST_WORKER" in os.environ and "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


@pytest.fixture(autouse=True)
def own_surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep caches and outputs of a test out of the checkout and away from other tests.

    The width of a terminal, which parallel test runners pass on, must not change what is printed.
    """
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setenv("HYPER_MLA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("HYPER_MLA_OUT_DIR", str(tmp_path / "out"))


@pytest.fixture
def generator() -> torch.Generator:
    """A CPU random generator with a fixed seed."""
    import torch

    return torch.Generator().manual_seed(0)


@pytest.fixture(scope="session")
def repo_root() -> Path:
    """The top folder of the checkout."""
    return ROOT


@pytest.fixture(scope="session")
def source_root(repo_root: Path) -> Path:
    """The folder of the package `mla_var3`."""
    return repo_root / "src" / "mla_var3"


@pytest.fixture(scope="session")
def repo_files(repo_root: Path) -> list[Path]:
    """Files that belong to the repository: tracked, or new and not ignored."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listing = subprocess.run(command, cwd=repo_root, capture_output=True, text=True, check=False)
    if listing.returncode == 0:
        paths = [repo_root / name for name in listing.stdout.split("\0") if name]
    else:  # an unpacked archive: no git to ask
        ignored = {
            line.strip().rstrip("/")
            for line in (repo_root / ".gitignore").read_text().splitlines()
            if line.strip()
        }
        paths = [
            path
            for path in repo_root.rglob("*")
            if not any(
                part in ignored or part == ".git" or part.endswith(".egg-info")
                for part in path.relative_to(repo_root).parts
            )
        ]
    return sorted(path for path in paths if path.is_file())


@pytest.fixture(scope="session")
def package_environment(repo_root: Path) -> dict[str, str]:
    """Environment for a Python started by a test: it finds the package of this checkout."""
    return {**os.environ, "PYTHONPATH": str(repo_root / "src"), "COLUMNS": "200"}
