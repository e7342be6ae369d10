"""Which kernel serves a call, and why.

Every kernel that can serve the call has a call time: estimated by the model of `op/mla/model`, or
measured by the autotuner on this machine. Where energies are known it is the steady one. Estimated
and measured times compete, each with its uncertainty: a measurement changes the choice only if the
other kernel is then surely faster, so it never makes the choice worse than without it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields
from typing import Any

import torch

from mla_var3.attention.backends.latent import Attended, LatentBackend
from mla_var3.attention.backends.plans import (
    Measured,
    PlannedBackend,
    has_histories,
    local_result,
    tuning_plan,
)
from mla_var3.attention.backends.registry import (
    AUTO,
    Backend,
    backends,
    named,
    require_kernel_name,
)
from mla_var3.attention.backends.torch_tiled import TORCH_TILED, TorchTiled
from mla_var3.attention.prefix.attend import PrefixBackend
from mla_var3.attention.request.checks import debug_on, inference
from mla_var3.attention.request.shape import CallShape
from mla_var3.attention.request.task import AttentionTask
from mla_var3.attention.request.validate import check_values
from mla_var3.conf.devices import DeviceSpec
from mla_var3.errors import HyperMlaError, UnknownNameError, UnsupportedError
from mla_var3.op.mla.model.designs import estimate
from mla_var3.op.mla.model.mix import WORTH_MIXING
from mla_var3.op.mla.model.times import BORROWED, IDEAL, Estimate
from mla_var3.runtime.call_state import CALL_STATE
from mla_var3.runtime.paths import find_kernel
from mla_var3.runtime.workflow import current_device_spec, planning_device

log = logging.getLogger(__name__)

MEASURED_ERROR = 0.03
"""Relative uncertainty of a time that the autotuner measured."""


@dataclass(frozen=True)
class Candidate:
    """One kernel and what is known about it for a call; times are call times in microseconds.

    Attributes:
        kernel, language: its id.
        refusal: why it cannot serve the call; None when it can.
        missing: what this machine lacks to run it; None when nothing.
        estimate: what the model expects; None for a kernel that it does not know.
        measured: its kernel time as the autotuner measured it; None if it did not.
    """

    kernel: str
    language: str
    refusal: str | None = None
    missing: str | None = None
    estimate: Estimate | None = None
    measured: Measured | None = None

    @property
    def predicted_us(self) -> float | None:
        """Estimated, in a burst."""
        return None if self.estimate is None else self.estimate.call_us

    @property
    def measured_us(self) -> float | None:
        """The measured kernel time, in a burst, and the estimated rest of the call."""
        if self.measured is None or self.estimate is None:
            return None
        return self.measured.kernel_us + self.estimate.around_us

    @property
    def steady_us(self) -> float | None:
        """Measured or estimated, repeated without a pause; None where energies are unknown."""
        found = self.estimate
        if found is None or found.limit_us is None or not found.fitted:
            return None
        kernel_us = found.kernel_us if self.measured is None else self.measured.kernel_us
        return max(kernel_us, found.limit_us) + found.around_us

    @property
    def advised_us(self) -> float:
        """The time that it competes with; infinite where nothing is known."""
        times = (self.steady_us, self.measured_us, self.predicted_us)
        return next((time_us for time_us in times if time_us is not None), math.inf)

    @property
    def fitted(self) -> bool:
        """Whether the estimate uses rates that were recorded for this kind of cache."""
        return self.estimate is not None and self.estimate.fitted

    @property
    def source(self) -> str | None:
        """Where its time comes from: the measurement, or what the estimate rests on."""
        if self.measured is not None:
            return self.measured.source
        return None if self.estimate is None else self.estimate.basis

    @property
    def choice(self) -> dict[str, int]:
        """`n`, `prefix` or `splits` that the kernel would use."""
        return {} if self.estimate is None else self.estimate.choice

    @property
    def range_us(self) -> tuple[float, float]:
        """The shortest and the longest time that it may take; an ideal time has no upper end."""
        if self.measured is not None:
            error = MEASURED_ERROR
        elif self.estimate is not None and self.fitted:
            error = self.estimate.error
        else:
            return self.advised_us, math.inf
        return self.advised_us * (1.0 - error), self.advised_us * (1.0 + error)

    def surely_faster(self, other: Candidate) -> bool:
        """Whether it is faster than another one beyond the uncertainty of both times."""
        if self.measured is not None and other.measured is not None:
            return self.advised_us < other.advised_us
        return self.range_us[1] < other.range_us[0]

    def to_dict(self) -> dict[str, Any]:
        names = (
            "kernel", "language", "refusal", "missing", "predicted_us", "measured_us", "steady_us"
        )  # fmt: skip
        return {
            **{name: getattr(self, name) for name in names},
            "range_us": list(self.range_us) if math.isfinite(self.range_us[1]) else None,
            "measured_source": None if self.measured is None else self.measured.source,
            "estimate": None if self.estimate is None else self.estimate.to_dict(),
        }


@dataclass(frozen=True)
class Explanation:
    """The choice for one call.

    Attributes:
        shape: Sizes and options of the call.
        device: The device that the times are for.
        runs_on: "cuda" or "cpu" for a call with tensors; "" for sizes alone.
        kernel, language: The chosen kernel.
        path: How it runs: "kernel", "interpreter" or "torch".
        reason: Why it was chosen.
        measured: Whether a measured time decided.
        candidates: All kernels, the chosen one first, then by time.
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
        plain = {field.name: getattr(self, field.name) for field in fields(self)}
        candidates = [candidate.to_dict() for candidate in self.candidates]
        return {**plain, "shape": self.shape.to_dict(), "candidates": candidates}

    def __str__(self) -> str:
        return f"{self.kernel} ({self.language}, {self.path}): {self.reason}"


