"""The markdown page of the main job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from mla_var3.op.mla.model.times import IDEAL
from mla_var3.report.sweep import DeviceSweep, crossover_text
from mla_var3.runtime.markdown import front_matter, microseconds, table


class StepLike(Protocol):
    """What the page needs of a step, see `mla_var3.report.overview.Step`."""

    title: str
    status: str
    seconds: float
    reason: str
    summary: str
    text: str


def overview_page(
    steps: Sequence[StepLike], env: Mapping[str, Any], sizes: Mapping[str, int], kernel: str
) -> str:
    """The whole report: circumstances, summary and one section per step."""
    gpu = env.get("gpu") or {}
    device = gpu.get("name") or "no GPU: CPU interpreter, compile reports and predictions"
    versions = {name: version for name, version in env["versions"].items() if version}
    git = env.get("git") or {}
    commit = git.get("commit")
    if commit and git.get("dirty"):
        commit += " with local changes"
    failed = [step for step in steps if step.status == "failed"]
    parts = [
        front_matter(
            {
                "kind": "overview",
                "kernel": kernel,
                "sizes": sizes,
                "ok": not failed,
                "device": device,
                "date": env["date"],
                "command": env["command"],
                "versions": versions,
                "commit": commit,
            }
        ),
        f"# {kernel}, end to end\n",
        table(
            ("", ""),
            [
                ("device", device),
                ("date", env["date"]),
                ("command", f"`{env['command']}`"),
                ("versions", ", ".join(f"{name} {version}" for name, version in versions.items())),
                ("commit", commit),
                ("machine", env.get("platform")),
                ("problem", " ".join(f"{name}={value}" for name, value in sizes.items())),
            ],
        ),
        "## Summary\n",
        table(
            ("step", "outcome", "seconds", "result"),
            [
                (step.title, step.status, f"{step.seconds:.1f}", step.reason or step.summary)
                for step in steps
            ],
        ),
    ]
    for step in steps:
        parts.append(f"## {step.title}\n")
        if step.status != "ok":
            parts.append(f"**{step.status}**: {step.reason}\n")
        if step.text:
            parts.append(step.text)
    return "\n".join(parts)


def prediction_markdown(sweeps: Sequence[DeviceSweep], kernel: str) -> str:
    """Predicted times and where the rates behind them come from."""
    rates = [
        (
            entry.device,
            f"{entry.compute.value:g} {entry.compute.unit}",
            entry.compute.origin,
            f"{entry.memory.value:g} {entry.memory.unit}",
            entry.memory.origin,
        )
        for entry in sweeps
    ]
    parts = [
        "These are predictions, not measurements: call times, from q_nope to the output. Where "
        "kernels were timed on a device they follow from recorded rates, at the power limit where "
        f"energies are known. Elsewhere they are {IDEAL}: lower bounds that rank nothing.\n",
        table(("device", "compute", "where from", "memory", "where from"), rates),
    ]
    for entry in sweeps:
        parts.append(f"### {entry.device} ({entry.target}), {entry.heading}\n")
        parts.append(f"Fastest: {crossover_text(entry)}.\n")
        kernels = list(entry.predictions)
        rows = [
            (
                s,
                *(microseconds(entry.predictions[name][i].advised_us) for name in kernels),
                entry.predictions[kernel][i].choice.get("n"),
                entry.fastest(i),
            )
            for i, s in enumerate(entry.s_values)
        ]
        parts.append(table(("s", *kernels, f"n of {kernel}", "fastest"), rows))
    return "\n".join(parts)


MEASURED_HEADERS = ("kernel", "measured", "ideal", "measured / ideal")


def measured_rows(
    measured: Sequence[tuple[str, float, float | None]],
) -> list[tuple[object, ...]]:
    """Rows of measured beside predicted kernel times, from kernel, measured and predicted."""
    return [
        (
            kernel,
            microseconds(time_us),
            microseconds(predicted),
            f"{time_us / predicted:.2f}" if predicted else None,
        )
        for kernel, time_us, predicted in measured
    ]


def measured_markdown(measured: Sequence[tuple[str, float, float | None]], device: str) -> str:
    """Measured beside predicted kernel times as a markdown table."""
    return f"Kernel times on {device}, without the projections around them.\n\n" + table(
        MEASURED_HEADERS, measured_rows(measured)
    )
