"""Stands in for compiled programs where a call is tested without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mla_var3.kernel.cute_python.mla.latent import call as latent_call
from mla_var3.kernel.cute_python.mla.latent.operands import Partials
from mla_var3.runtime.call_state import CallState

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


def note_calls(monkeypatch: pytest.MonkeyPatch, sms: int, host: type | None = None) -> Calls:
    """What calls launch, from now on: programs are notes, the GPU has so many SMs.

    Args:
        monkeypatch: undoes it.
        sms: SMs of the GPU.
        host: type that the host code must have; None for any.
    """
    log: Calls = []

    def program_for(kernel_fn: Any, made: Any, args: Any, tiling: Any, device: Any) -> Note:
        assert host is None or (isinstance(made, host) and tiling.few == getattr(made, "few", None))
        return Note(log, kernel_fn.__name__)

    monkeypatch.setattr(latent_call, "program_for", program_for)
    monkeypatch.setattr(latent_call, "require_arch", lambda *args: None)
    monkeypatch.setattr(latent_call, "sm_count_of", lambda index: sms)
    partials = Partials(*(torch.empty(0, device="meta") for _ in Partials._fields))
    monkeypatch.setattr(latent_call, "partials_for", lambda device, sm_count: partials)
    monkeypatch.setattr(latent_call, "_programs", CallState().table(64))
    return log