def choose(
    shape: CallShape, spec: DeviceSpec, *, kernel: str = AUTO, runs_on: str = ""
) -> tuple[Explanation, Backend]:
    """Choose for a call on the device that the times are for.

    `kernel` is "auto", or the kernel that has to be used. The tensors are on "cuda" or "cpu"; with
    "" the choice is by sizes alone and does not depend on what is installed here.

    Raises:
        UnknownNameError: There is no such kernel.
        UnsupportedError: The named kernel cannot serve the call.
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
    path = "interpreter" if runs_on == "cpu" else "kernel"
    others = [candidate for _, candidate in pairs if candidate is not chosen]
    explanation = Explanation(
        shape=shape,
        device=spec.name,
        runs_on=runs_on,
        kernel=chosen.kernel,
        language=chosen.language,
        path="torch" if backend.kernel == TORCH_TILED else path,
        reason=reason,
        measured=measured,
        candidates=(chosen, *sorted(others, key=_order)),
    )
    return explanation, backend


@inference
def run(task: AttentionTask, kernel: str) -> Attended:
    """Output, LSE and, where the kernel has one, the launch that repeats the call."""
    if debug_on():
        check_values(task)
    require_kernel_name(kernel)
    device = task.q.device
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        backend = backend_for(task.shape(), kernel, device)
        if isinstance(backend, (LatentBackend, PrefixBackend)):
            return backend.run_repeatable(task)
        output, lse = backend.run(task)
        return output, task.with_empty_sums(lse), None


@CALL_STATE.cached(4096)
def backend_for(shape: CallShape, kernel: str, device: torch.device) -> Backend:
    """The backend of a call shape on a device, which is the current one; chosen once."""
    if settled(kernel, device.type):
        return TorchTiled()  # without loading a kernel language for the comparison
    try:
        spec = spec_for(device.type)
    except UnknownNameError as error:
        if kernel != AUTO:
            raise
        log.warning("%s; until then calls on this GPU use torch_tiled", error)
        return TorchTiled()
    return choose(shape, spec, kernel=kernel, runs_on=device.type)[1]


def spec_for(device_type: str) -> DeviceSpec:
    """The device that predictions are for."""
    return current_device_spec() if device_type == "cuda" else planning_device()


def settled(kernel: str, runs_on: str) -> bool:
    """Whether the choice is `torch_tiled` whatever the call shape.

    On the CPU the kernels run in the interpreter, which is for checking them.
    """
    return kernel == TORCH_TILED or (kernel == AUTO and runs_on == "cpu")


Pair = tuple[Backend, Candidate]


def _decide(
    able: Sequence[Pair], kernel: str, spec: DeviceSpec, runs_on: str
) -> tuple[Pair, str, bool]:
    """The choice, its reason, and whether a measured time decided."""
    torch_path = [pair for pair in able if pair[0].kernel == TORCH_TILED]
    kernels = [pair for pair in able if pair[0].kernel != TORCH_TILED]
    if kernel != AUTO and len(able) == 1:
        return able[0], "named by the caller", False
    if settled(kernel, runs_on):
        reason = "the tensors are on the CPU, where kernels run in the interpreter, if named"
        return torch_path[0], reason, False
    if not kernels:
        return torch_path[0], "no kernel serves a call of this shape", False
    prefix = "" if kernel == AUTO else "named by the caller; "
    fitted = [pair for pair in kernels if pair[1].fitted]
    compared = fitted or [pair for pair in kernels if not _mixes(pair[1])] or kernels
    without = _by_estimates(compared)
    faster = [pair for pair in kernels if pair[1].surely_faster(without[1])]
    best = min(faster, key=lambda pair: pair[1].advised_us, default=without)
    others = [pair for pair in compared if pair is not best]
    next_best = sorted(others, key=lambda pair: pair[1].advised_us)[:2]
    shown, chosen = _times([best, *next_best]), best[1]
    kind = "burst" if chosen.steady_us is None else "steady"
    measured = chosen.measured is not None
    if measured:
        reason = f"measured on {spec.name}, {kind} call time: {shown}"
    elif chosen.fitted:
        reason = f"least {kind} call time on {spec.name}, by recorded rates: {shown}"
    elif chosen.source == BORROWED:
        reason = f"not timed on an 8-bit cache; {BORROWED}: {shown}"
    else:
        reason = f"nothing was timed on {spec.name}; by lower bounds ({IDEAL}): {shown}"
    return best, prefix + reason, measured


def _by_estimates(pairs: Sequence[Pair]) -> Pair:
    """The choice without any measurement; a mix only where it clearly beats the pure paths."""
    # Of equal times the first in the order of the backends wins: min keeps it.
    best = min(pairs, key=lambda pair: _estimated_us(pair[1]))
    pure = [pair for pair in pairs if not _mixes(pair[1])]
    if not pure or not _mixes(best[1]):
        return best
    other = min(pure, key=lambda pair: _estimated_us(pair[1]))
    gains = _estimated_us(best[1])[0] < (1.0 - WORTH_MIXING) * _estimated_us(other[1])[0]
    return best if gains else other


def _mixes(candidate: Candidate) -> bool:
    return candidate.estimate is not None and candidate.estimate.mixes


def _estimated_us(candidate: Candidate) -> tuple[float, float]:
    """The time without any measurement; the burst time decides between equals."""
    found = candidate.estimate
    return (math.inf, math.inf) if found is None else (found.advised_us, found.call_us)


def _times(pairs: Sequence[Pair]) -> str:
    return ", ".join(
        f"{candidate.kernel}:{candidate.language} {candidate.advised_us:.1f} us"
        for _, candidate in pairs
        if candidate.estimate is not None
    )


def _candidate(backend: Backend, shape: CallShape, spec: DeviceSpec) -> Candidate:
    kernel, language, targets = backend.kernel, backend.language, backend.targets
    refusal = backend.unsupported(shape)
    if refusal is None and targets is not None and not set(targets) & set(spec.targets):
        refusal = f"{spec.name} ({spec.target}); it is written for {', '.join(targets)}"
    expected = None if refusal else estimate(kernel, shape.workload(), spec, language)
    measured = None if expected is None else _measured(backend, shape, spec)
    return Candidate(kernel, language, refusal, backend.missing(), expected, measured)


def _measured(backend: Backend, shape: CallShape, spec: DeviceSpec) -> Measured | None:
    if not isinstance(backend, PlannedBackend) or backend.missing() or not has_histories(spec):
        return None
    kernel = find_kernel(backend.kernel, language=backend.language)
    try:
        return local_result(tuning_plan(kernel, shape, spec.name), spec)
    except HyperMlaError as error:  # no reason not to run the kernel
        log.warning("%s: tuning results cannot be read: %s", backend.kernel, error)
        return None


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
    refused = candidate.refusal is not None
    return refused, candidate.advised_us, candidate.kernel, candidate.language
