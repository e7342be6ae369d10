"""Benchmark rows without a GPU: what the cost model says about the same kernels and shapes.

A prediction knows nothing of how well a kernel is written: all versions of a design that do the
same work get the same time. Peers are not predicted; the two pure paths stand for them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from mla_var3.bench.contenders import choices_of, make_plan, path_of
from mla_var3.bench.measure import with_projections
from mla_var3.bench.record import (
    ABSENT,
    FAILED,
    OURS,
    OUTPUT_PROJECTION,
    PREDICTED,
    PROJECTION,
    QUERY_PROJECTION,
    BenchRow,
)
from mla_var3.bench.suites import Case, KernelChoice
from mla_var3.conf.devices import DeviceSpec
from mla_var3.errors import UnsupportedError
from mla_var3.op.mla.cost import output_up_projection_cost, q_absorption_cost
from mla_var3.op.mla.problem import MlaProblem

log = logging.getLogger(__name__)

TIMER = "roofline"
NOTE = (
    "Predictions, not measurements: the time an ideal kernel needs at the rates of the device "
    "table. Versions that do the same work get the same time, and peers are not predicted; "
    "flash_mla and flash_attention stand for the two pure paths."
)


def predict_case(case: Case, spec: DeviceSpec, around: Mapping[str, Any]) -> list[BenchRow]:
    """Predicted rows of one shape; a kernel that cannot be planned is a row with its reason."""
    rows = [_kernel_row(choice, case.problem, spec, around) for choice in case.kernels]
    rows += [_projection_row(name, case.problem, spec, around) for name in _PROJECTIONS]
    return with_projections(rows)


def _kernel_row(
    choice: KernelChoice, problem: MlaProblem, spec: DeviceSpec, around: Mapping[str, Any]
) -> BenchRow:
    rates = (spec.sustained_tflops(problem.dtype), spec.sustained_gbps)
    names: dict[str, Any] = {
        "problem": problem,
        "kernel": choice.kernel.full_name,
        "language": choice.kernel.language,
        "source": OURS,
        "kind": PREDICTED,
        "timer": TIMER,
        **around,
    }
    try:
        plan = make_plan(choice, problem, spec.target).on_device(spec)
        stage = plan.plan_empty(*rates)
        cost = stage.cost()
        return BenchRow(
            **names,
            path=path_of(plan, stage),
            choices=choices_of(plan),
            time_us=stage.predict_us(*rates),
            spread_us=0.0,
            flops=cost.flops,
            bytes=cost.bytes,
        )
    except Exception as error:
        # A kernel that cannot be planned, whatever the reason, must not take the others with it.
        log.debug("%s cannot be planned", choice.kernel.full_name, exc_info=True)
        status = ABSENT if isinstance(error, UnsupportedError) else FAILED
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        return BenchRow(**names, choices=choice.fields, status=status, reason=reason)


_PROJECTIONS = {
    QUERY_PROJECTION: q_absorption_cost,
    OUTPUT_PROJECTION: output_up_projection_cost,
}


def _projection_row(
    name: str, problem: MlaProblem, spec: DeviceSpec, around: Mapping[str, Any]
) -> BenchRow:
    cost = _PROJECTIONS[name](problem)
    return BenchRow(
        problem=problem,
        kernel=name,
        source=PROJECTION,
        kind=PREDICTED,
        timer=TIMER,
        time_us=cost.time_us(spec.sustained_tflops(problem.dtype), spec.sustained_gbps),
        spread_us=0.0,
        flops=cost.flops,
        bytes=cost.bytes,
        **around,
    )
