"""All CuTe DSL kernels that the tests look at, compiled once for the whole run."""

from pathlib import Path

import pytest

from .compile_once import Compiled, compile_once


@pytest.fixture(scope="session")
def compiled(
    repo_root: Path, package_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Compiled:
    """Reports and assembler remarks of `VARIANTS`, by name."""
    pytest.importorskip("cutlass", reason="needs the cute extra: nvidia-cutlass-dsl")
    return compile_once(repo_root, package_environment, tmp_path_factory)
