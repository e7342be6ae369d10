"""The pages: all rows, nothing from elsewhere, valid HTML, both colour schemes."""

import base64
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from mla_var3.bench.analysis import shape_groups
from mla_var3.bench.page import cells, headers, headline, html_page, markdown_page, method, troubles
from mla_var3.bench.plots import Plot, draw_plots
from mla_var3.bench.predict import NOTE
from mla_var3.bench.record import ABSENT, FAILED, PREDICTED, BenchRecord, BenchRow, load_record
from mla_var3.bench.regression import compare_records
from tests.unit.bench.bench_support import peer, record, row

RESULTS = Path(__file__).parents[3] / "docs" / "results"
RECORDS = sorted(set(RESULTS.glob("*.json")) - set(RESULTS.glob("*-rows.json")))
"""Of benchmarks; rows of a fit are no record of one."""
VOID = {"meta", "img", "br", "link", "input", "hr"}


class Page(HTMLParser):
    """Reads a page strictly: every tag is closed, in order, and every row has all its cells."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.cells: list[list[str]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.cells.append([])
        if tag in ("td", "th"):
            self.cells[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if {"td", "th"} & set(self.open):
            self.cells[-1][-1] += data.strip()


def full_record() -> BenchRecord:
    rows = [
        row("flash_mla", 1000.0),
        row("mla_var6_plus_v2", 800.0, choices={"n": 1024}),
        row("flash_mla", None, language="cute-dsl", status=FAILED, reason="output 0: <NaN> & more"),
        peer("FlashMLA", 900.0),
        peer("FlashInfer", None, status=ABSENT, reason="flashinfer: not installed"),
        row("flash_mla", 2000.0, s=32),
        peer("FlashMLA", 1900.0, s=32),
    ]
    return record(*rows, settings={"rounds": 3}, absent={"triton": "no module named vllm"})


def test_the_page_is_complete_and_needs_nothing_else(tmp_path):
    found = full_record()
    text = html_page(found, draw_plots(found, tmp_path))
    page = Page(text)
    assert text.startswith("<!DOCTYPE html>")
    tables = "\n".join(cell for line in page.cells for cell in line)
    for group in shape_groups(found.rows):
        assert all(list(cells(group, timed)) in page.cells for timed in group.timed)
    texts = ("output 0: <NaN> & more", "flashinfer: not installed", "no module named vllm")
    facts = ("NVIDIA H200", "hyper-mla bench figures", "abc with local changes", "rounds 3")
    assert [shown for shown in (*texts, *facts) if shown not in tables] == []
    inline = [base64.b64decode(data) for data in re.findall(r"base64,([^\"]+)", text)]
    files = [path.read_bytes() for path in tmp_path.glob("*.png")]
    assert len(inline) == len(files) == 4 and sorted(inline) == sorted(files)
    assert "Time of mla_var6_plus over its window: not drawn" in text
    assert "How it was measured" in text and "predicted" not in text.split("</title>")[0]
    outside = re.sub(r"base64,[^\"]+", "", text)
    assert not re.search(r"https?:|//[a-z]|url\(|@import|<script|<link|<iframe", outside)
    for tag, attributes in page.tags:
        source, anchor = attributes.get("src"), attributes.get("href")
        assert source is None or source.startswith("data:image/png;base64,"), tag
        assert anchor is None or (anchor[0] == "#" and f'id="{anchor[1:]}"' in text)


def test_predictions_are_labelled_and_a_row_cannot_break_the_page():
    script = row("<script>alert(1)</script>", kind=PREDICTED)
    text = html_page(record(script, notes=[NOTE, "<b>"]), [])
    Page(text)
    assert "<script>" not in text and "<b>" not in text
    assert "predicted" in text.split("</title>")[0] and "How it was predicted" in text
    assert "Predictions, not measurements" in text
    # Verdicts.
    found, earlier = full_record(), full_record()
    earlier.rows[0] = replace(earlier.rows[0], time_us=500.0)
    compared = compare_records(found, earlier)
    text = html_page(found, [], compared)
    for words in ("0 better, 4 same, 1 worse, 2 not compared", '<tr class="worse">', "+100.0 %"):
        assert words in text
    assert "1 worse" in markdown_page(found, [], compared)


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.name)
def test_the_published_records_become_pages(path):
    found = load_record(path)
    assert found.devices and all(r.command and r.versions["torch"] for r in found.rows)
    page = Page(html_page(found, []))
    for group in shape_groups(found.rows):
        if group.timed:
            assert list(headers(group)) in page.cells
            assert all(list(cells(group, row)) in page.cells for row in group.timed)


def test_the_markdown_has_every_row_and_reason(tmp_path):
    found = full_record()
    text = markdown_page(found, [Plot("x", "Roofline", "Caption.", (tmp_path / "roofline.png",))])
    assert text.startswith("---\nkind:")
    assert all(entry.label in text and entry.reason in text for entry in found.rows)
    assert "![Roofline](roofline.png)" in text
    assert "## To be explained" in text  # a win of 12 %
    assert "## To be explained" not in markdown_page(record(row(), peer()), [])


def test_the_headline_says_who_wins():
    def said(*rows: BenchRow) -> str:
        (group,) = shape_groups(rows)
        return headline(group)

    rows = full_record().rows
    assert said(*rows[:5]) == "mla_var6_plus_v2 n=1024 is 1.12x as fast as FlashMLA (call time)"
    assert "1.05x slower than FlashMLA" in said(*rows[5:])
    assert said(row()) == ""
    assert said(row("a"), peer(time_us=1001.0)) == "a is as fast as FlashMLA (call time)"
    bare = {"projections_us": 0.0}
    found = said(row("a", 100.0, **bare), peer(time_us=1100.0, **bare))
    assert found == "a is 11.00x as fast as FlashMLA (call time)"


def test_eight_bit_results_stand_in_a_column_of_their_own():
    """The headline once counted them as our best without saying so."""
    fast = row("mla_var6_plus_v2", 500.0, language="cute-dsl", error=0.04)
    (group,) = shape_groups([row("flash_mla", 800.0), fast, peer(time_us=900.0)])
    assert headline(group) == (
        "flash_mla is 1.12x as fast as FlashMLA (call time); mla_var6_plus_v2 (cute-dsl) 8-bit is "
        "1.74x as fast as FlashMLA (call time, 8-bit)"
    )
    assert headers(group)[-2:] == ("vs best", "8-bit vs best")
    assert [cells(group, each)[-2:] for each in group.rows[:2]] == [("1.12x", "-"), ("-", "1.74x")]
    page = html_page(record(*group.rows), [])
    assert "8-bit vs best" in page and "column of their own" in page
    (without,) = shape_groups([row(), peer()])
    assert headers(without)[-1] == "vs best"
    (theirs,) = shape_groups([row(), peer(), peer("FlashMLA (vLLM)", 700.0, cache_dtype="fp8")])
    found = [cells(theirs, each)[-2:] for each in theirs.rows[1:]]
    assert found == [("1.00x", "-"), ("-", "1.00x")]


def test_troubles_name_their_shapes_and_the_method_is_that_of_the_record():
    found = record(row("a", None, status=FAILED, reason="why"), row("b", s=32))
    assert troubles(found) == [("a", "failed", "why (b=32 s=16 t=4096 h=128)")]
    everywhere = record(*(row("a", None, s=s, status=ABSENT, reason="why") for s in (1, 2)))
    assert troubles(everywhere) == [("a", "absent", "why")]
    rows = [row("broken", None, s=s, status=FAILED, reason="NaN") for s in range(1, 8)]
    ((_, _, reason),) = troubles(record(*rows, row(s=64)))
    assert "s=4 t" in reason and "s=5 t" not in reason and "3 more shapes" in reason
    old = load_record(RESULTS / "2026-11-15-nvidia-h200.json")
    records = (record(row(), peer()), old, record(row(kind=PREDICTED)))
    rounds, once, predicted = (" ".join(method(found)) for found in records)
    assert "several rounds" in rounds and "Call time" in rounds
    assert "several rounds" not in once and "Call time" not in once
    assert "10th to the 90th percentile" in once
    assert "checked" not in predicted and "faster pure path" in predicted
