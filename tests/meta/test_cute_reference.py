"""The CuTe DSL pages: names exist, snippets compile, and figures are those of the compiler."""

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

pytest.importorskip("cutlass", reason="needs the extra cute: nvidia-cutlass-dsl")

from tests.programs import run_snippet

from . import cute_findings
from .api_names import exists, mentioned

SNIPPET = re.compile(
    r"^<!-- compile: (?P<expected>[^\n]+) -->\n```python\n(?P<body>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
FINDINGS = Path("docs", "knowledge", "languages", "cute-dsl")
FLAG = "accumulate-flag-in-a-helper"


def snippets_of(page: str) -> list[tuple[str, dict[str, int]]]:
    """Snippets of a page that are to be compiled, with the instructions they have to have."""
    pairs = re.compile(r"([\w.]+)=(\d+)")
    return [
        (match["body"], {name: int(count) for name, count in pairs.findall(match["expected"])})
        for match in SNIPPET.finditer(page)
    ]


def differences(expected: Mapping[str, int], found: Mapping[str, int]) -> list[str]:
    pairs = [(name, count, found.get(name, 0)) for name, count in expected.items()]
    return [f"{name}: expected {count}, got {got}" for name, count, got in pairs if got != count]


def counted(row: str) -> dict[str, int]:
    """The instructions that a cell of an evidence table counts: `8 LDG.E.U16, 1 MUFU.EX2`."""
    return {name: int(count) for count, name in re.findall(r"(\d+) ([A-Z][A-Z0-9a-z.]+)\b", row)}


def evidence(page: str, case: str) -> str:
    """The measured cell of a case in an evidence table."""
    rows = re.findall(rf"^\| {re.escape(case)} \| ([^|]+) \|", page, re.MULTILINE)
    assert len(rows) == 1, f"expected one row {case!r}, got {len(rows)}"
    return str(rows[0])


@pytest.fixture(scope="module")
def reference(repo_root: Path) -> str:
    return (repo_root / "docs" / "cute-dsl" / "index.md").read_text()


@pytest.fixture(scope="module")
def findings(repo_root: Path) -> dict[str, str]:
    return {path.stem: path.read_text() for path in (repo_root / FINDINGS).rglob("*.md")}


def test_names_exist(reference, findings):
    assert len(mentioned(reference)) > 50
    for title, page in {"reference": reference, **findings}.items():
        missing = sorted(name for name in mentioned(page) if not exists(name))
        assert not missing, f"{title}: {missing}"


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1])
def test_snippets_compile(reference, number, tmp_path):
    body, expected = snippets_of(reference)[number]
    module = run_snippet(body, tmp_path)
    assert differences(expected, cute_findings.instructions(module.machine_code)) == []


COUNTS = (
    ("state-alignment", "pointer 16 bytes, stride a multiple of 8", "row_copy", (True, 16)),
    ("state-alignment", "pointer 16 bytes, stride unknown", "row_copy", (False, 16)),
    ("state-alignment", "pointer 2 bytes, stride a multiple of 8", "row_copy", (True, 2)),
    ("fast-exponential", "`fastmath=True`, per element", "exponential", (True,)),
    ("fast-exponential", "`fastmath=False`, per element", "exponential", (False,)),
    (FLAG, "flag in the loop body", "accumulation", ("flag in the loop",)),
    (FLAG, "branch, helper with an atom of its own", "accumulation", ("atom in a helper",)),
)
"""Findings that count instructions: page, case of its evidence table, what to compile."""


@pytest.mark.slow
@pytest.mark.parametrize(("page", "case", "compiled", "arguments"), COUNTS)
def test_counts_of_findings(findings, page, case, compiled, arguments):
    stated = counted(evidence(findings[page], case))
    assert stated
    assert differences(stated, getattr(cute_findings, compiled)(*arguments)) == []


@pytest.mark.slow
def test_a_flag_in_a_helper_does_not_compile(findings):
    shared = "branch, helper that sets the flag of the shared object"
    assert evidence(findings[FLAG], shared) == "does not compile"
    with pytest.raises(Exception, match="operand #0 does not dominate this use"):
        cute_findings.accumulation("flag in a helper")
