"""Backends around plans.

A plan is made once per call shape and kept. A call collects its operands, and the stage is built
from the plan on them and launched; how, is the plan's `Service` (`plan_operands.py`). cuTile plans
also run on CPU tensors in the interpreter, for small sizes and only when the kernel was named.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor

from mla_var3.attention.backends.latent import missing_language, project_heads
from mla_var3.attention.backends.plan_operands import CUTE_SERVICES, CUTILE_SERVICES, Service
from mla_var3.attention.request.shape import (
    BATCH_INVARIANT,
    FLOAT32,
    PARTIAL,
    UNALIGNED,
    CallShape,
    refusal_of,
)
from mla_var3.attention.request.task import AttentionTask
from mla_var3.conf.devices import DeviceSpec, device_spec
from mla_var3.errors import InvalidArgumentError
from mla_var3.op.mla.problem import MOST
from mla_var3.runtime.autotune.history import History, history_path, median_us, tuning_key
from mla_var3.runtime.autotune.units import Unit, units_of
from mla_var3.runtime.call_state import CALL_STATE
from mla_var3.runtime.paths import KernelId, cache_root, declared_targets, plan_class, slug
from mla_var3.runtime.stage import Stage, Tiling, constraint_failures, tiling_from_dict
from mla_var3.runtime.workflow import current_device_spec, planning_device

GRID_REQUESTS = 65535
"""cuTile's kernels have the requests on the second or third axis of their grid."""


def service_of(kernel: KernelId) -> Service | None:
    """How a kernel version serves calls; None when it serves none through a plan."""
    if kernel.language == "cute-dsl":
        return CUTE_SERVICES.get(kernel.full_name)
    return CUTILE_SERVICES.get(kernel.design)


class PlannedBackend:
    """A backend around one kernel version and its plan."""

    def __init__(self, kernel_id: KernelId, service: Service) -> None:
        self._id, self._service = kernel_id, service
        self.kernel, self.language = kernel_id.full_name, kernel_id.language
        self.runs_on_cpu = service.runs_on_cpu
        self.targets: tuple[str, ...] | None = declared_targets(kernel_id)

    def missing(self) -> str | None:
        return missing_language(self.language)

    def unsupported(self, shape: CallShape) -> str | None:
        any_queries = self._service.any_queries
        reasons = {
            "different numbers of queries per request": shape.ragged and not any_queries,
            "a tree of tokens": shape.tree and not any_queries,
            "a sliding window": shape.sliding_window is not None and not any_queries,
            PARTIAL: shape.partial,
            BATCH_INVARIANT: shape.batch_invariant,
            FLOAT32: shape.dtype == "float32",
            UNALIGNED: not shape.aligned,
            f"values of width v={shape.v} beside d={shape.d}; it needs v = d": (
                shape.v != shape.d and not (self._service.latent or self._service.any_v)
            ),
        }
        refusal = shape.refused_cache(self._service.cache_formats) or self._service.refused(shape)
        refusal = refusal or refusal_of(reasons)
        if refusal is None and self.language == "cutile-dsl":
            refusal = _refused_sizes(shape, self._service)
        # Where the language is missing, the shape alone says nothing against it.
        return refusal if refusal or self.missing() else _refusal(self._id, shape)

    def run(self, task: AttentionTask) -> tuple[Tensor, Tensor]:
        shape, service = task.shape(), self._service
        if task.cu_seqlens_q is not None and task.max_q is None:  # one may have them all
            shape = dataclasses.replace(shape, s=max(1, task.q.shape[0]))
        spec = current_device_spec() if task.q.is_cuda else planning_device()
        plan = planned(self._id, shape, spec.name)
        operands = service.operands(task, shape, plan)

        def build() -> Stage:
            stage = service.build(plan, shape, operands)
            if task.q.is_cuda:
                tuned = _tuned(self._id, shape, spec.name)
                for kernel in stage.kernels():
                    kernel.tiling = tuned.get(kernel.name, kernel.tiling)
            return stage

        output, lse, *_ = service.run((self._id, shape, spec.name), operands, build)
        if service.latent and task.w_uv is not None:
            output = project_heads(output, task.w_uv)
        return (output if task.out is None else task.out.copy_(output)), lse


