"""What the tests of structure share."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def package_sources(source_root: Path) -> dict[str, str]:
    """Source text of the package by path relative to it, with forward slashes."""
    return {
        path.relative_to(source_root).as_posix(): path.read_text()
        for path in sorted(source_root.rglob("*.py"))
    }
