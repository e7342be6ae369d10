"""Stands in for compiled programs where a call is tested without a GPU."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

Calls = list[tuple[str, tuple[Any, ...]]]
"""Kernels that were launched, each with its arguments."""


class Note:
    """Stands for a compiled program; keeps what it is called with."""

    def __init__(self, log: Calls, name: str) -> None:
        self.log, self.name = log, name

    def __call__(self, *args: Any) -> None:
        self.log.append((self.name, args))

    def repeated(self, *args: Any) -> Note:
        return Note(self.log, f"{self.name} again")


def note_calls(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, sms: int, host: type | None = None
) -> Calls:
    """What a module launches, from now on: its programs are notes, its GPU has so many SMs.

    Args:
        monkeypatch: undoes it.
        module: the module that makes programs and calls.
        sms: SMs of the GPU.
        host: type that its host code must have; None for any.
    """
    log: Calls = []

    def program_for(kernel_fn: Any, made: Any, args: Any, tiling: Any, device: Any) -> Note:
        assert host is None or (isinstance(made, host) and tiling.few == getattr(made, "few", None))
        return Note(log, kernel_fn.__name__)

    monkeypatch.setattr(module, "program_for", program_for)
    monkeypatch.setattr(module, "require_arch", lambda *args: None)
    monkeypatch.setattr(module, "sm_count_of", lambda index: sms)
    monkeypatch.setattr(module, "workspace", lambda device, slots: ("o", "lse", "merges"))
    monkeypatch.setattr(module, "_programs", {})
    return log
