"""What the tests of the CuTe DSL runtime share as fixtures."""

import pytest


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The keys of what is really compiled, from empty caches in memory on."""
    from tests.unit.runtime.cute.cute_support import note_compilations

    return note_compilations(monkeypatch)
