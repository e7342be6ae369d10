"""Autotuning: the fastest tiling of every kernel, and the fastest of neighbouring plans.

Each candidate is first judged without the GPU (constraints, machine code), then timed with a cold
L2 cache. Every outcome, failures included, goes to a JSON history that later calls go on from; see
`autotune_cache.py` for when a history is used and when it is refused.
"""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, TypeVar

from mla_var3.errors import UnsupportedError
from mla_var3.runtime.autotune.filter import Instruments
from mla_var3.runtime.autotune.history import (
    Entry,
    History,
    StageTuning,
    canonical,
    history_path,
    is_timed,
    median_us,
    tuning_key,
)
from mla_var3.runtime.autotune.search import (
    GpuLostError,
    Search,
    describe_error,
    is_attempted,
    require_healthy,
)
from mla_var3.runtime.autotune.units import Unit, units_of
from mla_var3.runtime.measure import Timing, require_cuda
from mla_var3.runtime.plan import KernelPlan
from mla_var3.runtime.stage import Stage

if TYPE_CHECKING:
    from mla_var3.conf.devices import DeviceSpec
    from mla_var3.runtime.workflow import RunOptions

__all__ = ["Entry", "Instruments", "StageTuning", "autotune", "refine_plan"]

log = logging.getLogger(__name__)

P = TypeVar("P", bound=KernelPlan)


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

    Args:
        stage: the runtime object, with tensors on the device.
        plan: the plan that built it.
        spec: the device.
        options: `retune`, `tune_max_iters` and `progress` are used.
        instruments: what to compile and time with; the GPU by default.

    Returns:
        The outcome per kernel or group, by name.

    Raises:
        UnsupportedError: a candidate made the GPU unusable; the results so far are kept.
    """
    instruments = instruments or _gpu_instruments(stage)
    outcomes: dict[str, StageTuning] = {}
    earlier: list[Unit] = []
    for unit in units_of(stage):
        key = tuning_key(plan, spec, unit.name, unit.kernels.values())
        history = History(history_path(plan, spec, key), key, retune=options.retune)

        def run_earlier(units: tuple[Unit, ...] = tuple(earlier)) -> None:
            # A kernel may read what the ones before it write, and its time may depend on it.
            for before in units:
                before.stage.launch()

        search = Search(unit, spec, options, history, instruments, run_earlier)
        outcomes[unit.name] = search.run()
        earlier.append(unit)
    return outcomes


def refine_plan(
    plan: P,
    spec: DeviceSpec,
    options: RunOptions,
    *,
    instruments: Instruments | None = None,
) -> P:
    """Let timing choose between a plan and its neighbours.

    Each is timed as a whole, with tuned tilings when `options.autotune` is set. The outcome is kept
    like that of a stage named `<kernel>.refine`.

    Args:
        plan: the plan as the model chose it.
        spec: the device.
        options: as for `autotune`; `tune_max_iters` bounds the tuning of each plan, not their
            number.
        instruments: what to compile and time with; the GPU by default.

    Returns:
        The fastest plan; the given one when none could be timed.

    Raises:
        UnsupportedError: there is no CUDA device, or a candidate made it unusable.
    """
    if instruments is None:
        require_cuda("refine_plan")
        instruments = Instruments()
    distinct: dict[str, P] = {}
    for candidate in (plan, *plan.refinements()):
        distinct.setdefault(canonical(candidate.params()), candidate)
    candidates = list(distinct.values())
    if len(candidates) == 1:
        return plan
    stage_name = f"{plan.name}.refine"
    kernels = plan.plan(*plan.prepare_inputs("meta")).kernels()
    key = tuning_key(plan, spec, stage_name, kernels, tuned=options.autotune)
    history = History(history_path(plan, spec, key), key, retune=options.retune)
    what, total = f"refine {plan.name}", len(candidates)
    searched = False
    for done, candidate in enumerate(candidates):
        if _is_attempted(history, candidate):
            continue
        searched = True
        options.progress(what, done, total, candidate.params_label())
        try:
            timing, tilings = _time_plan(candidate, spec, options, instruments)
        except GpuLostError:
            raise  # the history of the stage that did it has it
        except Exception as error:  # for example too little memory: a result like any other
            history.record(candidate.params(), "failed", describe_error(error))
            log.info("%s: %s failed: %s", stage_name, candidate.params_label(), error)
            require_healthy(instruments, history, error)
        else:
            history.record(candidate.params(), "ok", f"with {tilings}", timing=timing)
    if searched:
        history.finish(complete=True)
    else:
        log.info("%s: using the results in %s", stage_name, history.path)
    times = {i: _time_us(history, c) for i, c in enumerate(candidates)}
    best = min(times, key=lambda i: times[i])
    options.progress(what, total, total, candidates[best].params_label())
    if math.isinf(times[best]):
        log.warning("%s: no plan could be timed; reasons in %s", stage_name, history.path)
        return plan
    return candidates[best]


def _time_us(history: History, plan: KernelPlan) -> float:
    entry = history.get(plan.params())
    return median_us(entry) if entry is not None and is_timed(entry) else math.inf


def _gpu_instruments(stage: Stage) -> Instruments:
    if stage.device_type != "cuda":
        raise UnsupportedError(
            f"autotune: expected tensors on a CUDA device, got {stage.device_type!r}; "
            "only timing can tell which tiling is the fastest"
        )
    return Instruments()


def _is_attempted(history: History, plan: KernelPlan) -> bool:
    entry = history.get(plan.params())
    return entry is not None and is_attempted(entry)


def _time_plan(
    plan: KernelPlan, spec: DeviceSpec, options: RunOptions, instruments: Instruments
) -> tuple[Timing, str]:
    """Time a plan as a whole, and say with which tilings; its tensors are gone afterwards."""
    stage = plan.plan(*plan.prepare_inputs("cuda"))
    if options.autotune:
        autotune(stage, plan, spec, options, instruments=instruments)
    timing = instruments.time(stage.launch)
    return timing, "; ".join(f"{name} {tiling.label()}" for name, tiling in stage.tilings().items())
