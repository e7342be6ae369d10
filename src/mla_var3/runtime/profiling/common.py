"""What the profiling modes share: the prologue, the artifacts and the parts of a report."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from mla_var3.conf.devices import DeviceSpec
from mla_var3.errors import (
    InvalidArgumentError,
    MissingToolError,
    UnknownNameError,
    UnsupportedError,
)
from mla_var3.runtime import paths
from mla_var3.runtime.compile import compile_report
from mla_var3.runtime.environment import environment, environment_rows
from mla_var3.runtime.markdown import front_matter, microseconds, table, write_json
from mla_var3.runtime.plan import KernelPlan
from mla_var3.runtime.profiling.figures import check_markdown
from mla_var3.runtime.profiling.lock import (
    ClockState,
    announce_clocks,
    current_device_name,
    device_lock,
)
from mla_var3.runtime.profiling.modes import NsightProfType, ProfileResult, StageFigures
from mla_var3.runtime.stage import KernelStage, Stage, by_unique_name
from mla_var3.runtime.workflow import Prepared, RunOptions, pick_device, prepare

log = logging.getLogger(__name__)


def profiling_mode(
    mode: NsightProfType, *, gpu: bool
) -> Callable[[Callable[[KernelPlan, RunOptions], ProfileResult]], Callable[..., ProfileResult]]:
    """Make the public function of a mode from one that takes a plan and its run options.

    With `version` it runs another version of the plan's design instead. Arguments win over
    `options`. A mode that measures, `gpu`, refuses the CPU.
    """

    def decorate(
        run: Callable[[KernelPlan, RunOptions], ProfileResult],
    ) -> Callable[..., ProfileResult]:
        @functools.wraps(run, assigned=("__module__", "__name__", "__qualname__", "__doc__"))
        def profile(
            plan: KernelPlan,
            out_dir: str | Path | None = None,
            version: str | None = None,
            label: str | None = None,
            bench_runs: int | None = None,
            *,
            options: RunOptions | None = None,
        ) -> ProfileResult:
            if not isinstance(plan, KernelPlan):
                raise InvalidArgumentError("plan", "a KernelPlan", repr(plan))
            given = {"out_dir": out_dir and Path(out_dir), "label": label, "bench_runs": bench_runs}
            changes: dict[str, Any] = {k: v for k, v in given.items() if v is not None}
            chosen = dataclasses.replace(options or RunOptions(), **changes)
            if gpu and pick_device(chosen.device) != "cuda":
                raise UnsupportedError(
                    f"prof_type: expected a GPU for {mode.value} mode, got the CPU; static mode "
                    "needs none"
                )
            return run(plan_of_version(plan, version), chosen)

        vars(profile).pop("__wrapped__")  # whose parameters help() would show
        return profile

    return decorate


@contextmanager
def measuring(
    mode: NsightProfType, plan: KernelPlan, options: RunOptions
) -> Iterator[tuple[Prepared, Path]]:
    """What every measuring mode starts with: the device to itself, a checked plan, its folder."""
    with device_lock(current_device_name()):
        prepared = prepare(plan, options)
        if prepared.check is not None:
            prepared.check.require()  # a wrong result must not be timed
        with artifact_folder(mode, prepared.plan, options) as folder:
            yield prepared, folder


def artifact_folder(
    mode: NsightProfType, plan: KernelPlan, options: RunOptions
) -> AbstractContextManager[Path]:
    """The folder for the artifacts; one that stays empty, because the run failed, is removed."""
    made = paths.profile_path(mode.value, plan.name, plan.params_label(), options.label)
    return paths.output_folder(options.out_dir or made)


def plan_of_version(plan: KernelPlan, version: str | None) -> KernelPlan:
    """The same problem in another version of the plan's design; None keeps the plan.

    A parameter that only this version has may stay behind where it was left at its default; a
    chosen one that the other version lacks is an UnknownNameError.
    """
    if version is None:
        return plan
    kernel = plan.kernel_id
    found = paths.find_kernel(kernel.design, version, kernel.language)
    other = paths.plan_class(found)
    known = {f.name for f in dataclasses.fields(other)}
    defaults = {f.name: f.default for f in dataclasses.fields(plan)}
    made: KernelPlan = other(**{k: v for k, v in plan.params().items() if k in known})
    for name, value in plan.params().items():
        if name not in known and value != defaults[name]:
            raise UnknownNameError(f"parameter of {found.full_name}", name, made.params())
    return made


def make_result(
    mode: NsightProfType,
    prepared: Prepared,
    total: StageFigures,
    stages: list[StageFigures],
    folder: Path | None,
    **more: Any,
) -> ProfileResult:
    """The result of a run: its record has identity, parameters, environment and `more`."""
    kernel, device = prepared.plan.kernel_id, prepared.device
    record = {
        "kernel": kernel.full_name,
        "design": kernel.design,
        "version": kernel.version,
        "language": kernel.language,
        "prof_type": mode.value,
        "device": device.name if device else None,
        "params": prepared.plan.params(),
        "environment": environment(),
        **more,
    }
    return ProfileResult(kernel.full_name, mode, total, stages, folder, prepared.check, record)


def measured_result(
    mode: NsightProfType,
    prepared: Prepared,
    total: StageFigures,
    stages: list[StageFigures],
    folder: Path,
    clocks: ClockState | None = None,
) -> ProfileResult:
    """The result of a mode that measured, with its record; nothing is written yet.

    Without `clocks` they are those of now.
    """
    result = make_result(mode, prepared, total, stages, folder)
    clocks = clocks or announce_clocks(result.record["environment"])
    result.record |= {
        "total": vars(total),
        "stages": [vars(figures) for figures in stages],
        "tilings": {name: tiling.to_dict() for name, tiling in prepared.stage.tilings().items()},
        "check": prepared.check.to_dict() if prepared.check else None,
        "clocks": dict(vars(clocks)),
        # A time that beats the specified peaks means that something is wrong.
        "above_roofline": (total.of_roofline_pct or 0.0) > 100.0,
    }
    return result


def write_compiled(kernels: Iterable[KernelStage], target: str, folder: Path) -> str | None:
    """Keep the compiled code of the kernels below `compiled/`."""
    try:
        for name, kernel in by_unique_name(kernels).items():
            compile_report(kernel, target, artifacts_dir=folder / "compiled" / name)
    except MissingToolError as error:
        log.warning("no compiled code is kept: %s", error)
        return str(error)
    return None


def write_artifacts(result: ProfileResult, prepared: Prepared, report: Iterable[str]) -> None:
    """`report.md`, `params.json`, and `tiling/` with active tilings and autotuning histories."""
    assert result.out_dir is not None
    paths.write_atomic(result.out_dir / "report.md", "\n".join(part for part in report if part))
    write_json(result.out_dir / "params.json", result.record)
    tiling_dir = result.out_dir / "tiling"
    tiling_dir.mkdir(exist_ok=True)
    for name, tiling in prepared.stage.tilings().items():
        write_json(tiling_dir / f"{name}.json", tiling.to_dict())
    for name, tuning in prepared.tuning.items():
        if tuning.path.is_file():
            (tiling_dir / name).mkdir(exist_ok=True)
            paths.write_atomic(tiling_dir / name / "autotuning.json", tuning.path.read_bytes())


def stage_figures(
    stage: Stage,
    device: DeviceSpec,
    dtype: str,
    time_us: float | None = None,
    spread_us: float | None = None,
    name: str = "",
) -> StageFigures:
    """Figures of a stage, by its own name unless one is given, and its ideal time on a device."""
    cost, ideal_us = stage.cost(), stage.predict_us(*device.peak_rates(dtype))
    return StageFigures(name or stage.name, time_us, spread_us, cost.flops, cost.bytes, ideal_us)


def kernel_figures(stage: Stage, device: DeviceSpec, dtype: str) -> list[StageFigures]:
    """Figures of the kernels of a stage, under names of their own."""
    return [
        stage_figures(kernel, device, dtype, name=name)
        for name, kernel in by_unique_name(stage.kernels()).items()
    ]


def header(title: str, record: dict[str, Any]) -> str:
    """Top of a report: front matter for tools, a table for people."""
    rows = [
        ("device", record["device"] or "none: compiled and predicted only"),
        ("problem", " ".join(f"{k}={v}" for k, v in record["params"].items() if v is not None)),
        *environment_rows(record["environment"]),
    ]
    matter = front_matter({key: record[key] for key in ("kernel", "prof_type", "device", "params")})
    return f"{matter}\n# {title}\n\n" + table(("", ""), rows)


def clocks_line(result: ProfileResult) -> str:
    """Whether the GPU's clocks were locked."""
    return f"GPU clocks: {ClockState(**result.record['clocks']).describe()}.\n"


def roofline_warning(result: ProfileResult) -> str:
    """A warning where a time beats the specified peaks; empty otherwise."""
    if not result.record["above_roofline"]:
        return ""
    return (
        f"**Faster than the specified peaks allow** ({microseconds(result.total.time_us)}): "
        "treat this measurement as wrong until explained.\n"
    )


def closing_sections(result: ProfileResult, stage: Stage) -> list[str]:
    """The end of a report: the tilings, and the check if there was one."""
    parts = ["## Tiling\n", tiling_table(stage)]
    return parts if result.check is None else [*parts, "## Check\n", check_markdown(result.check)]


def compiled_note(stage: Stage) -> str:
    """Which kernels have no MLIR text in `compiled/`, and why; empty when all have."""
    reasons = {k.name: k.why_no_mlir() for k in stage.kernels()}
    missing = [f"{name} ({reason})" for name, reason in reasons.items() if reason]
    return f"`compiled/` holds no MLIR text of {', '.join(missing)}.\n" if missing else ""


def tiling_table(stage: Stage) -> str:
    """The tiling of every kernel."""
    rows = [(name, tiling.label()) for name, tiling in stage.tilings().items()]
    return table(("kernel", "tiling"), rows)
