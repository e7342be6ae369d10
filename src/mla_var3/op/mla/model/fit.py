"""Fits the parameters of the mix model to measured times.

Least squares on the logarithm of predicted over measured time, so that a short row counts as much
as a long one, over the logarithms of the parameters. The model is a maximum of terms: a row says
something only about the term that it waits for. A parameter that the rows do not determine keeps
its value and its provenance, and is not called fitted.

The search is scipy's, which the extra `fit` installs. Only a fit needs it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from mla_var3.errors import InvalidArgumentError, MissingToolError
from mla_var3.op.mla.model.mix import mix_work, part_times_us
from mla_var3.op.mla.model.parameters import UNITS, MixParameters, Parameter
from mla_var3.op.mla.problem import MlaProblem, require_int
from mla_var3.op.mla.window.formats import window_form

LEAST_RECORDS = 3
_WORST_ERROR = 0.25  # a parameter known no better than this, relatively, is not determined
_LEAST_NOISE = 1e-3  # no timing repeats better, so exact rows do not make a parameter certain
_NO_DIFFERENCE = 1e-4  # relative; rows explained this well are explained
_EVALUATIONS = 400
_STEP = 1e-4  # of the derivatives, relative; wide, because the model has kinks
_START_SHARPNESS = (1.5, 4.0)
# Beyond the largest sharpness the curve is a corner for every whole number of SMs.
_LIMITS = {"stream_sharpness": (1.0, 64.0), "starvation": (1e-6, 1.0 - 1e-4)}
_START_LAUNCH_US = 3.0
_UNLIMITED_TFLOPS = 1e9
_START_SHARED = {"together": 0.9, "starvation": 0.5}

Vector = npt.NDArray[np.float64]


@dataclass(frozen=True)
class MixRecord:
    """One measured time of the attention stage.

    Attributes:
        b, s, t, h, d, p, k, dtype: The problem, every request with `t` tokens.
        n: Decompressed tokens per request.
        sms: SMs of the latent work; the others did, or were kept free for, the decompressed one.
        time_us: The measured time of the attention, without projections and merge.
        form: How the window was stored, "plain" or "fp8".
    """

    b: int
    s: int
    t: int
    h: int
    n: int
    sms: int
    time_us: float
    d: int = 128
    p: int = 64
    k: int = 512
    dtype: str = "bfloat16"
    form: str = "plain"

    def __post_init__(self) -> None:
        number = isinstance(self.time_us, (int, float)) and not isinstance(self.time_us, bool)
        if not number or not 0 < self.time_us < math.inf:
            raise InvalidArgumentError("time_us", "a positive number", repr(self.time_us))
        require_int("sms", self.sms, minimum=0)

    @property
    def problem(self) -> MlaProblem:
        """The problem that was timed."""
        sizes = {name: getattr(self, name) for name in ("b", "s", "t", "h", "d", "p", "k")}
        return MlaProblem(**sizes, dtype=self.dtype)


@dataclass(frozen=True)
class MixFit:
    """The result of a fit.

    Attributes:
        parameters: Fitted where the rows determine them, as before elsewhere.
        residuals: Predicted over measured time minus one, per record.
    """

    parameters: MixParameters
    residuals: tuple[float, ...]

    @property
    def rms(self) -> float:
        """Root mean square of the residuals."""
        return math.sqrt(sum(value**2 for value in self.residuals) / len(self.residuals))

    @property
    def determined(self) -> tuple[str, ...]:
        """The parameters that the rows determine."""
        items = self.parameters.parameters.items()
        return tuple(name for name, parameter in items if parameter.origin == "fitted")


def fit(
    records: Iterable[MixRecord | Mapping[str, Any]], start: MixParameters, source: str
) -> MixFit:
    """Fits the parameters of a device to measured times.

    Rows that pin down everything: `n = 0` and `n = t` on all SMs and on several smaller numbers of
    them, large and small problems, and mixes with different splits.

    Args:
        records: The rows, all measured on the device of `start` in its dtype.
        start: Where to begin, and what an undetermined parameter keeps; usually
            `derived_parameters`.
        source: What the rows are, for the provenance; the name of their record.
    """
    rows = [record if isinstance(record, MixRecord) else MixRecord(**record) for record in records]
    if len(rows) < LEAST_RECORDS:
        raise InvalidArgumentError("records", f"at least {LEAST_RECORDS} rows", len(rows))
    for index, row in enumerate(rows):
        require_int(
            f"records[{index}].sms", row.sms, minimum=0, maximum=start.sm_count,
            maximum_name="sm_count",
        )  # fmt: skip
        if row.dtype != start.dtype:
            raise InvalidArgumentError(f"records[{index}].dtype", start.dtype, row.dtype)
    search = _Search(rows, start)
    solution = search.determined_solution()
    fitted: dict[str, Any] = {
        name: Parameter(value, "fitted", f"{source}, {len(rows)} rows", solution.errors[name])
        for name, value in solution.values.items()
    }
    parameters = replace(start, **fitted)
    residuals = np.expm1(search.residuals(solution.values))
    return MixFit(parameters, tuple(float(value) for value in residuals))


@dataclass(frozen=True)
class _Solution:
    """Values of the free parameters, what remains, and how well each is known."""

    values: dict[str, float]
    squares: float
    errors: dict[str, float]


def _least_squares() -> Any:
    try:
        from scipy.optimize import least_squares
    except ImportError as error:
        raise MissingToolError(
            'fitting needs scipy, which is not installed: pip install "hyper-mla[fit]"'
        ) from error
    return least_squares


class _Search:
    """The rows with their work counted once, and the search on them."""

    def __init__(self, rows: Sequence[MixRecord], start: MixParameters) -> None:
        self._start = start
        self._work = [mix_work(row.problem, row.n, window_form(row.form)) for row in rows]
        self._splits = [row.sms for row in rows]
        self._times: Vector = np.array([row.time_us for row in rows], dtype=np.float64)
        for index, (work, split) in enumerate(zip(self._work, self._splits, strict=True)):
            if not math.isfinite(max(part_times_us(start, work, split))):
                raise InvalidArgumentError(
                    f"records[{index}].sms", "SMs for both kinds of work", split
                )

    def residuals(self, values: Mapping[str, float]) -> Vector:
        """Logarithm of predicted over measured time per row."""
        parameters = self._start.with_values(values)
        launch = parameters.launch_us.value
        predicted = [
            max(part_times_us(parameters, work, split)) + launch
            for work, split in zip(self._work, self._splits, strict=True)
        ]
        return np.log(np.array(predicted, dtype=np.float64) / self._times)

    def determined_solution(self) -> _Solution:
        """The best solution in which every free parameter is determined by the rows."""
        best: _Solution | None = None
        for values in self._starts():
            found = self._drop_undetermined(self._minimise(values))
            if best is None or self._score(found) < self._score(best):
                best = found
        assert best is not None
        return best

    def _score(self, solution: _Solution) -> float:
        """What remains and what was spent on it: less is better.

        The Bayesian information criterion with the correction for few rows. Without it a further
        parameter would always win, because it can follow the noise.
        """
        count, spent = len(self._times), len(solution.values)
        if count - spent <= 1:
            return math.inf if spent else 0.0
        mean = solution.squares / count + _NO_DIFFERENCE**2
        few = 2 * spent * (spent + 1) / (count - spent - 1)
        return count * math.log(mean) + spent * math.log(count) + few

    def _starts(self) -> list[dict[str, float]]:
        """Where to begin: with and without limits of what is shared, bends of both kinds."""
        flops = [work.flops for work in self._work]
        seen = max(count / time for count, time in zip(flops, self._times, strict=True)) / 1e6
        values = {name: getattr(self._start, name).value for name in UNITS}
        values["launch_us"] = values["launch_us"] or _START_LAUNCH_US
        apart = {name: value for name, value in values.items() if name not in _START_SHARED}
        return [
            {**begin, "chip_tflops": chip, "stream_sharpness": sharpness}
            for begin in (apart, {**values, **_START_SHARED})
            for chip in (_UNLIMITED_TFLOPS, float(seen))
            for sharpness in _START_SHARPNESS
        ]

    def _drop_undetermined(self, solution: _Solution) -> _Solution:
        """Gives back the parameters that the rows leave open, the worst first."""
        while solution.errors:
            worst = max(solution.errors, key=solution.errors.__getitem__)
            if solution.errors[worst] <= _WORST_ERROR:
                break
            rest = {name: v for name, v in solution.values.items() if name != worst}
            solution = self._minimise(rest)
        return solution

    def _minimise(self, values: Mapping[str, float]) -> _Solution:
        """Least squares from the given values; the parameters not named stay fixed."""
        names = tuple(values)
        if not names:
            remains = self.residuals({})
            return _Solution({}, float(remains @ remains), {})
        limits = np.log([_LIMITS.get(name, (1e-30, 1e30)) for name in names])

        def at(point: Vector) -> Vector:
            return self.residuals(dict(zip(names, np.exp(point).tolist(), strict=True)))

        start = np.clip(np.log([values[name] for name in names]), *limits.T)
        found = _least_squares()(
            at, start, jac="3-point", diff_step=_STEP, bounds=limits.T, max_nfev=_EVALUATIONS
        )
        solution = dict(zip(names, np.exp(found.x).tolist(), strict=True))
        return _Solution(solution, 2 * float(found.cost), self._errors(names, found.jac, found.fun))

    def _errors(self, names: Sequence[str], slopes: Vector, remains: Vector) -> dict[str, float]:
        """Relative standard error of each parameter; infinite where the rows say nothing."""
        freedom = max(1, len(self._times) - len(names))
        noise = max(math.sqrt(float(remains @ remains) / freedom), _LEAST_NOISE)
        silent = np.linalg.norm(slopes, axis=0) < 1e-9
        errors = dict.fromkeys(names, math.inf)
        if not silent.all():
            # The pseudo-inverse would call a combination without any slope certain; so it is
            # regularised instead, and such parameters come out with a huge variance.
            known = slopes[:, ~silent]
            normal = known.T @ known
            variances = np.diag(np.linalg.inv(normal + 1e-12 * np.eye(normal.shape[0])))
            loud = [name for name, mute in zip(names, silent, strict=True) if not mute]
            for name, variance in zip(loud, variances, strict=True):
                errors[name] = noise * math.sqrt(max(float(variance), 0.0))
        return errors
