"""Pages that repeat what the package knows: models and cards, pictures, quoted messages."""

import json
import re
import shutil
from itertools import product
from pathlib import Path
from types import ModuleType

import pytest

from mla_var3.attention import explain
from mla_var3.conf import devices
from mla_var3.conf.devices import load_devices
from mla_var3.conf.models import models
from mla_var3.errors import UnknownNameError
from tests.programs import load_module

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def rows(repo_root: Path) -> list[list[str]]:
    """The cells of every table row of the page."""
    lines = (repo_root / "docs" / "models.md").read_text().splitlines()
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line[:1] == "|"]


def test_models(rows):
    for model in models().values():
        sizes = [str(size) for size in (*model.widths, model.heads)]
        assert [model.name, *sizes, model.source, ", ".join(model.aliases)] in rows


def test_cards(rows, monkeypatch):
    monkeypatch.delenv(devices.ENVIRONMENT_VARIABLE, raising=False)
    known = load_devices()
    for spec in known.values():
        figures = (spec.sm_count, spec.peak_tflops("bfloat16"), spec.peak_gbps)
        numbers = [f"{number:g}" for number in (*figures, spec["shared_memory_per_block_KiB"])]
        basis = "measured rates" if spec.has_burst else "vendor peaks"
        assert [spec.name, spec.target, *numbers, basis] in rows
    assert sum(row[-1] in ("measured rates", "vendor peaks") for row in rows) == len(known)


@pytest.mark.parametrize("tp", [1, 8])
def test_what_auto_takes(tp, monkeypatch):
    """As the page says: the kernel in CuTe DSL on sm_90, one of two in cuTile elsewhere."""
    monkeypatch.delenv(devices.ENVIRONMENT_VARIABLE, raising=False)
    by_widths = {model.widths: model for model in models().values() if model.heads % tp == 0}
    cases = product(load_devices().values(), by_widths.values(), (1, 4), (None, 64))
    for spec, model, s, page in cases:
        sizes = {"b": 32, "s": s, "t": 4096, **model.sizes(tp=tp)}
        found = explain(**sizes, page_size=page, device_name=spec.name)
        expected = {("flash_mla", "cute-dsl")}
        if spec.target != "sm_90":
            expected = {(name, "cutile-dsl") for name in ("flash_mla", "flash_mla_split_kv")}
        assert (found.kernel, found.language) in expected, (spec.name, model.name)


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_module(ROOT / "scripts" / "draw-docs-plots.py")


def test_the_pictures_are_up_to_date_and_a_change_is_noticed(script, tmp_path):
    images = tmp_path / "images"
    shutil.copytree(script.IMAGES, images)
    assert script.outdated(images) == [], "run scripts/draw-docs-plots.py"
    (images / "measured-speedup.svg").unlink()
    known = json.loads((images / script.MANIFEST).read_text())
    known["measured-roofline.svg"]["sha256"] = "0"
    (images / script.MANIFEST).write_text(json.dumps(known))
    assert sorted(script.outdated(images)) == ["measured-roofline.svg", "measured-speedup.svg"]


def test_every_picture_is_shown_somewhere(script):
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    text = "\n".join(page.read_text() for page in pages)
    assert [
        name for name in script.SOURCES if not re.search(rf"!\[[^\]]*\]\(\S*{name}", text)
    ] == []


def test_the_pictures_are_drawn_anew(script, tmp_path):
    script.draw(tmp_path)
    assert script.outdated(tmp_path) == []
    text = (tmp_path / "measured-speedup.svg").read_text()
    assert "<svg" in text and "http://www.w3.org/2000/svg" in text
    # Another plot of the same name once took its place.
    assert "best peer = 1" in text


def quoted(page: str) -> list[str]:
    """The quotes in the first column of the tables `it says` and `symptom`."""
    rows = re.findall(r"^\| ([^|\n]+) \|", page, re.MULTILINE)
    return [quote for row in rows for quote in re.findall(r"`([^`]+)`", row)]


def test_quoted_messages_exist(repo_root, package_sources):
    page = (
        "| it says | why |\n|---|---|\n| `old words` | because of `this` |\n| `new words` | x |\n"
    )
    assert quoted(page) == ["old words", "new words"]
    quotes = quoted((repo_root / "docs" / "troubleshooting.md").read_text())
    assert len(quotes) >= 20
    scripts = [*(repo_root / "scripts").glob("*.sh"), repo_root / "setup_cutile.sh"]
    # An error class may write the words around its parts itself.
    written = str(UnknownNameError("device", "some card", []))
    known = "\n".join([*package_sources.values(), *(p.read_text() for p in scripts), written])
    assert [quote for quote in quotes if quote not in known] == []
