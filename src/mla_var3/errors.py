"""The exception tree of HyperMLA.

Every error a user can cause derives from `HyperMlaError`, so that a caller can catch the whole
family and the command line can print the message without a traceback. Messages name the argument,
what was expected and what came.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class HyperMlaError(Exception):
    """Base class of all errors raised on purpose by HyperMLA."""


class InvalidArgumentError(HyperMlaError, ValueError):
    """An argument has a value, shape, dtype, stride or device that cannot be used."""

    def __init__(self, argument: str, expected: object, got: object) -> None:
        self.argument = argument
        self.expected = expected
        self.got = got
        super().__init__(f"{argument}: expected {expected}, got {got}")


class UnknownNameError(HyperMlaError, LookupError):
    """A kernel, version, device or option name that does not exist; suggests the nearest ones."""

    def __init__(self, kind: str, name: str, known: Iterable[str], hint: str = "") -> None:
        self.kind = kind
        self.name = name
        self.known = sorted(known)
        nearest = difflib.get_close_matches(name, self.known, n=3, cutoff=0.5)
        message = f"unknown {kind} {name!r}"
        if nearest:
            message += "; did you mean " + " or ".join(repr(match) for match in nearest) + "?"
        if self.known:
            message += f" (known: {', '.join(self.known)})"
        if hint:
            message += f". {hint}"
        super().__init__(message)


class UnsupportedError(HyperMlaError, RuntimeError):
    """The request is valid, but this machine, device or build cannot serve it."""


class MissingToolError(UnsupportedError):
    """A program or package that the request needs is not installed."""


class DeviceTimeoutError(HyperMlaError, TimeoutError):
    """Work on the GPU did not end within the time limit; this process cannot use the GPU again."""


class KernelCompileError(HyperMlaError, RuntimeError):
    """A kernel did not compile for a target."""


class InterpreterError(HyperMlaError, RuntimeError):
    """A kernel did something on the CPU interpreter that is undefined or rejected on a GPU."""


class CheckFailedError(HyperMlaError, AssertionError):
    """A kernel's output is outside the error bound, or not a number."""