def _refused_sizes(shape: CallShape, service: Service) -> str | None:
    """Which sizes of a call cuTile does not take: strides have 32 bits, a grid's axes 65,535."""
    if shape.b > GRID_REQUESTS:
        return f"more than {GRID_REQUESTS:,} requests"
    if not shape.rows_in_32_bits:
        return "2**31 numbers or more of packed queries"
    wide = max(shape.d, shape.v)
    queries = shape.s * shape.h * (shape.k if service.latent else wide)
    tokens = shape.window if service.reads_window else shape.t
    keys = 0 if service.latent else tokens * shape.h * wide
    return "2**31 numbers or more of a request" if max(queries, keys) > MOST else None


@CALL_STATE.cached(512)
def planned(kernel: KernelId, shape: CallShape, device: str) -> Any:
    """The plan of a kernel for a call shape on a device, by its name, with every choice made."""
    plan = _tunable(kernel, shape, device)
    return plan.settled() if hasattr(plan, "settled") else plan


@CALL_STATE.cached(512)
def _tunable(kernel: KernelId, shape: CallShape, device: str) -> Any:
    """The same with the tilings that tuning starts from."""
    spec, service = device_spec(device), service_of(kernel)
    assert service is not None
    fields = service.fields(shape)
    if not shape.default_scale:
        fields["scale"] = shape.scale
    plan = plan_class(kernel)(**fields, dtype=shape.dtype)
    return plan.for_target(spec.target).on_device(spec)


def tuning_plan(kernel: KernelId, shape: CallShape, device: str) -> Any:
    """The plan under which a call's tuning results are kept: times do not depend on the scale."""
    return _tunable(kernel, dataclasses.replace(shape, scale=None), device)


@CALL_STATE.cached(512)
def _tuned(kernel: KernelId, shape: CallShape, device: str) -> dict[str, Tiling]:
    return best_tilings(tuning_plan(kernel, shape, device), device_spec(device))


@CALL_STATE.cached(512)
def _refusal(kernel: KernelId, shape: CallShape) -> str | None:
    """Why the plan itself refuses a call shape; None if it does not."""
    try:
        plan = planned(kernel, shape, planning_device().name)
    except InvalidArgumentError as error:  # tiles that are made for other sizes
        return f"these sizes: {error}"
    for tiling in plan.tiling_fields().values():
        failures = constraint_failures(tiling, plan)
        if failures:
            return f"these sizes: {'; '.join(failures)}"
    return None


# --- the autotuner's histories --------------------------------------------------------------------


class Measured(NamedTuple):
    """A measured kernel time, and where the figure comes from."""

    kernel_us: float
    source: str


def local_result(plan: Any, spec: DeviceSpec) -> Measured | None:
    """The time of a plan with every choice made, from the autotuner's histories on this machine.

    A history counts when device, toolkit, sources and problem are the same as now. None when a
    kernel of the plan was not timed for exactly this problem.
    """
    total, files = 0.0, []
    for _, history in _histories(plan, spec):
        best = history.best()
        if best is None:
            return None
        total += median_us(best)
        files.append(history.path.name)
    return Measured(total, f"autotuned here ({', '.join(files)})")


def has_histories(spec: DeviceSpec) -> bool:
    """Whether anything was tuned for a device on this machine."""
    return (cache_root() / "kernel-autotune" / slug(spec.name)).is_dir()


def best_tilings(plan: Any, spec: DeviceSpec) -> dict[str, Tiling]:
    """The tilings that tuning found on this machine, by kernel name; empty where it found none."""
    found: dict[str, Tiling] = {}
    for unit, history in _histories(plan, spec) if has_histories(spec) else ():
        best = history.best()
        if best is not None:
            configs = unit.by_kernel(best["config"])
            for name, kernel in unit.kernels.items():
                found[name] = tiling_from_dict(type(kernel.tiling), configs[name])
    return found


def _histories(plan: Any, spec: DeviceSpec) -> Iterator[tuple[Unit, History]]:
    for unit in units_of(plan.plan(*plan.prepare_inputs("meta"))):
        key = tuning_key(plan, spec, unit.name, unit.kernels.values())
        yield unit, History(history_path(plan, spec, key), key)
