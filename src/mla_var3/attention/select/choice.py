"""Which kernel serves a call, and why: by measured times where there are any, else by the model."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from mla_var3.attention.backends.plans import PlannedBackend, tuning_plan
from mla_var3.attention.backends.registry import (
    AUTO,
    TORCH_TILED,
    Backend,
    backends,
    named,
)
from mla_var3.attention.request.shape import CallShape
from mla_var3.attention.select.estimate import estimate
from mla_var3.attention.select.tuned import Measured, has_histories, local_result, shipped_result
from mla_var3.conf.devices import DeviceSpec
from mla_var3.errors import HyperMlaError, UnsupportedError
from mla_var3.runtime.paths import KernelId, find_kernel

log = logging.getLogger(__name__)

LEAST_MEASURED = 2
"""Measured times decide when so many kernels have one: a measured time always loses against the
roofline of another kernel."""


@dataclass(frozen=True)
class Candidate:
    """One kernel and what is known about it for a call.

    Attributes:
        kernel, language: its id.
        refusal: why it cannot serve the call; None when it can.
        missing: what this machine lacks to run it; None when nothing.
        predicted_us: the whole call by the cost model; None where the model knows nothing.
        measured_us: measured kernel time plus the predicted rest of the call; None without one.
        source: where the measured time comes from.
        choice: `n` or `splits` that the kernel would use.
        rated: whether the prediction is made with rates that the kernel was seen to reach.
    """

    kernel: str
    language: str
    refusal: str | None = None
    missing: str | None = None
    predicted_us: float | None = None
    measured_us: float | None = None
    source: str | None = None
    choice: dict[str, int] = field(default_factory=dict)
    rated: bool = False


@dataclass(frozen=True)
class Explanation:
    """The choice for one call.

    Attributes:
        shape: the form of the call.
        device: the device that the times are for.
        runs_on: "cuda" or "cpu" for a call with tensors; "" for sizes alone.
        kernel, language: what was chosen.
        path: how that runs: "kernel", "interpreter" or "torch".
        reason: why.
        measured: whether measured times decided.
        candidates: all kernels, the chosen one first, then by time.
    """

    shape: CallShape
    device: str
    runs_on: str
    kernel: str
    language: str
    path: str
    reason: str
    measured: bool
    candidates: tuple[Candidate, ...]

    def to_dict(self) -> dict[str, Any]:
        """Everything, JSON-ready."""
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.kernel} ({self.language}, {self.path}): {self.reason}"


def choose(
    shape: CallShape, spec: DeviceSpec, *, kernel: str = AUTO, runs_on: str = ""
) -> tuple[Explanation, Backend]:
    """Choose for a call.

    Args:
        shape: the form of the call.
        spec: the device that the times are for.
        kernel: "auto", or the kernel that has to be used.
        runs_on: where the tensors are, "cuda" or "cpu"; "" for a choice by sizes alone, which
            does not ask what is installed here.

    Raises:
        UnknownNameError: there is no such kernel.
        UnsupportedError: the named kernel cannot serve the call.
    """
    known = backends()
    wanted = named(kernel, known)
    pairs = [(backend, _candidate(backend, shape, spec)) for backend in known]
    able = [
        (backend, candidate)
        for backend, candidate in pairs
        if backend in wanted
        and candidate.refusal is None
        and (not runs_on or candidate.missing is None)
        and (runs_on != "cpu" or backend.runs_on_cpu)
    ]
    if not able:
        raise UnsupportedError(_nothing_fits(kernel, wanted, pairs))
    (backend, chosen), reason, measured = _decide(able, kernel, spec, runs_on)
    others = [candidate for _, candidate in pairs if candidate is not chosen]
    explanation = Explanation(
        shape=shape,
        device=spec.name,
        runs_on=runs_on,
        kernel=chosen.kernel,
        language=chosen.language,
        path=_path(backend, runs_on),
        reason=reason,
        measured=measured,
        candidates=(chosen, *sorted(others, key=_order)),
    )
    return explanation, backend


def settled(kernel: str, runs_on: str) -> bool:
    """Whether the choice is `torch_tiled` whatever the form of the call.

    On the CPU the kernels run in the interpreter, which is for checking them.
    """
    return kernel == TORCH_TILED or (kernel == AUTO and runs_on == "cpu")


Pair = tuple[Backend, Candidate]


def _decide(
    able: Sequence[Pair], kernel: str, spec: DeviceSpec, runs_on: str
) -> tuple[Pair, str, bool]:
    """The chosen one of the able, the reason, and whether measured times decided."""
    torch_path = [pair for pair in able if pair[0].kernel == TORCH_TILED]
    kernels = [pair for pair in able if pair[0].kernel != TORCH_TILED]
    if kernel != AUTO and len(able) == 1:
        return able[0], "named by the caller", False
    if settled(kernel, runs_on):
        reason = "the tensors are on the CPU, where kernels run in the interpreter, if named"
        return torch_path[0], reason, False
    if not kernels:
        return torch_path[0], "no kernel serves a call of this form", False
    prefix = "" if kernel == AUTO else "named by the caller; "
    timed = [pair for pair in kernels if pair[1].measured_us is not None]
    if len(timed) >= LEAST_MEASURED:
        best = min(timed, key=lambda pair: pair[1].measured_us or 0.0)
        reason = f"{prefix}fastest of {len(timed)} measured on {spec.name}: {_times(timed, True)}"
        return best, reason, True
    # A roofline always beats the rates that a kernel really reached, so where some kernels have
    # such rates the others, which nobody has timed on the device, do not compete with them.
    rated = [pair for pair in kernels if pair[1].rated]
    compared = rated or kernels
    # Of equal predictions the first in the order of the backends wins: min keeps it.
    best = min(compared, key=lambda pair: _or_infinite(pair[1].predicted_us))
    basis = "by the rates of each kernel, not measured here" if rated else "not measured"
    reason = f"{prefix}predicted fastest on {spec.name}, {basis}: {_times(compared, False)}"
    return best, reason, False


def _times(pairs: Sequence[Pair], measured: bool) -> str:
    texts = []
    for _, candidate in pairs:
        time_us = candidate.measured_us if measured else candidate.predicted_us
        if time_us is not None:
            texts.append(f"{candidate.kernel} ({candidate.language}) {time_us:.1f} us")
    return ", ".join(texts)


def _candidate(backend: Backend, shape: CallShape, spec: DeviceSpec) -> Candidate:
    refusal = backend.unsupported(shape)
    if refusal is None:
        refusal = _target_refusal(backend, spec)
    expected = None if refusal else estimate(backend.kernel, shape, spec, backend.language)
    if expected is None:
        return Candidate(backend.kernel, backend.language, refusal, backend.missing())
    measured = _measured(backend, shape, spec, expected.choice)
    return Candidate(
        kernel=backend.kernel,
        language=backend.language,
        refusal=None,
        missing=backend.missing(),
        predicted_us=expected.total_us,
        measured_us=None if measured is None else measured.kernel_us + expected.others_us,
        source=None if measured is None else measured.source,
        choice=expected.choice,
        rated=expected.rated,
    )


def _target_refusal(backend: Backend, spec: DeviceSpec) -> str | None:
    targets = backend.targets
    if targets is None or set(targets) & set(spec.targets):
        return None
    return f"{spec.name} ({spec.target}); it is written for {', '.join(targets)}"


def _measured(
    backend: Backend, shape: CallShape, spec: DeviceSpec, choice: dict[str, int]
) -> Measured | None:
    found = shipped_result(backend.kernel, backend.language, shape, spec, choice)
    if found is not None or not isinstance(backend, PlannedBackend):
        return found
    if backend.missing() or not has_histories(spec):
        return None
    kernel: KernelId = find_kernel(backend.kernel, language=backend.language)
    try:
        return local_result(tuning_plan(kernel, shape, spec.name), spec)
    except HyperMlaError as error:  # no reason not to run the kernel
        log.warning("%s: tuning results cannot be read: %s", backend.kernel, error)
        return None


def _path(backend: Backend, runs_on: str) -> str:
    if backend.kernel == TORCH_TILED:
        return "torch"
    return "interpreter" if runs_on == "cpu" else "kernel"


def _nothing_fits(kernel: str, wanted: Sequence[Backend], pairs: Sequence[Pair]) -> str:
    reasons = []
    for backend, candidate in pairs:
        if backend in wanted:
            why = candidate.missing or "it needs a GPU"
            if candidate.refusal:
                why = f"it does not support {candidate.refusal}"
            reasons.append(f"{candidate.kernel} ({candidate.language}): {why}")
    return f"kernel: expected one that serves this call, got {kernel!r}; {'; '.join(reasons)}"


def _order(candidate: Candidate) -> tuple[bool, float, str, str]:
    time_us = candidate.measured_us if candidate.measured_us is not None else candidate.predicted_us
    refused = candidate.refusal is not None
    return refused, _or_infinite(time_us), candidate.kernel, candidate.language


def _or_infinite(time_us: float | None) -> float:
    return float("inf") if time_us is None else time_us
