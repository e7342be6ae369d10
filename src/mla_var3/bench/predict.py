"""Benchmark rows without a GPU: the kernel times that `op/mla/model` predicts for the same shapes.

Where a kernel was timed on the device they follow from its recorded rates, elsewhere they are ideal
times at the vendor's peaks. Peers are not predicted.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mla_var3.bench import contenders, record
from mla_var3.bench.record import BenchRow, first_line
from mla_var3.bench.suites import Case, KernelChoice, SharedTokens
from mla_var3.conf.devices import DeviceSpec
from mla_var3.errors import UnsupportedError
from mla_var3.op.cost import Cost
from mla_var3.op.mla.cache_formats import cache_format
from mla_var3.op.mla.cost import output_up_projection_cost, query_projection_cost
from mla_var3.op.mla.model import designs
from mla_var3.op.mla.model.designs import estimate, part_us
from mla_var3.op.mla.model.times import IDEAL, Estimate, Workload
from mla_var3.runtime.paths import LANGUAGES, declared_targets, find_kernel

log = logging.getLogger(__name__)

FITTED_TIMER = "model, recorded rates"
NOTE = (
    "Predictions, not measurements: burst kernel times, by recorded rates where the kernel was "
    f"timed on the device, else {IDEAL}: lower bounds that rank nothing. Versions without rates of "
    "their own get those of their base version, cuTile kernels on an 8-bit cache those on a 16-bit "
    "one. Peers are not predicted; flash_mla and "
    "flash_attention are the two pure paths."
)


def plan_estimate(plan: Any, spec: DeviceSpec) -> Estimate | None:
    """The estimate of a plan with every choice made; None for a kernel that the model lacks."""
    if not hasattr(plan, "problem"):
        return None
    own: dict[str, Any] = {
        name: getattr(plan, name, None) for name in ("n", "cache_dtype", "token_bytes")
    }
    work = Workload(plan.problem(), prefix=getattr(plan, "prefix", None) or 0, **own)
    return estimate(plan.name, work, spec, plan.kernel_id.language)


def predict_case(case: Case, spec: DeviceSpec, around: Mapping[str, Any]) -> list[BenchRow]:
    """Predicted rows of one shape; a kernel that cannot be planned is a row with its reason."""
    blank = BenchRow(case.problem, "", record.OURS, record.PREDICTED, timer=IDEAL, **around)
    rows = [_kernel_row(blank, choice, spec) for choice in case.kernels]
    rows += [_fp8_row(blank, *choice, spec) for choice in case.cache_dtypes]
    if case.shared is not None:
        rows.append(_prefix_row(blank, case.shared, spec))
    return rows + [_projection_row(blank, name, spec) for name in _PROJECTIONS]


def _timed(row: BenchRow, time_us: float, cost: Cost, timer: str, **fields: Any) -> BenchRow:
    fields |= {"time_us": time_us, "spread_us": 0.0, "timer": timer}
    return replace(row, flops=cost.flops, bytes=cost.bytes, **fields)


def _estimated(row: BenchRow, expected: Estimate, cost: Cost, **fields: Any) -> BenchRow:
    timer = FITTED_TIMER if expected.fitted else expected.basis
    fields["projections_us"] = expected.around_us
    return _timed(row, expected.kernel_us, cost, timer, **fields)


def _kernel_row(blank: BenchRow, choice: KernelChoice, spec: DeviceSpec) -> BenchRow:
    kernel = choice.kernel
    row = replace(blank, kernel=kernel.full_name, language=kernel.language)
    try:
        plan = contenders.make_plan(choice, row.problem, spec.target).on_device(spec)
        stage = plan.plan_empty(*spec.burst_rates(row.problem.dtype))
        expected = plan_estimate(plan, spec)
        if expected is None:
            raise UnsupportedError(f"{plan.name}: expected a kernel of the time model, got none")
        chosen = {"path": contenders.path_of(plan, stage), "choices": contenders.choices_of(plan)}
        # An ideal time may be the base version's: then it is that work, or it would beat the peaks.
        cost = stage.cost() if expected.fitted else expected.cost
        return _estimated(row, expected, cost, **chosen)
    except Exception as error:
        # A kernel that cannot be planned, whatever the reason, must not take the others with it.
        log.debug("%s cannot be planned", kernel.full_name, exc_info=True)
        status = record.ABSENT if isinstance(error, UnsupportedError) else record.FAILED
        return replace(row, choices=choice.fields, status=status, reason=first_line(error))


def _fp8_row(blank: BenchRow, fmt: str, language: str, spec: DeviceSpec) -> BenchRow:
    row = replace(blank, kernel=contenders.LATENT_KERNEL, language=language, cache_dtype=fmt)
    token_bytes = cache_format(fmt).row_bytes(row.problem.k, row.problem.p)
    return _latent_row(row, Workload(row.problem, cache_dtype=fmt, token_bytes=token_bytes), spec)


def _prefix_row(blank: BenchRow, shared: SharedTokens, spec: DeviceSpec) -> BenchRow:
    """Latent attention that reads shared first tokens once, if there are any."""
    kernel, choices = contenders.prefix_kernel(shared), {"prefix": shared.mean}
    row = replace(blank, kernel=kernel, language="cute-dsl", choices=choices)
    work = Workload(row.problem, shared=shared.mean, groups=len(shared.tokens))
    return _latent_row(row, work, spec, contenders.shared_cost(row.problem, shared))


def _latent_row(
    row: BenchRow, work: Workload, spec: DeviceSpec, cost: Cost | None = None
) -> BenchRow:
    """A row that the latent kernel serves without a plan; absent on GPUs it is not written for."""
    targets = declared_targets(find_kernel(contenders.LATENT_KERNEL, language=row.language))
    if not set(targets) & set(spec.targets):
        reason = f"{row.kernel} ({row.language}) is written for {', '.join(targets)}"
        return replace(row, path=record.LATENT, status=record.ABSENT, reason=reason)
    expected = estimate(row.kernel, work, spec, row.language)
    assert expected is not None
    return _estimated(row, expected, cost or expected.cost, path=record.LATENT)


_PROJECTIONS = {
    record.QUERY_PROJECTION: (query_projection_cost, designs.QUERY_PROJECTION),
    record.OUTPUT_PROJECTION: (output_up_projection_cost, designs.OUTPUT_PROJECTION),
}


def _projection_row(blank: BenchRow, name: str, spec: DeviceSpec) -> BenchRow:
    row = replace(blank, kernel=name, source=record.PROJECTION)
    cost_of, effort = _PROJECTIONS[name]
    cost, work = cost_of(row.problem), Workload(row.problem)
    # Where kernels were timed on the device, so were the projections around them.
    kernels = [estimate("flash_mla", work, spec, language) for language in LANGUAGES]
    fitted = any(found is not None and found.fitted for found in kernels)
    time_us = part_us(spec, effort, cost, row.problem.dtype, fitted=fitted)
    return _timed(row, time_us, cost, FITTED_TIMER if fitted else IDEAL)
