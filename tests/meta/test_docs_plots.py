"""The pictures of the documentation show what the records and the model say now."""

import json
import re
import shutil
from pathlib import Path
from types import ModuleType

import pytest

from tests.programs import load_module

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_module(ROOT / "scripts" / "draw-docs-plots.py")


def test_the_pictures_are_up_to_date(script):
    assert script.outdated(script.IMAGES) == [], "run scripts/draw-docs-plots.py"


def test_a_changed_source_or_missing_picture_is_noticed(script, tmp_path):
    images = tmp_path / "images"
    shutil.copytree(script.IMAGES, images)
    assert script.outdated(images) == []
    (images / "measured-speedup.svg").unlink()
    known = json.loads((images / script.MANIFEST).read_text())
    known["measured-roofline.svg"]["sha256"] = "0"
    (images / script.MANIFEST).write_text(json.dumps(known))
    assert sorted(script.outdated(images)) == ["measured-roofline.svg", "measured-speedup.svg"]


def test_every_picture_is_shown_somewhere(script):
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    shown = {
        Path(target).name
        for page in pages
        for target in re.findall(r"!\[[^\]]*\]\(([^)\s]+)", page.read_text())
    }
    assert set(script.SOURCES) <= shown


def test_the_pictures_are_drawn_anew(script, tmp_path):
    script.draw(tmp_path)
    assert script.outdated(tmp_path) == []
    text = (tmp_path / "measured-speedup.svg").read_text()
    assert "<svg" in text and "http://www.w3.org/2000/svg" in text
    # Another plot of the same name once took its place.
    assert "best peer = 1" in text
