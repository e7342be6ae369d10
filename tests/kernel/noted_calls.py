"""Stands in for compiled programs where a call is tested without a GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from mla_var3.kernel.cute_python.mla.latent import call as latent_call
from mla_var3.kernel.cute_python.mla.latent.operands import (
    LatentOperands,
    LatentOptions,
    Partials,
    ProjectionOperands,
)
from mla_var3.op.mla.cache_formats import cache_format
from mla_var3.runtime.call_state import CallState
from mla_var3.runtime.cute.arguments import kinds_of
from mla_var3.runtime.cute.launch import CuteProgram, RepeatedLaunch

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
        assert host is None or isinstance(made, host)
        return Note(log, kernel_fn.__name__)

    monkeypatch.setattr(latent_call, "program_for", program_for)
    monkeypatch.setattr(latent_call, "require_arch", lambda *args: None)
    monkeypatch.setattr(latent_call, "_programs", CallState().table(64))
    monkeypatch.setattr(latent_call, "sm_count_of", lambda index: sms)
    partials = Partials(*(torch.empty(0, device="meta") for _ in Partials._fields))
    monkeypatch.setattr(latent_call, "partials_for", lambda *given: partials)
    return log


def named(fields: Sequence[str], arguments: Sequence[Any]) -> dict[str, Any]:
    """Arguments of a host entry by name."""
    return dict(zip(fields, arguments, strict=True))


def recorded_launch(
    fields: Sequence[str], arguments: Sequence[Any]
) -> tuple[RepeatedLaunch, list[dict[str, int]]]:
    """A launch to repeat, and the pointers and stream that the compiled host function would get."""
    given = named(fields, arguments)
    present = [name for name, value in given.items() if value is not None]
    wanted = [name for name in present if isinstance(given[name], torch.Tensor)]
    seen: list[dict[str, int]] = []

    def entry(packed: Any) -> None:
        cells = dict(zip((*present, "stream"), packed, strict=False))
        read = ctypes.c_uint64.from_address
        seen.append({name: read(cells[name]).value for name in (*wanted, "stream")})

    return CuteProgram("flash_mla", kinds_of(arguments), 0, entry).repeated(*arguments), seen


def fp8_parts(fmt: str, device: str, pages: int, page_tokens: int = 64) -> dict[str, torch.Tensor]:
    """`latent`, `rope` and `scales` of a cache in 8 bits, as the kernels take them."""
    form = cache_format(fmt)
    shape = (pages, page_tokens, form.row_bytes(512, 64))
    parts = form.parts(torch.zeros(shape, dtype=torch.uint8, device=device), 512, 64)
    scales = parts.scales[..., 0] if parts.scales.dim() > 1 else torch.zeros(1, device=device)
    return {"latent": parts.latent, "rope": parts.rope, "scales": scales}


def meta_call(
    b: int = 2, s: int = 2, h: int = 16, k: int = 512, p: int = 64, **changes: Any
) -> tuple[ProjectionOperands, LatentOperands, LatentOptions]:
    """Operands and options of a whole call on meta tensors, some of them changed by name."""

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    projections = ProjectionOperands(
        empty(h, 128, k), empty(h, k, 128), empty(b, s, h, 128), empty(b, s, h, 128)
    )
    operands = LatentOperands.allocate(
        (b, s, h), empty(b, s, h, k), empty(b, s, h, p) if p else None, empty(b, 256, k),
        empty(b, 256, p) if p else None, empty(b, dtype=torch.int32),
    )  # fmt: skip
    names = ("empty_positive", "batch_invariant")
    chosen = {name: changes.pop(name) for name in names if name in changes}
    options = LatentOptions(s, True, 0.1, **chosen)
    own = {name: changes.pop(name) for name in projections._fields if name in changes}
    return projections._replace(**own), operands._replace(**changes), options
