"""The page of models and cards has the rows of both tables."""

from pathlib import Path

import pytest

from mla_var3.attention import explain
from mla_var3.conf import devices
from mla_var3.conf.devices import load_devices
from mla_var3.conf.models import models


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
        shared = spec.shared_memory_per_block_bytes // 1024
        basis = "measured rates" if spec.has_burst else "vendor peaks"
        numbers = [f"{number:g}" for number in (*figures, shared)]
        assert [spec.name, spec.target, *numbers, basis] in rows
    assert sum(row[-1] in ("measured rates", "vendor peaks") for row in rows) == len(known)


@pytest.mark.parametrize("tp", [1, 8])
def test_what_auto_takes(tp, monkeypatch):
    """As the page says: the kernel in CuTe DSL on sm_90, one of two in cuTile elsewhere."""
    monkeypatch.delenv(devices.ENVIRONMENT_VARIABLE, raising=False)
    models_by_widths = {model.widths: model for model in models().values() if model.heads % tp == 0}
    for spec in load_devices().values():
        for model in models_by_widths.values():
            for s in (1, 4):
                for page in (None, 64):
                    found = explain(
                        b=32, s=s, t=4096, **model.sizes(tp=tp), page_size=page,
                        device_name=spec.name,
                    )  # fmt: skip
                    expected = {("flash_mla", "cute-dsl")}
                    if spec.target != "sm_90":
                        names = ("flash_mla", "flash_mla_split_kv")
                        expected = {(name, "cutile-dsl") for name in names}
                    assert (found.kernel, found.language) in expected, (spec.name, model.name)
