"""The knowledge base, the device pages and the cuTile reference follow their templates."""

import ast
import re
import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from mla_var3.conf.devices import devices_path, load_devices
from tests.programs import run_snippet

SECTIONS = [
    "Applies to",
    "Symptom / trigger metric",
    "What to do",
    "Evidence",
    "Limits",
    "Provenance",
]
EVIDENCE_COLUMNS = ["case", "measured", "device", "source"]
DEVICE_COLUMNS = ["key", "value", "unit", "kind", "date", "source"]
PROVENANCE = re.compile(r"\[20\d\d-(0[1-9]|1[0-2]), (sm_\d+[af]?|cpu), [^,\[\]]+, N=([1-9]\d*)\]")

FENCE = re.compile(r"^(<!-- run -->\n)?```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]\n]*\]\(([^)\s#]+)[^)]*\)")
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")

PRELUDE = """
import cuda.tile as ct
import torch
from mla_var3.runtime.interpreter import launch

ConstInt = ct.Constant[int]
torch.manual_seed(0)
"""


def tables_of(text: str) -> list[list[list[str]]]:
    """Markdown tables as rows of cells, the heading first, the rule left out."""
    blocks = re.findall(r"(?:^\|.*\n)+", text + "\n", re.MULTILINE)
    rows = ([r for r in block.splitlines() if not re.fullmatch(r"[|:\- ]+", r)] for block in blocks)
    return [
        [[cell.strip() for cell in row.strip().strip("|").split("|")] for row in table]
        for table in rows
    ]


def numbers_in(text: str) -> set[str]:
    return {match.replace(",", "").rstrip(".") for match in NUMBER.findall(text)}


def page_problems(text: str, page: Path) -> list[str]:
    """What a knowledge page lacks of the template; sources are links relative to where it lies."""
    prose = FENCE.sub("", text)
    problems = []
    if len(re.findall(r"^# +\S", prose, re.MULTILINE)) != 1:
        problems.append("expected one title")
    _, *parts = re.split(r"^## +(.+?) *$", prose, flags=re.MULTILINE)
    if parts[::2] != SECTIONS:
        return [*problems, f"expected the sections {SECTIONS}, got {parts[::2]}"]
    bodies = dict(zip(parts[::2], parts[1::2], strict=True))
    problems += [f"{name}: empty" for name, body in bodies.items() if not body.strip()]
    provenance = PROVENANCE.fullmatch(bodies["Provenance"].strip())
    if provenance is None:
        problems.append("Provenance: expected [YYYY-MM, arch, toolkit, N=k] and nothing else")
    tables = tables_of(bodies["Evidence"])
    if len(tables) != 1 or tables[0][0] != EVIDENCE_COLUMNS:
        return [*problems, f"Evidence: expected one table with the columns {EVIDENCE_COLUMNS}"]
    rows = tables[0][1:]
    if not any(NUMBER.search(row[1]) for row in rows):
        problems.append("Evidence: no number")
    if provenance is not None and int(provenance.group(3)) != len(rows):
        problems.append(f"Provenance: N={provenance.group(3)}, but {len(rows)} rows of evidence")
    for row in rows:
        problems += evidence_problems(row, page)
    return problems


def evidence_problems(row: list[str], page: Path) -> list[str]:
    """An incomplete row, or one with a number that its linked source does not have."""
    if len(row) != len(EVIDENCE_COLUMNS) or not all(row):
        return [f"Evidence: incomplete row {row}"]
    _, measured, _, source = row
    problems = []
    for target in LINK.findall(source):
        cited = page.parent / target
        if not cited.is_file():
            problems.append(f"Evidence: {target} does not exist")
        elif missing := numbers_in(measured) - numbers_in(cited.read_text()):
            problems.append(f"Evidence: {sorted(missing)} not in {target}")
    return problems


def unlinked(index: Path, pages: list[Path]) -> list[str]:
    """Pages that an index does not link to."""
    linked = {(index.parent / target).resolve() for target in LINK.findall(index.read_text())}
    return [page.name for page in pages if page.resolve() not in linked]


