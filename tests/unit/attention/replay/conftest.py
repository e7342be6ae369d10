"""The kernel of `replay_support` as a fixture."""

from collections.abc import Iterator

import pytest

from .replay_support import RepeatableKernel, RepeatableWhole, repeatable_kernel


@pytest.fixture
def whole() -> RepeatableWhole | None:
    """Whole calls of the kernel; None unless a module makes some."""
    return None


@pytest.fixture
def kernel(whole: RepeatableWhole | None) -> Iterator[RepeatableKernel]:
    """The kernel, which serves calls that name it."""
    with repeatable_kernel(whole) as made:
        yield made
