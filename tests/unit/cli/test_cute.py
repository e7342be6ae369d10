"""The command line of a CuTe DSL kernel on a machine without a GPU, and in the inventory."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("cutlass", reason="needs the cute extra: nvidia-cutlass-dsl")

import mla_var3.kernel
from mla_var3.cli import main as main_command
from mla_var3.cli.commands import kernel as kernel_command
from mla_var3.runtime import workflow
from tests.unit.runtime.cute import cute_support

DESIGN = f'''\
"""scale: one number times another.

Base version.
"""

from dataclasses import dataclass
from typing import ClassVar

from {cute_support.__name__} import ScalePlan


@dataclass
class CuteScale(ScalePlan):
    requires_arch: str = "sm_90a"
    targets: ClassVar[tuple[str, ...]] = ("sm_90",)
'''


@pytest.fixture(autouse=True)
def scale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A design `scale` in cute-dsl as the only kernel, and no GPU."""
    layer = tmp_path / "kernel" / "cute_python" / "mla"
    version = layer / "scale" / "scale"
    version.mkdir(parents=True)
    for folder in (layer.parent, layer, layer / "scale", version):
        (folder / "__init__.py").write_text("")
    (version / "scale.py").write_text(DESIGN)
    monkeypatch.setattr(mla_var3.kernel, "__path__", [str(tmp_path / "kernel")])
    # Whatever was imported from the package's own folder must not be found instead, nor stay lost.
    package = f"{mla_var3.kernel.__name__}.cute_python"
    own = {name: module for name, module in sys.modules.items() if name.startswith(package)}
    for name in own:
        del sys.modules[name]
    attribute = mla_var3.kernel.__dict__.pop("cute_python", None)
    for module in (kernel_command, workflow):
        monkeypatch.setattr(module, "cuda_available", lambda: False)
    yield
    for name in [name for name in sys.modules if name.startswith(package)]:
        del sys.modules[name]
    mla_var3.kernel.__dict__.pop("cute_python", None)
    sys.modules.update(own)
    if attribute is not None:
        mla_var3.kernel.cute_python = attribute  # type: ignore[attr-defined]


def run(*argv: str) -> int:
    return kernel_command.main(["scale", "--language=cute-dsl", *argv])


def test_without_a_gpu_it_compiles_and_predicts_and_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run() == 0
    out = capsys.readouterr().out
    assert "no GPU here: static mode (compile report + prediction); the check needs a GPU" in out
    assert "scale_add" in out and "sm_90" in out and "sm_100" not in out


@pytest.mark.parametrize(
    ("argv", "asked"),
    [
        (["--check"], "--check"),
        (["--device=cpu"], "--device=cpu"),
        (["--device=cpu", "--check"], "--check"),
        (["--prof_type=disabled"], "--prof_type=disabled"),
        (["--prof_type=static", "--check"], "--check"),
    ],
)
def test_what_needs_to_run_is_explained(
    argv: list[str], asked: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*argv) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert f"{asked}: expected a GPU for scale (cute-dsl)" in err
    assert "--prof_type=static compiles it" in err


def test_static_mode_and_the_module_of_the_design(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--device=cpu", "--prof_type=static") == 0
    package = f"{mla_var3.kernel.__name__}.cute_python.mla.scale"
    assert kernel_command.main_for_design(package, ["--target=sm_90"]) == 0
    assert "scale_add" in capsys.readouterr().out
    assert run("--target=sm_100") == 2
    assert "unknown target 'sm_100'" in capsys.readouterr().err


def test_list_and_show_know_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main_command.main(["list", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["full_name"], row["language"], row["targets"]) == ("scale", "cute-dsl", ["sm_90"])
    assert row["compiles"] and not row["cpu"]["runs"]
    assert main_command.main(["show", "scale", "--language=cute-dsl", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["contract"].startswith("scale: one number times another.")
    assert list(facts["candidates"]) == ["sm_90"]
    assert [stage["name"] for stage in facts["stages"]] == ["scale_add"]
