"""The search for the fastest tilings of one tuning unit."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from mla_var3.errors import InvalidArgumentError, UnsupportedError
from mla_var3.runtime.autotune.filter import Check, Instruments, StaticFilter
from mla_var3.runtime.autotune.history import (
    Entry,
    History,
    StageTuning,
    canonical,
    is_timed,
    median_us,
)
from mla_var3.runtime.autotune.units import Combo, Member, Unit, member
from mla_var3.runtime.tiling import Tiling, tiling_from_dict

if TYPE_CHECKING:
    from mla_var3.conf.devices import DeviceSpec
    from mla_var3.runtime.workflow import RunOptions

log = logging.getLogger(__name__)

_LARGE_SEARCH = 1000
_ERROR_LENGTH = 500
_NONE: frozenset[Member] = frozenset()


class Search:
    """One search: goes through the candidates, notes every outcome, applies the best."""

    def __init__(
        self,
        unit: Unit,
        spec: DeviceSpec,
        options: RunOptions,
        history: History,
        instruments: Instruments,
        before: Callable[[], None],
    ) -> None:
        """Collect the candidates.

        Args:
            unit: what is tuned.
            spec: the device.
            options: limits and progress.
            history: outcomes so far.
            instruments: what to compile and time with.
            before: called once before the first timing; fills the unit's inputs.
        """
        self._unit = unit
        self._options = options
        self._history = history
        self._instruments = instruments
        self._before: Callable[[], None] | None = before
        self._filter = StaticFilter(unit, spec, instruments, history.entries)
        self._candidates = unit.candidates()
        # Nearest to the defaults and to the author's order first, whichever kernel differs.
        ranked = itertools.product(*(enumerate(tilings) for tilings in self._candidates.values()))
        self._combos: list[Combo] = [
            tuple(tiling for _, tiling in combo)
            for combo in sorted(ranked, key=lambda combo: sum(rank for rank, _ in combo))
        ]

    def run(self) -> StageTuning:
        """Search what the history does not have, set the best tilings, return the outcome."""
        if len(self._combos) == 1:
            return self._only_candidate()
        from_cache = self._is_served()
        if from_cache:
            log.info("%s: using the tuning results in %s", self._unit.name, self._history.path)
        else:
            self._search()
        best = self._apply_best()
        detail = "no usable candidate" if best is None else f"best {median_us(best):.1f} us"
        self._progress(len(self._combos), detail)
        return self._history.tuning(best, from_cache=from_cache)

    def _search(self) -> None:
        if len(self._combos) > _LARGE_SEARCH and self._options.tune_max_iters is None:
            log.warning(
                "%s: %d candidates; tune_max_iters would bound the search",
                self._unit.name,
                len(self._combos),
            )
        defaults = tuple(kernel.tiling for kernel in self._unit.kernels.values())
        try:
            complete = self._scan(_NONE)
            if complete:
                kept = self._filter.least_bad(self._candidates)
                complete = not kept or self._scan(kept)
        except BaseException as error:
            self._unit.set_tilings(defaults)
            if isinstance(error, KeyboardInterrupt):
                error.add_note("tuning results so far are kept and the next run resumes there")
            raise
        self._history.finish(complete)

    def _scan(self, kept: frozenset[Member]) -> bool:
        """Handle every candidate that has no outcome yet; False when the limit ended it.

        Args:
            kept: kernels and tilings that are timed although they would run badly.
        """
        limit = self._options.tune_max_iters
        for done, combo in enumerate(self._combos):
            if self._is_settled(combo, kept):
                continue
            if limit is not None and self._attempted() >= limit:
                return False
            self._progress(done, " | ".join(tiling.label() for tiling in combo))
            if self._is_worth_timing(combo, kept):
                self._time(combo)
        return True

    def _is_worth_timing(self, combo: Combo, kept: frozenset[Member]) -> bool:
        """Whether a candidate passes what can be said without the GPU; notes why not."""
        named = list(zip(self._unit.kernels, combo, strict=True))
        # What costs nothing to find again need not reach the disk at once.
        for name, tiling in named:
            failures = self._filter.constraint_failures(name, tiling)
            if failures:
                self._reject(name, tiling, Check(hard=failures), save=False)
                return False
        failures = self._unit.joint_failures(combo)
        if failures:
            config = self._unit.config(combo)
            self._history.record(config, "rejected", "; ".join(failures), save=False)
            return False
        for name, tiling in named:
            check = self._filter.check(name, tiling)
            if check.hard or (check.soft and member(name, tiling) not in kept):
                self._reject(name, tiling, check, save=True)
                return False
        return True

    def _reject(self, name: str, tiling: Tiling, check: Check, *, save: bool) -> None:
        self._history.record(
            self._unit.member_config(name, tiling),
            "rejected",
            "; ".join((*check.hard, *check.soft)),
            compiled=self._filter.summary({name: check}),
            save=save,
        )

    def _time(self, combo: Combo) -> None:
        if self._before is not None:
            self._before()
            self._before = None
        checks = {
            name: self._filter.check(name, tiling)
            for name, tiling in zip(self._unit.kernels, combo, strict=True)
        }
        config, compiled = self._unit.config(combo), self._filter.summary(checks)
        self._unit.set_tilings(combo)
        try:
            timing = self._instruments.time(self._unit.stage.launch)
        except Exception as error:  # whatever a candidate does wrong is its result
            reason = describe_error(error)
            self._history.record(config, "failed", reason, compiled=compiled)
            log.info("%s: %s failed: %s", self._unit.name, canonical(config), reason)
            require_healthy(self._instruments, self._history, error)
        else:
            note = self._note(checks)
            self._history.record(config, "ok", note, timing=timing, compiled=compiled)

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
        config = self._unit.config(combo)
        entry = self._history.get(config)
        from_cache = entry is not None
        if entry is None:
            refusals = self._refusals(combo)
            reason = "; ".join(refusals) or "the only candidate, not timed"
            self._history.record(config, "rejected" if refusals else "ok", reason, save=False)
            self._history.finish(complete=True)
            entry = self._history.get(config)
        usable = entry if entry is not None and entry["status"] == "ok" else None
        return self._history.tuning(usable, from_cache=from_cache)

    def _is_settled(self, combo: Combo, kept: frozenset[Member] = _NONE) -> bool:
        """Whether the history says what became of a candidate or of a kernel's part of it."""
        entry = self._history.get(self._unit.config(combo))
        if entry is not None:
            if is_attempted(entry):
                return True
            if self._unit.joint and entry["status"] == "rejected":
                return True
        for name, tiling in zip(self._unit.kernels, combo, strict=True):
            part = self._history.get(self._unit.member_config(name, tiling))
            rejected = part is not None and part["status"] == "rejected"
            if rejected and member(name, tiling) not in kept:
                return True
        return False

    def _attempted(self) -> int:
        return sum(map(is_attempted, self._history.entries))

    def _is_served(self) -> bool:
        """Whether the history has all that this search would find."""
        if not self._history.found:
            return False
        limit = self._options.tune_max_iters
        if limit is not None and self._attempted() >= limit:
            return True
        return self._history.complete and all(map(self._is_settled, self._combos))

    def _apply_best(self) -> Entry | None:
        timed = [entry for entry in self._history.entries if is_timed(entry)]
        for entry in sorted(timed, key=median_us):
            combo = self._combo(entry)
            if combo is not None:
                self._unit.set_tilings(combo)
                return entry
        log.warning(
            "%s: no candidate could be timed, the tiling stays as it was; reasons in %s",
            self._unit.name,
            self._history.path,
        )
        return None

    def _combo(self, entry: Entry) -> Combo | None:
        """The tilings of an entry, None when this plan does not take them."""
        known = {
            member(k, tiling): tiling for k, some in self._candidates.items() for tiling in some
        }
        configs = self._unit.by_kernel(entry["config"])
        try:
            combo = tuple(
                known.get((name, canonical(configs[name])))
                or tiling_from_dict(type(kernel.tiling), configs[name])
                for name, kernel in self._unit.kernels.items()
            )
        except (InvalidArgumentError, KeyError, TypeError):
            return None
        return None if self._refusals(combo) else combo

    def _refusals(self, combo: Combo) -> tuple[str, ...]:
        alone = (
            failure
            for name, tiling in zip(self._unit.kernels, combo, strict=True)
            for failure in self._filter.constraint_failures(name, tiling)
        )
        return tuple(alone) or self._unit.joint_failures(combo)

    def _progress(self, done: int, detail: str) -> None:
        self._options.progress(f"autotune {self._unit.name}", done, len(self._combos), detail)


def is_attempted(entry: Entry) -> bool:
    """Whether the GPU was spent on a candidate."""
    return entry["status"] == "failed" or is_timed(entry)


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