def slug(device: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


def device_problems(text: str, entry: dict[str, Any]) -> list[str]:
    """Figures of a device page that differ from its entry in the device table."""
    tables = [table for table in tables_of(text) if table[0] == DEVICE_COLUMNS]
    if len(tables) != 1:
        return [f"expected one table with the columns {DEVICE_COLUMNS}"]
    rows = {row[0]: row[1:] for row in tables[0][1:]}
    problems = [f"{key}: not on both sides" for key in rows.keys() ^ entry.keys()]
    for key in rows.keys() & entry.keys():
        figure = entry[key]
        value = figure["value"]
        printed = ", ".join(value) if isinstance(value, tuple) else str(value)
        wanted = [printed, figure["unit"] or "-", figure["kind"], figure["date"], figure["source"]]
        for want, got in zip(wanted, rows[key], strict=True):
            problems += [f"{key}: expected {want!r}, got {got!r}"] if want != got else []
    peak = entry["peak_bfloat16_float32_tflops"]["value"]
    ridge = f"Ridge point: {peak * 1e3 / entry['peak_dram_bw_GBps']['value']:.1f} FLOP/byte"
    return problems if ridge in text else [*problems, f"expected {ridge!r}"]


def snippets_of(text: str) -> list[tuple[str, str]]:
    """The marks of Python blocks of a page, which say that they are to be run, and the blocks."""
    return [(run, body) for run, language, body in FENCE.findall(text) if language == "python"]


@pytest.fixture(scope="module")
def knowledge(repo_root: Path) -> Path:
    return repo_root / "docs" / "knowledge"


@pytest.fixture(scope="module")
def findings(knowledge: Path) -> list[Path]:
    return sorted(path for path in knowledge.rglob("*.md") if path.name != "README.md")


@pytest.fixture(scope="module")
def device_table() -> dict[str, Any]:
    """The values of every device, as dicts."""
    specs = load_devices(devices_path()).values()
    return {spec.name: {k: asdict(value) for k, value in spec.values.items()} for spec in specs}


@pytest.fixture(scope="module")
def reference(repo_root: Path) -> str:
    return (repo_root / "docs" / "python-cuda-tile.md").read_text()


def test_findings_follow_the_template_and_are_indexed(knowledge, findings):
    problems = {page.name: page_problems(page.read_text(), page) for page in findings}
    assert problems and {name: found for name, found in problems.items() if found} == {}
    index = knowledge / "README.md"
    assert unlinked(index, [page for page in knowledge.rglob("*.md") if page != index]) == []


def test_device_pages_equal_the_table(repo_root, device_table):
    entries = {slug(name): entry for name, entry in device_table.items()}
    for page in (repo_root / "docs" / "devices").glob("*.md"):
        assert device_problems(page.read_text(), entries[page.stem]) == []


def test_snippets_parse_and_those_of_the_reference_run(reference, findings, tmp_path):
    for text in (reference, *(page.read_text() for page in findings)):
        for _, body in snippets_of(text):
            ast.parse(textwrap.dedent(body))
    marked = [body for run, body in snippets_of(reference) if run]
    assert len(marked) >= 3
    for body in marked:
        run_snippet(PRELUDE + body, tmp_path)


def test_pages_are_in_the_navigation_and_records_in_their_index(repo_root, knowledge):
    docs, navigation = repo_root / "docs", (repo_root / "mkdocs.yml").read_text()
    pages = [*docs.glob("*.md"), *docs.glob("[!kr]*/*.md"), *(docs / "kernels").glob("*.md")]
    pages = [page for page in pages if page.parent.name != "cutlass-cpp"]
    assert len(pages) > 20
    named = [knowledge / "README.md", docs / "results/index.md", *pages]
    assert [p.name for p in named if f": {p.relative_to(docs)}\n" not in navigation] == []
    records = [page for page in (docs / "results").glob("*.md") if page.name != "index.md"]
    assert unlinked(docs / "results/index.md", records) == []


GOOD_PAGE = """# Title

## Applies to

Everything.

## Symptom / trigger metric

Slow.

## What to do

```text
## not a section
```

Less.

## Evidence

| case | measured | device | source |
|---|---|---|---|
| before | 1,230 us | H200 | [record](record.md) |
| after | 4.5 us | H200 | prototype, 2026-11 |

## Limits

None known.

## Provenance

[2026-11, sm_90, cuda-tile 1.7.0 + tileiras 13.4.92, N=2]
"""


@pytest.fixture
def page(tmp_path: Path) -> Path:
    (tmp_path / "record.md").write_text("It took 1230 us.\n")
    return tmp_path / "page.md"


def test_a_bad_page_is_found(page):
    for old, new, problem in (
        ("# Title\n", "", "one title"),
        ("## Limits\n\nNone known.\n\n", "", "expected the sections"),
        ("## Limits", "## Bounds", "expected the sections"),
        ("## Applies to\n\nEverything.\n\n## Symp", "## Symp", "expected the sections"),
        ("None known.", "", "Limits: empty"),
        ("[2026-11, ", "[2026, ", "Provenance: expected"),
        ("[2026-11, ", "[2026-13, ", "Provenance: expected"),
        ("sm_90, ", "Hopper, ", "Provenance: expected"),
        (", N=2]", "]", "Provenance: expected"),
        (", N=2]", ", N=2] roughly", "Provenance: expected"),
        ("N=2", "N=3", "N=3, but 2 rows"),
        ("| measured |", "| result |", "one table with the columns"),
        ("1,230 us", "1,231 us", "['1231'] not in record.md"),
        ("(record.md)", "(gone.md)", "gone.md does not exist"),
        ("| prototype, 2026-11 |", "| |", "incomplete row"),
    ):
        assert old in GOOD_PAGE
        assert problem in "\n".join(page_problems(GOOD_PAGE.replace(old, new, 1), page))


def test_a_wrong_device_figure_is_found(repo_root, device_table):
    for old, new, problem in (
        ("| 989.4 |", "| 989 |", "peak_bfloat16_float32_tflops: expected '989.4', got '989'"),
        ("| 132 | SM | measured |", "| 132 | SM | spec |", "sm_count: expected 'measured'"),
        ("| sm_count |", "| sms |", "sm_count: not on both sides"),
        ("Ridge point: 206.1", "Ridge point: 200.0", "expected 'Ridge point: 206.1"),
        ("| key |", "| name |", "one table with the columns"),
    ):
        text = (repo_root / "docs/devices/nvidia-h200.md").read_text()
        assert old in text
        problems = device_problems(text.replace(old, new, 1), device_table["NVIDIA H200"])
        assert problem in "\n".join(problems)
