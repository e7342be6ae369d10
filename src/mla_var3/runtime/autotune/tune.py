"""Autotuning: the fastest tiling of every kernel, and the fastest of neighbouring plans.

Each candidate is first judged without the GPU (constraints, machine code), then timed with a cold
L2 cache. Every outcome, failures included, goes to a JSON history that later calls resume from; see
`history.py` for when a history is used and when it is refused.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from mla_var3.conf.devices import DeviceSpec
from mla_var3.errors import UnsupportedError
from mla_var3.runtime.autotune.history import (
    Entry,
    History,
    StageTuning,
    Status,
    canonical,
    fastest,
    history_path,
    is_attempted,
    is_timed,
    median_us,
    tuning_key,
)
from mla_var3.runtime.autotune.units import (
    Check,
    Combo,
    Instruments,
    StaticFilter,
    Unit,
    units_of,
)
from mla_var3.runtime.measure import Timing
from mla_var3.runtime.plan import KernelPlan
from mla_var3.runtime.stage import Stage, constraint_failures

if TYPE_CHECKING:
    from mla_var3.runtime.workflow import RunOptions

__all__ = ["Entry", "Instruments", "StageTuning", "autotune", "refine_plan"]

log = logging.getLogger(__name__)

P = TypeVar("P", bound=KernelPlan)

_LARGE_SEARCH = 1000
_ERROR_LENGTH = 500


def autotune(
    stage: Stage,
    plan: KernelPlan,
    spec: DeviceSpec,
    options: RunOptions,
    *,
    instruments: Instruments | None = None,
) -> dict[str, StageTuning]:
    """Find and set the fastest tiling of every kernel of a runtime object.

    A kernel outside a `ConcurrentKernels` group is tuned alone, the kernels of a group together.
    The active tilings are candidates too, the first ones.

    Of the options `retune`, `tune_max_iters`, `tune_seconds` and `progress` are used. The stages
    share the seconds evenly; what one does not need is left to the others.

    Returns:
        The outcome per kernel or group, by name.

    Raises:
        UnsupportedError: a candidate made the GPU unusable; the results so far are kept.
    """
    instruments = instruments or Instruments()
    outcomes: dict[str, StageTuning] = {}
    units = units_of(stage)
    end = _end_of(options)
    for place, unit in enumerate(units):
        now = time.monotonic()
        deadline = now + max(end - now, 0.0) / (len(units) - place)
        key = tuning_key(plan, spec, unit.name, unit.kernels.values())
        history = History(history_path(plan, spec, key), key, retune=options.retune)
        search = Search(unit, spec, options, history, instruments, units[:place], deadline)
        outcomes[unit.name] = search.run()
    return outcomes


def refine_plan(
    plan: P, spec: DeviceSpec, options: RunOptions, *, instruments: Instruments | None = None
) -> P:
    """Let timing choose between a plan and its neighbours.

    Each is timed as a whole, with tuned tilings when `options.autotune` is set. The outcome is kept
    like that of a stage named `<kernel>.refine`. The options are those of `autotune`:
    `tune_max_iters` bounds the tuning of each plan, not their number, and the plans share the
    seconds as the stages of one do.

    Returns:
        The fastest plan; the given one when none could be timed.

    Raises:
        UnsupportedError: a candidate made the GPU unusable.
    """
    instruments = instruments or Instruments()
    distinct: dict[str, P] = {}
    for candidate in (plan, *plan.refinements()):
        distinct.setdefault(canonical(candidate.params()), candidate)
    candidates = list(distinct.values())
    if len(candidates) == 1:
        return plan
    stage_name = f"{plan.name}.refine"
    kernels = list(plan.plan(*plan.prepare_inputs("meta")).kernels())
    # Tilings that are not tuned decide the times.
    tilings = None if options.autotune else [kernel.tiling.to_dict() for kernel in kernels]
    key = tuning_key(plan, spec, stage_name, kernels, tuned=options.autotune, tilings=tilings)
    history = History(history_path(plan, spec, key), key, retune=options.retune)
    what, total = f"refine {plan.name}", len(candidates)
    searched = False
    end = _end_of(options)
    for done, candidate in enumerate(candidates):
        entry = history.get(candidate.params())
        if entry is not None and is_attempted(entry):
            continue
        searched = True
        options.progress(what, done, total, candidate.params_label())
        left = max(end - time.monotonic(), 0.0) / (total - done)
        share = dataclasses.replace(options, tune_seconds=left)
        try:
            timing, used = _time_plan(candidate, spec, share, instruments)
        except GpuLostError:
            raise  # the history of the stage that did it has it
        except Exception as error:  # for example too little memory: a result like any other
            history.record(candidate.params(), "failed", describe_error(error))
            log.info("%s: %s failed: %s", stage_name, candidate.params_label(), error)
            require_healthy(instruments, history, error)
        else:
            history.record(candidate.params(), "ok", f"with {used}", timing=timing)
    if searched:
        history.finish(complete=True)
    else:
        log.info("%s: using the results in %s", stage_name, history.path)
    outcomes = (history.get(candidate.params()) for candidate in candidates)
    winner = fastest(filter(None, outcomes))
    if winner is None:
        log.warning("%s: no plan could be timed; reasons in %s", stage_name, history.path)
        return plan
    best = distinct[canonical(winner["config"])]
    options.progress(what, total, total, best.params_label())
    return best


def _end_of(options: RunOptions) -> float:
    """When the seconds for tuning are over, as `time.monotonic` counts."""
    return math.inf if options.tune_seconds is None else time.monotonic() + options.tune_seconds


def _time_plan(
    plan: KernelPlan, spec: DeviceSpec, options: RunOptions, instruments: Instruments
) -> tuple[Timing, str]:
    """Time a plan as a whole, and say with which tilings; its tensors are gone afterwards."""
    stage = plan.plan(*plan.prepare_inputs("cuda"))
    if options.autotune:
        autotune(stage, plan, spec, options, instruments=instruments)
    timing = instruments.time(stage.launch)
    return timing, "; ".join(f"{name} {tiling.label()}" for name, tiling in stage.tilings().items())


@dataclass
class Search:
    """One search: tries the candidates, records every outcome, applies the best.

    The units `before` are launched once: a kernel may read what the ones before it write, and its
    time may depend on it.
    """

    unit: Unit
    spec: DeviceSpec
    options: RunOptions
    history: History
    instruments: Instruments
    before: Sequence[Unit]
    deadline: float

    def __post_init__(self) -> None:
        self._filter = StaticFilter(self.unit, self.spec, self.instruments, self.history.entries)
        # Nearest to the defaults and to the author's order first, whichever kernel differs.
        candidates = self.unit.candidates().values()
        ranked = itertools.product(*map(enumerate, candidates))
        self._combos: list[Combo] = [
            tuple(tiling for _, tiling in combo)
            for combo in sorted(ranked, key=lambda combo: sum(rank for rank, _ in combo))
        ]
        self._by_config = {canonical(self.unit.config(combo)): combo for combo in self._combos}

    def run(self) -> StageTuning:
        if len(self._combos) == 1:
            return self._only_candidate()
        from_cache = self._is_served()
        if from_cache:
            log.info("%s: using the tuning results in %s", self.unit.name, self.history.path)
        else:
            self._search()
        best = self._apply_best()
        detail = "no usable candidate" if best is None else f"best {median_us(best):.1f} us"
        self._progress(len(self._combos), detail)
        return self._tuning(best, from_cache)

    def _tuning(self, best: Entry | None, from_cache: bool) -> StageTuning:
        history = self.history
        config = None if best is None else best["config"]
        time_us = median_us(best) if best is not None and is_timed(best) else None
        found = (history.path, config, time_us, history.entries, from_cache, history.complete)
        return StageTuning(self.unit.name, history.key, *found, candidates=len(self._combos))

    def _search(self) -> None:
        if len(self._combos) > _LARGE_SEARCH and self.options.tune_max_iters is None:
            message = "%s: %d candidates; tune_max_iters would bound the search"
            log.warning(message, self.unit.name, len(self._combos))
        defaults = tuple(kernel.tiling for kernel in self.unit.kernels.values())
        try:
            complete = self._scan(self._combos)
            if complete and not any(map(is_timed, self._own_entries())):
                complete = self._scan(self._least_bad(), soft=True)
        except BaseException as error:
            self.unit.set_tilings(defaults)
            if isinstance(error, KeyboardInterrupt):
                error.add_note("tuning results so far are kept and the next run resumes there")
            raise
        self.history.finish(complete)

    def _scan(self, combos: Sequence[Combo], *, soft: bool = False) -> bool:
        """Handle every candidate that has no outcome yet; False when a limit ended it.

        With `soft`, candidates are timed although they would run badly.
        """
        limit = self.options.tune_max_iters
        for done, combo in enumerate(combos):
            if self._is_settled(combo, soft=soft):
                continue
            if limit is not None and self._attempted() >= limit:
                return False
            if time.monotonic() >= self.deadline and self._attempted():
                return False
            self._progress(done, " | ".join(tiling.label() for tiling in combo))
            if soft or not self._reject(combo):
                self._time(combo)
        return True

    def _reject(self, combo: Combo) -> bool:
        """Record why a candidate is not worth timing, as far as the GPU is not needed to tell."""
        config = self.unit.config(combo)
        if failures := self._constraint_failures(combo):
            # What costs nothing to find again need not reach the disk at once.
            self.history.record(config, "rejected", "; ".join(failures), save=False)
            return True
        for name, tiling in zip(self.unit.kernels, combo, strict=True):
            check = self._filter.check(name, tiling)
            if check.hard or check.soft:
                reason = "; ".join((*check.hard, *check.soft))
                compiled = self._filter.summary({name: check})
                self.history.record(config, "rejected", reason, compiled=compiled)
                return True
        return False

    def _constraint_failures(self, combo: Combo) -> tuple[str, ...]:
        """The constraints of the kernels, and of all of them together, that do not hold."""
        kernels = zip(self.unit.kernels.values(), combo, strict=True)
        alone = (f for kernel, tiling in kernels for f in constraint_failures(tiling, kernel.plan))
        return tuple(alone) or self.unit.joint_failures(combo)

    def _least_bad(self) -> list[Combo]:
        """What to time where every candidate would run badly: those with the fewest stack bytes."""
        stacks: dict[int, int] = {}
        for number, combo in enumerate(self._combos):
            checks = [] if self._constraint_failures(combo) else self._checks(combo).values()
            if checks and not any(check.hard for check in checks):
                stacks[number] = sum(check.stack_bytes for check in checks)
        fewest = min(stacks.values(), default=0)
        if stacks:
            message = "%s: every candidate spills or misses the tensor-core path; timing those "
            log.warning(message + "with the fewest stack bytes (%d)", self.unit.name, fewest)
        return [self._combos[number] for number, stack in stacks.items() if stack == fewest]

    def _checks(self, combo: Combo) -> dict[str, Check]:
        named = zip(self.unit.kernels, combo, strict=True)
        return {name: self._filter.check(name, tiling) for name, tiling in named}

    def _time(self, combo: Combo) -> None:
        for unit in self.before:
            unit.stage.launch()
        self.before = ()
        checks = self._checks(combo)
        config, compiled = self.unit.config(combo), self._filter.summary(checks)
        self.unit.set_tilings(combo)
        try:
            timing = self.instruments.time(self.unit.stage.launch)
        except Exception as error:  # whatever a candidate does wrong is its result
            reason = describe_error(error)
            self.history.record(config, "failed", reason, compiled=compiled)
            log.info("%s: %s failed: %s", self.unit.name, canonical(config), reason)
            require_healthy(self.instruments, self.history, error)
        else:
            note = self._note(checks)
            self.history.record(config, "ok", note, timing=timing, compiled=compiled)

    def _note(self, checks: dict[str, Check]) -> str | None:
        """What a reader of a timed candidate should know."""
        notes = [
            f"kept although it {'; '.join(check.soft)}: every candidate of {name} spills or misses "
            "the tensor-core path, and this is one with the fewest stack bytes"
            for name, check in checks.items()
            if check.soft
        ]
        if self._filter.unavailable:
            notes.append(f"not filtered by compiling: {self._filter.unavailable}")
        return "; ".join(notes) or None

    def _only_candidate(self) -> StageTuning:
        """Nothing to choose: note it and go on."""
        (combo,) = self._combos
        config = self.unit.config(combo)
        entry = self.history.get(config)
        from_cache = entry is not None
        if entry is None:
            refusals = self._constraint_failures(combo)
            reason = "; ".join(refusals) or "the only candidate, not timed"
            status: Status = "rejected" if refusals else "ok"
            entry = self.history.record(config, status, reason, save=False)
            self.history.finish(complete=True)
        return self._tuning(entry if entry["status"] == "ok" else None, from_cache)

    def _is_settled(self, combo: Combo, *, soft: bool = False) -> bool:
        """Whether the history says what became of a candidate; `soft` as in `_scan`."""
        entry = self.history.get(self.unit.config(combo))
        if entry is None:
            return False
        return is_attempted(entry) or (entry["status"] == "rejected" and not soft)

    def _own_entries(self) -> list[Entry]:
        """Outcomes of this search's candidates: an earlier one may have had another tiling."""
        return [e for e in self.history.entries if canonical(e["config"]) in self._by_config]

    def _attempted(self) -> int:
        return sum(map(is_attempted, self._own_entries()))

    def _is_served(self) -> bool:
        """Whether the history has all that this search would find."""
        if not self.history.found:
            return False
        limit = self.options.tune_max_iters
        if limit is not None and self._attempted() >= limit:
            return True
        # Those that would run badly are timed only where nothing else is.
        if not any(map(is_timed, self._own_entries())) and self.history.best() is not None:
            return False
        return self.history.complete and all(map(self._is_settled, self._combos))

    def _apply_best(self) -> Entry | None:
        best = fastest(self._own_entries())
        if best is None:
            message = "%s: no candidate could be timed, the tiling stays as it was; reasons in %s"
            log.warning(message, self.unit.name, self.history.path)
        else:
            self.unit.set_tilings(self._by_config[canonical(best["config"])])
        return best

    def _progress(self, done: int, detail: str) -> None:
        self.options.progress(f"autotune {self.unit.name}", done, len(self._combos), detail)


def describe_error(error: BaseException) -> str:
    """An exception as the reason of an entry."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:_ERROR_LENGTH]


class GpuLostError(UnsupportedError):
    """A candidate made the GPU unusable for this process."""


def require_healthy(instruments: Instruments, history: History, error: Exception) -> None:
    """Stop when an error took the GPU with it: every later candidate would seem to fail too."""
    if not instruments.healthy():
        raise GpuLostError(
            f"{history.key['stage']}: the GPU cannot be used any more after "
            f"{describe_error(error)}; the results so far are in {history.path}: "
            "run again to continue without the culprit"
        ) from error
