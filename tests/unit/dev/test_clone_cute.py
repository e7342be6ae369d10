"""Cloning CuTe DSL kernels: kernels that are methods, their host classes, plans and tilings."""

from __future__ import annotations

from pathlib import Path

import pytest

import mla_var3.kernel
from mla_var3.cli.main import main
from mla_var3.dev.clone.clone import plan_clone, write_clone
from mla_var3.runtime.paths import find_kernel, version_folder

ENTRY = '''\
"""demo: a kernel and what joins its parts.

Base version.
"""
import cutlass.cute as cute

from mla_var3.runtime.cute_kernel import CuteKernel

from . import merge as merging
from .merge import Merge, merge_rows


class DemoTiling(Tiling): ...


class DemoHost:
    """Host and device code of `demo`."""

    demo_stages = 2

    def __init__(self, demo):
        self.tiling = demo

    @cute.jit
    def __call__(self, x, stream):
        self.demo(x, self.demo_stages).launch(stream=stream)
        self.other.demo(x)

    @cute.kernel
    def demo(self, x, stages):
        helper(x)
        demo = x
        return demo


@cute.jit
def helper(x): ...


class Unrelated:
    def demo(self):
        return self.demo


class CuteDemo(KernelPlan):
    """Plan of the base version of demo."""

    targets = ("sm_90",)
    demo: int = 3
    tiling: DemoTiling = DemoTiling()

    def plan(self, *inputs):
        first = CuteKernel(kernel_fn=DemoHost.demo, host_fn=lambda t: DemoHost(t), plan=self.demo)
        second = CuteKernel(kernel_fn=Merge.merge, host_fn=Merge, name=merging.Merge.merge)
        return first, second, merge_rows, DemoHost(0).demo, KernelPipeline("demo", ["merge"])
'''

CLONED = '''\
"""demo_v5: a kernel and what joins its parts.

Parent: demo.
"""
import cutlass.cute as cute

from mla_var3.runtime.cute_kernel import CuteKernel

from . import merge_v5 as merging
from .merge_v5 import MergeV5, merge_rows_v5


class DemoTilingV5(Tiling): ...


class DemoHostV5:
    """Host and device code of `demo`."""

    demo_stages = 2

    def __init__(self, demo):
        self.tiling = demo

    @cute.jit
    def __call__(self, x, stream):
        self.demo_v5(x, self.demo_stages).launch(stream=stream)
        self.other.demo(x)

    @cute.kernel
    def demo_v5(self, x, stages):
        helper(x)
        demo = x
        return demo


@cute.jit
def helper(x): ...


class Unrelated:
    def demo(self):
        return self.demo


class CuteDemoV5(KernelPlan):
    """Plan of version 5 of demo."""

    targets = ("sm_90",)
    demo: int = 3
    tiling: DemoTilingV5 = DemoTilingV5()

    def plan(self, *inputs):
        first = CuteKernel(kernel_fn=DemoHostV5.demo_v5, host_fn=lambda t: DemoHostV5(t), plan=self.demo)
        second = CuteKernel(kernel_fn=MergeV5.merge_v5, host_fn=MergeV5, name=merging.MergeV5.merge_v5)
        return first, second, merge_rows_v5, DemoHostV5(0).demo_v5, KernelPipeline("demo_v5", ["merge"])
'''  # noqa: E501

MERGE = '''\
"""merge: joins partial results."""
import cutlass.cute as cute


@cute.kernel
def merge_rows(x): ...


class Merge:
    @cute.kernel
    def merge(self, x): ...

    @cute.jit
    def __call__(self, x, stream):
        self.merge(x).launch()
        merge_rows(x).launch()
'''


@pytest.fixture
def demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a CuTe DSL design in a package of its own."""
    root = tmp_path / "kernel"
    folder = root / "cute_python" / "mla" / "demo"
    (folder / "demo").mkdir(parents=True)
    for package in (folder, folder.parent, folder.parents[1]):
        (package / "__init__.py").write_text("")
    (folder / "demo" / "__init__.py").write_text('"""The base version of demo."""\n')
    (folder / "demo" / "demo.py").write_text(ENTRY)
    (folder / "demo" / "merge.py").write_text(MERGE)
    monkeypatch.setattr(mla_var3.kernel, "__path__", [str(root)])
    return folder


def test_kernels_hosts_plans_and_tilings_get_new_names(demo: Path) -> None:
    plan = plan_clone("demo", "v5", "cute-dsl")
    write_clone(plan)
    assert (demo / "demo_v5" / "demo_v5.py").read_text() == CLONED
    merge = (demo / "demo_v5" / "merge_v5.py").read_text()
    assert "class MergeV5:" in merge and "def merge_v5(self, x)" in merge
    assert "self.merge_v5(x).launch()" in merge and "merge_rows_v5(x).launch()" in merge
    assert plan.renames["DemoHost"] == "DemoHostV5"
    assert plan.renames["demo"] == "demo_v5" and plan.renames["merge"] == "merge_v5"
    assert "helper" not in plan.renames and "Unrelated" not in plan.renames


def test_a_clone_of_a_clone_differs_in_the_number_alone(demo: Path) -> None:
    write_clone(plan_clone("demo", "v5", "cute-dsl"))
    second = plan_clone("demo_v5", "v6", "cute-dsl")
    third = plan_clone("demo", "v6", "cute-dsl")
    for path, text in second.contents.items():
        assert text.replace("Parent: demo_v5.", "Parent: demo.") == third.contents[path]


def test_the_command_says_what_can_be_done_without_a_gpu(
    demo: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["clone", "demo", "v5", "--language=cute-dsl"]) == 0
    out = capsys.readouterr().out
    assert "DemoHost -> DemoHostV5" in out
    assert "python -m mla_var3.kernel.cute_python.mla.demo v5 --prof_type=static" in out
    assert version_folder(find_kernel("demo", "v5", "cute-dsl")).is_dir()
