"""What the kernel tests share: compiled CuTe DSL kernels, and launches that are only noted."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from .compile_once import Compiled, compile_once

if TYPE_CHECKING:
    from .noted_calls import Calls


@pytest.fixture(scope="session")
def compiled(
    repo_root: Path, package_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Compiled:
    """Reports and assembler remarks of `VARIANTS`, by name."""
    pytest.importorskip("cutlass", reason="needs the cute extra: nvidia-cutlass-dsl")
    return compile_once(repo_root, package_environment, tmp_path_factory)


@pytest.fixture
def cached(compiled: Compiled, monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiled]:
    """All variants, in the compile cache of this process: it compiles nothing more."""
    from tests.unit.runtime.cute.cute_support import note_compilations

    compilations = note_compilations(monkeypatch)
    monkeypatch.setenv("HYPER_MLA_CACHE_DIR", str(compiled.cache))
    yield compiled
    assert compilations == []


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> "Calls":
    """What latent programs are launched with, without a GPU."""
    pytest.importorskip("cutlass", reason="needs the cute extra: nvidia-cutlass-dsl")
    from .noted_calls import note_calls

    return note_calls(monkeypatch, 132)
