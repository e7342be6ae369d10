"""Benchmark rows without a GPU: the kernel times that `op/mla/model` predicts for the same shapes.

Where a kernel was timed on the device they follow from its recorded rates, elsewhere they are ideal
times at the vendor's peaks. Peers are not predicted.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mla_var3.bench.contenders import (
    FP8_KERNEL,
    PREFIX_KERNEL,
    choices_of,
    make_plan,
    path_of,
    shared_problem,
)
from mla_var3.bench.record import (
    ABSENT,
    FAILED,
    LATENT,
    OURS,
    OUTPUT_PROJECTION,
    PREDICTED,
    PROJECTION,
    QUERY_PROJECTION,
    BenchRow,
    first_line,
)
from mla_var3.bench.suites import Case, KernelChoice, SharedTokens
from mla_var3.conf.devices import DeviceSpec
from mla_var3.errors import UnsupportedError
from mla_var3.op.mla.cost import output_up_projection_cost, query_projection_cost
from mla_var3.op.mla.model import designs
from mla_var3.op.mla.model.designs import estimate, part_us
from mla_var3.op.mla.model.times import IDEAL, Estimate, Workload
from mla_var3.op.mla.prefix.problem import latent_shared_cost
from mla_var3.op.mla.problem import MlaProblem
from mla_var3.runtime.paths import LANGUAGES

log = logging.getLogger(__name__)

FITTED_TIMER = "model, recorded rates"
NOTE = (
    "Predictions, not measurements: burst kernel times, by recorded rates where the kernel was "
    f"timed on the device, else {IDEAL}: lower bounds that rank nothing. Versions without rates of "
    "their own get those of their base version. Peers are not predicted; flash_mla and "
    "flash_attention are the two pure paths."
)


def plan_estimate(plan: Any, spec: DeviceSpec) -> Estimate | None:
    """The estimate of a plan with every choice made; None for a kernel that the model lacks."""
    if not hasattr(plan, "problem"):
        return None
    prefix = getattr(plan, "prefix", None) or 0
    work = Workload(plan.problem(), prefix=prefix, n=getattr(plan, "n", None))
    return estimate(plan.name, work, spec, plan.kernel_id.language)


def predict_case(case: Case, spec: DeviceSpec, around: Mapping[str, Any]) -> list[BenchRow]:
    """Predicted rows of one shape; a kernel that cannot be planned is a row with its reason."""
    rows = [_kernel_row(choice, case.problem, spec, around) for choice in case.kernels]
    rows += [_fp8_row(fmt, case.problem, spec, around) for fmt in case.cache_dtypes]
    if case.shared is not None:
        rows.append(_prefix_row(case.problem, case.shared, spec, around))
    return rows + [_projection_row(name, case.problem, spec, around) for name in _PROJECTIONS]


def _kernel_row(
    choice: KernelChoice, problem: MlaProblem, spec: DeviceSpec, around: Mapping[str, Any]
) -> BenchRow:
    row = BenchRow(
        problem=problem,
        kernel=choice.kernel.full_name,
        language=choice.kernel.language,
        source=OURS,
        kind=PREDICTED,
        timer=IDEAL,
        **around,
    )
    try:
        plan = make_plan(choice, problem, spec.target).on_device(spec)
        stage = plan.plan_empty(*spec.burst_rates(problem.dtype))
        expected = plan_estimate(plan, spec)
        if expected is None:
            raise UnsupportedError(f"{plan.name}: expected a kernel of the time model, got none")
        cost = stage.cost()
        return replace(
            row,
            path=path_of(plan, stage),
            choices=choices_of(plan),
            timer=FITTED_TIMER if expected.fitted else IDEAL,
            time_us=expected.kernel_us,
            spread_us=0.0,
            flops=cost.flops,
            bytes=cost.bytes,
            projections_us=expected.around_us,
        )
    except Exception as error:
        # A kernel that cannot be planned, whatever the reason, must not take the others with it.
        log.debug("%s cannot be planned", choice.kernel.full_name, exc_info=True)
        status = ABSENT if isinstance(error, UnsupportedError) else FAILED
        return replace(row, choices=choice.fields, status=status, reason=first_line(error))


def _prefix_row(
    problem: MlaProblem, shared: SharedTokens, spec: DeviceSpec, around: Mapping[str, Any]
) -> BenchRow:
    """Latent attention that reads shared first tokens once."""
    language, groups = "cute-dsl", len(shared.tokens)
    work = Workload(problem, shared=shared.mean, groups=groups)
    expected = estimate(PREFIX_KERNEL, work, spec, language)
    assert expected is not None
    cost = latent_shared_cost(shared_problem(problem, shared))
    return BenchRow(
        problem=problem,
        kernel=PREFIX_KERNEL,
        language=language,
        source=OURS,
        kind=PREDICTED,
        path=LATENT,
        choices={"prefix": shared.mean},
        timer=FITTED_TIMER if expected.fitted else IDEAL,
        time_us=expected.kernel_us,
        spread_us=0.0,
        flops=cost.flops,
        bytes=cost.bytes,
        projections_us=expected.around_us,
        **around,
    )


def _fp8_row(
    fmt: str, problem: MlaProblem, spec: DeviceSpec, around: Mapping[str, Any]
) -> BenchRow:
    """The latent kernel on an 8-bit cache."""
    from mla_var3.op.mla.cache_formats import cache_format

    kernel, _, language = FP8_KERNEL.partition(":")
    token_bytes = cache_format(fmt).row_bytes(problem.k, problem.p)
    work = Workload(problem, cache_dtype=fmt, token_bytes=token_bytes)
    expected = estimate(kernel, work, spec, language)
    assert expected is not None
    return BenchRow(
        problem=problem,
        kernel=kernel,
        language=language,
        source=OURS,
        kind=PREDICTED,
        path=LATENT,
        timer=FITTED_TIMER if expected.fitted else IDEAL,
        time_us=expected.kernel_us,
        spread_us=0.0,
        flops=expected.cost.flops,
        bytes=expected.cost.bytes,
        projections_us=expected.around_us,
        cache_dtype=fmt,
        **around,
    )


_PROJECTIONS = {
    QUERY_PROJECTION: (query_projection_cost, designs.QUERY_PROJECTION),
    OUTPUT_PROJECTION: (output_up_projection_cost, designs.OUTPUT_PROJECTION),
}


def _projection_row(
    name: str, problem: MlaProblem, spec: DeviceSpec, around: Mapping[str, Any]
) -> BenchRow:
    cost_of, effort = _PROJECTIONS[name]
    cost = cost_of(problem)
    # Where kernels were timed on the device, so were the projections around them.
    kernels = [estimate("flash_mla", Workload(problem), spec, language) for language in LANGUAGES]
    fitted = any(found is not None and found.fitted for found in kernels)
    return BenchRow(
        problem=problem,
        kernel=name,
        source=PROJECTION,
        kind=PREDICTED,
        timer=FITTED_TIMER if fitted else IDEAL,
        time_us=part_us(spec, effort, cost, problem.dtype, fitted=fitted),
        spread_us=0.0,
        flops=cost.flops,
        bytes=cost.bytes,
        **around,
    )
