"""The kernel of `repeat_support` as a fixture, for the tests of repeated calls."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .repeat_support import RepeatableKernel, RepeatableWhole, repeatable_kernel


@pytest.fixture
def whole() -> RepeatableWhole | None:
    """Whole calls of the kernel; none but in modules that make some."""
    return None


@pytest.fixture
def kernel(whole: RepeatableWhole | None) -> Iterator[RepeatableKernel]:
    """The kernel, which serves calls that name it."""
    with repeatable_kernel(whole) as made:
        yield made
