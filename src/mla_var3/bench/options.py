"""What a benchmark run is asked for."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mla_var3.bench.measure import MAX_SECONDS, ROUNDS
from mla_var3.bench.record import BenchRow
from mla_var3.bench.suites import COMMON, FIXED_SUITES, SUITES
from mla_var3.bench.watch import PATIENCE
from mla_var3.conf.devices import device_spec
from mla_var3.errors import InvalidArgumentError, UnknownNameError
from mla_var3.runtime.workflow import Progress, no_progress

MEASURE, PREDICT, AUTO = "measure", "predict", "auto"
_ONE_VALUE = {"all": ("b", "s", "t", "h"), "var6_plus": ("b", "t", "h")}


@dataclass
class BenchOptions:
    """What to run.

    Attributes:
        suite: one of `mla_var3.bench.suites.SUITES`.
        sizes: b, s, t and h, each one or several values.
        dtype, causal: the rest of the problem.
        n_values: windows of the suite var6_plus.
        version: version of mla_var6_plus for that suite.
        kernels: "all", "latest", designs or full names.
        backends: languages and peers; all of them when empty.
        quick: fewer shapes of the sweep and fewer windows.
        rounds: how often each contender is timed.
        max_seconds: time for one timing.
        patience: seconds that one contender may take in one round.
        tune: search tilings before timing.
        peer_libs: folder with the peers' operator libraries.
        mode: "measure", "predict", or "auto": measure where there is a GPU.
        predict_for: device of the table to predict for.
        records: records to read instead of running anything.
        resume: record of an interrupted run of the same suite to go on with.
        against: earlier record to compare with.
        across_versions: compare also where compilers or peers have other versions.
        out_dir: folder of the report.
        progress: reporter for long work.
        on_rows: called with the rows of each finished shape.
        on_lost: called with the record when a contender took the device down or does not come
            back; it should go on in a new process. Without it the run ends there, and nothing
            watches over contenders that do not come back.
    """

    suite: str = "figures"
    sizes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    dtype: str = "bfloat16"
    causal: bool = True
    n_values: tuple[int, ...] | None = None
    version: str | None = None
    kernels: tuple[str, ...] = ()
    backends: tuple[str, ...] = ()
    quick: bool = False
    rounds: int = ROUNDS
    max_seconds: float = MAX_SECONDS
    patience: float = PATIENCE
    tune: bool = False
    peer_libs: Path | None = None
    mode: str = AUTO
    predict_for: str | None = None
    records: tuple[Path, ...] = ()
    resume: Path | None = None
    against: Path | None = None
    across_versions: bool = False
    out_dir: Path | None = None
    progress: Progress = no_progress
    on_rows: Callable[[Sequence[BenchRow]], None] = lambda rows: None
    on_lost: Callable[[Path], None] | None = None

    def __post_init__(self) -> None:
        if self.suite not in SUITES:
            raise UnknownNameError("suite", self.suite, SUITES)
        if self.rounds < 1:
            raise InvalidArgumentError("rounds", "a number of at least 1", self.rounds)
        for name in ("max_seconds", "patience"):
            if not 0 < getattr(self, name) < math.inf:
                raise InvalidArgumentError(name, "a positive number", getattr(self, name))
        if self.predict_for is not None:
            device_spec(self.predict_for)  # an unknown name is an error at once
        if self.peer_libs is not None and not self.peer_libs.is_dir():
            raise InvalidArgumentError("peer_libs", "a folder", self.peer_libs)
        if self.resume and (self.records or self.predict_for or self.mode == PREDICT):
            other = "records" if self.records else "predictions"
            raise InvalidArgumentError("resume", f"none with {other}", self.resume)
        if self.suite in FIXED_SUITES:
            given = [*self.sizes, *(["causal"] if not self.causal else [])]
            given += ["dtype"] if self.dtype != COMMON.dtype else []
            given += ["kernels"] if self.kernels else []
            if given:
                raise InvalidArgumentError(
                    given[0],
                    f"none: the suite {self.suite} has fixed shapes (use all or sweep)",
                    "one",
                )
        for name, values in self.sizes.items():
            if not values or (name in _ONE_VALUE.get(self.suite, ()) and len(values) > 1):
                count = "one value" if name in _ONE_VALUE.get(self.suite, ()) else "some values"
                raise InvalidArgumentError(name, f"{count} for the suite {self.suite}", values)
        if self.n_values == ():
            raise InvalidArgumentError("n", "some windows", self.n_values)
        for name, value in (("n", self.n_values), ("version", self.version)):
            if value is not None and self.suite != "var6_plus":
                raise InvalidArgumentError(name, "none: only the suite var6_plus has it", value)
