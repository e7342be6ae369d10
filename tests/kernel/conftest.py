"""All CuTe DSL kernels that the tests look at, compiled once for the whole run."""

from __future__ import annotations

import pytest

from .compile_once import COMPILE, SMALL, VARIANTS, Compiled, compile_once


@pytest.fixture(scope="session")
def compiled(
    package_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Compiled:
    """Reports and assembler remarks of `VARIANTS`, by name."""
    pytest.importorskip("cutlass", reason="needs the cute extra: nvidia-cutlass-dsl")
    variants = {
        variant: (kernel, name, {**SMALL, **fields}, tiling)
        for variant, (kernel, name, fields, tiling) in VARIANTS.items()
    }
    return compile_once("cute-kernels", COMPILE, variants, package_environment, tmp_path_factory)
