"""Figures of the CuTe DSL findings about copies, registers and products are the compiler's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("cutlass", reason="needs the extra cute: nvidia-cutlass-dsl")

from . import cute_schedule_findings as findings
from .test_cute_reference import FINDINGS, counted, differences, evidence


@pytest.fixture(scope="module")
def pages(repo_root: Path) -> dict[str, str]:
    return {path.stem: path.read_text() for path in (repo_root / FINDINGS).rglob("*.md")}


@pytest.mark.parametrize(
    ("case", "hierarchical"),
    [
        ("64 x 256 elements, plain columns", False),
        ("64 x 256 elements, columns as 64 times tiles", True),
    ],
)
def test_wide_copies(pages: dict[str, str], case: str, hierarchical: bool) -> None:
    stated = counted(evidence(pages["wide-copies-from-a-hierarchical-layout"], case))
    assert len(stated) == 1
    assert differences(stated, findings.wide_copy(hierarchical)) == []


@pytest.mark.parametrize(
    ("case", "threads"),
    [
        ("200 live values per thread, 256 threads", 256),
        ("the same, 288 threads (9 warps)", 288),
        ("the same, 384 threads", 384),
    ],
)
def test_registers_by_number_of_warps(pages: dict[str, str], case: str, threads: int) -> None:
    cell = evidence(pages["a-warp-that-only-loads"], case)
    match = re.fullmatch(r"(\d+) registers, (\d+) bytes of stack", cell)
    assert match is not None, cell
    assert findings.registers_and_stack(threads) == (int(match[1]), int(match[2]))


@pytest.mark.parametrize(
    ("case", "way"),
    [
        (
            "two products of four HGMMA, both always; wait for the first, then for the second",
            "always",
        ),
        ("the second in a branch; wait for both", "branch, wait for both"),
        ("the second in a branch; wait for the first, then for the second", "branch"),
        (
            "one product in a branch, its fence before and its commit behind it",
            "fence and commit outside",
        ),
        ("the same, all of it in the branch", "all inside"),
    ],
)
def test_products_around_a_branch(pages: dict[str, str], case: str, way: str) -> None:
    cell = evidence(pages["wait-that-depends-on-a-branch"], case)
    stated = counted(cell)
    assert sorted(stated) == ["HGMMA", "WARPGROUP"]
    assert differences(stated, findings.in_flight(way)) == []


@pytest.mark.slow
def test_shared_memory_of_the_kernel(pages: dict[str, str]) -> None:
    cell = evidence(pages["rope-tile-holds-p"], "P in the rope tiles")
    assert int(cell.split()[0].replace(",", "")) == findings.kernel_shared_bytes()
