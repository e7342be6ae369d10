"""Runs a plan in a profiling mode.

A mode `x` is the module `mla_var3.runtime.profiling.x` with a function `x_profile_plan`. Adding the
module is all it takes to offer the mode.
"""

from __future__ import annotations

import functools
import importlib
import logging
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mla_var3.errors import UnknownNameError
from mla_var3.runtime.profiling.result import NsightProfType, ProfileResult, parse_mode
from mla_var3.runtime.workflow import RunOptions, device_kind, pick_device

if TYPE_CHECKING:
    import torch

    from mla_var3.runtime.plan import KernelPlan

log = logging.getLogger(__name__)


def default_mode(device: str) -> NsightProfType:
    """The richest mode that works for a device ("cuda" or "cpu"); logs when it is a lesser one."""
    if device != "cuda":
        return NsightProfType.STATIC
    reason = _why_no_annotation()
    if reason is None:
        return NsightProfType.ANNOTATION
    log.warning("event mode instead of annotation mode: %s", reason)
    return NsightProfType.EVENT


@functools.cache
def _why_no_annotation() -> str | None:
    """Why annotation mode cannot run here; asked once, because it starts the profiler."""
    annotation = importlib.import_module(NsightProfType.ANNOTATION.module)
    reason: str | None = annotation.annotation_available()
    return reason


def profile_plan(
    plan: KernelPlan, prof_type: NsightProfType | str | None, options: RunOptions
) -> ProfileResult:
    """Run a plan in a profiling mode; None takes the default mode of the device."""
    mode = default_mode(pick_device(options.device)) if prof_type is None else parse_mode(prof_type)
    module = importlib.import_module(mode.module)
    result: ProfileResult = getattr(module, f"{mode.value}_profile_plan")(plan, options=options)
    return result


def benchmark_kernel(
    plan: KernelPlan,
    device: torch.device | str = "auto",
    prof_type: NsightProfType | str | None = None,
    out_dir: str | Path | None = None,
    **options: Any,
) -> ProfileResult:
    """Tune, optionally check, profile and report a plan; see `KernelPlan.benchmark_kernel`."""
    known = {field.name for field in fields(RunOptions)} - {"device", "out_dir"}
    for name in options.keys() - known:
        raise UnknownNameError("option", name, known)
    kind = device_kind(str(device))
    run = RunOptions(device=kind, out_dir=Path(out_dir) if out_dir else None, **options)
    return profile_plan(plan, prof_type, run)
