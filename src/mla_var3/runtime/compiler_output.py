"""What compilers print: kept off the screen, and the part of an error that says what is wrong."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def first_lines(error: BaseException, count: int = 3) -> str:
    """The type and the first lines of an error, in one line and without terminal colours."""
    lines = [line.strip() for line in _COLOUR.sub("", str(error)).splitlines() if line.strip()]
    return f"{type(error).__name__}: " + " ".join(lines[:count])


@contextmanager
def quiet_compiler() -> Iterator[None]:
    """Keep a compiler's own diagnostics off the screen; a failure arrives as an exception.

    Compilers write to file descriptor 2 directly, from native code or from a program that they
    start, so Python-level redirection would not reach them.
    """
    sys.stderr.flush()
    saved = os.dup(2)
    try:
        with tempfile.TemporaryFile() as sink:
            os.dup2(sink.fileno(), 2)
            try:
                yield
            finally:
                sys.stderr.flush()
                os.dup2(saved, 2)
    finally:
        os.close(saved)
