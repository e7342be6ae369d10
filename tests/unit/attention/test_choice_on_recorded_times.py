"""The choice of a kernel against times that were measured on a device."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from mla_var3.attention.call import explain
from mla_var3.conf.devices import device_spec
from mla_var3.op.mla.model.prefix_plan import KERNELS, LATENT, plan_prefix
from mla_var3.op.mla.prefix.problem import SharedPrefixProblem
from mla_var3.op.mla.problem import MlaProblem

from ...gpu.attention_grid import CLOSE, Form, name

FIRST, SECOND = (
    Path(f"docs/results/2026-11-15-nvidia-h200-attention-grid-{name}.json")
    for name in ("rows", "second-rows")
)


def rows_of(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text())["rows"]
    return found


def choice(row: dict[str, Any]) -> str:
    form = Form(**{field.name: row[field.name] for field in fields(Form)})
    return name(explain(**form.sizes(), device_name="NVIDIA H200"))


@pytest.mark.parametrize("grid", [FIRST, SECOND])
def test_the_choice_is_close_to_the_best_kernel_that_was_timed(grid, repo_root):
    rows = rows_of(repo_root / grid)
    timed = [(row, choice(row)) for row in rows]
    known = [(row, kernel) for row, kernel in timed if kernel in row["times_us"]]
    # A choice of what nobody timed proves nothing, so there may be few of them.
    assert len(known) >= 0.9 * len(rows)
    ratios = [row["times_us"][kernel] / min(row["times_us"].values()) for row, kernel in known]
    assert sum(ratio <= CLOSE for ratio in ratios) >= 0.95 * len(ratios), sorted(ratios)[-10:]


PREFIX_RECORD = Path("docs/results/2026-11-16-nvidia-h200-prefix.json")
SAME_TIME_RECORD = Path("docs/results/2026-11-16-nvidia-h200-prefix-same-time.json")
"""Of the latent way after its short passes run at the same time."""
PREFIX_ERROR = 0.18
"""Worst relative error of a predicted time of flash_mla_prefix, with 12 heads, 0.83: the latent
kernel's rates are younger than the record."""


def test_ways_to_share_a_prefix(repo_root):
    """The way of least recorded call time is chosen, for predicted times near the recorded ones."""
    measured: dict[MlaProblem, dict[str, dict[str, Any]]] = {}
    for row in rows_of(repo_root / PREFIX_RECORD):
        if row["source"] == "ours" and row["kernel"] in KERNELS.values():
            problem = MlaProblem(**row["problem"])
            measured.setdefault(problem, {})[row["kernel"]] = row
    for row in rows_of(repo_root / SAME_TIME_RECORD):
        if row["kernel"] == KERNELS[LATENT]:
            measured[MlaProblem(**row["problem"])][KERNELS[LATENT]] = row
    complete = {problem: rows for problem, rows in measured.items() if len(rows) == len(KERNELS)}
    assert len(complete) >= 9
    for problem, rows in complete.items():
        prefix = rows["flash_mla_prefix"]["asked"]["prefix"]
        plan = plan_prefix(SharedPrefixProblem(problem, prefix), device_spec("NVIDIA H200"), 2**40)
        best = min(rows, key=lambda kernel: rows[kernel]["call_us"])
        assert KERNELS[plan.chosen.name] == best, problem
        for way in plan.ways:
            kernel = KERNELS[way.name]
            ratio = way.estimate.kernel_us / rows[kernel]["time_us"]
            allowed = PREFIX_ERROR if kernel == "flash_mla_prefix" else 0.1
            assert abs(ratio - 1) <= allowed, (problem, kernel, ratio)
