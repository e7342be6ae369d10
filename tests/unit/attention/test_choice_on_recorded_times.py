"""The choice of a kernel against times that were measured on a device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mla_var3.attention.call import explain

GRID = Path("docs/results/2026-11-15-nvidia-h200-attention-grid-rows.json")
CLOSE = 1.05
K, P, D, PAGE = 512, 64, 128, 64


@pytest.fixture(scope="module")
def rows(repo_root: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((repo_root / GRID).read_text())["rows"]
    return found


def choice(row: dict[str, Any]) -> str:
    latent = row["kind"].startswith("latent")
    chosen = explain(
        **{name: row[name] for name in ("b", "s", "t", "h", "dtype")},
        window=row["n"],
        page_size=PAGE if row["kind"].endswith("paged") else None,
        latent_only=latent,
        d=K if latent else D,
        scale=(D + P) ** -0.5 if latent else None,
        device_name="NVIDIA H200",
    )
    return f"{chosen.kernel}:{chosen.language}"


def test_the_choice_is_close_to_the_best_kernel_that_was_timed(rows: list[dict[str, Any]]) -> None:
    timed = [(row, choice(row)) for row in rows]
    known = [(row, kernel) for row, kernel in timed if kernel in row["times_us"]]
    # A choice of what nobody timed proves nothing, so there may be few of them.
    assert len(known) >= 0.9 * len(rows)
    ratios = [row["times_us"][kernel] / min(row["times_us"].values()) for row, kernel in known]
    assert sum(ratio <= CLOSE for ratio in ratios) >= 0.95 * len(ratios), sorted(ratios)[-10:]


def test_the_record_can_tell_a_bad_choice(rows: list[dict[str, Any]]) -> None:
    """What was chosen when the times were taken does not pass."""
    ratios = [
        row["times_us"][row["chosen"]] / min(row["times_us"].values())
        for row in rows
        if row["chosen"] in row["times_us"]
    ]
    assert sum(ratio <= CLOSE for ratio in ratios) < 0.95 * len(ratios)
