"""Cloning a kernel version: the clone runs, only real names change, refusals leave nothing."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import mla_var3.kernel
from mla_var3.cli.main import main
from mla_var3.dev.clone import clone
from mla_var3.dev.clone.clone import plan_clone, write_clone
from mla_var3.errors import InvalidArgumentError, UnknownNameError
from mla_var3.runtime.paths import discover_kernels, find_kernel, version_folder

MLA = "kernel/cutile/mla"
KERNELS = discover_kernels()
BASES = [(kernel.full_name, kernel.language) for kernel in KERNELS if kernel.number == 0]

# Clones every kernel and that clone again, under numbers that no real version has, then checks
# all that the interpreter can run in the way that the command prints at its end.
CLONE_ALL = """
import json
from mla_var3.cli.main import main
from mla_var3.runtime.paths import discover_kernels, plan_class
codes = {}
for i, kernel in enumerate(discover_kernels()):
    language = f"--language={kernel.language}"
    for source, version in ((kernel.full_name, 900 + i), (f"{kernel.design}_v{900 + i}", 950 + i)):
        codes[f"clone {source}"] = main(["clone", source, f"v{version}", language])
clones = [kernel for kernel in discover_kernels() if kernel.number >= 900]
plans = {}
for kernel in clones:
    if kernel.language == "cutile-dsl":
        plans[kernel.full_name] = plan_class(kernel).__name__
        argv = [kernel.design, kernel.version, "--prof_type=disabled", "--check"]
        codes[f"run {kernel.full_name}"] = main(["run", *argv])
print(json.dumps({"codes": codes, "plans": plans, "clones": len(clones)}))
"""

PLAN = """\
\"\"\"demo: a pipeline, compared with demo_extra.

Runs `stage` and `stage_extra`.
\"\"\"
from typing import Literal, cast

import cuda.tile as ct
import mla_var3.kernel.cutile.mla.demo.demo.stage as stage_module
from mla_var3.kernel.cutile.mla.demo.demo import stage as other
from mla_var3.kernel.cutile.mla.tile_ops import stage_extra
from mla_var3.op.mla.cost import demo_cost

from .helpers import CtStage as Alias, helper
from .stage import CtStage, StageTiling, stage

__all__ = ["CtDemo", "demo_cost"]


# demo and CtStage in a comment stay, é too; so does demo_extra
class CtDemo(MlaPlan):
    \"\"\"Plan of the base version of demo.\"\"\"

    stage: int = 0
    tiling: "StageTiling | None" = None
    kind: Literal["CtDemo"] = "CtDemo"

    def plan(self, CtDemo, é=1) -> "list[CtStage]":
        x = ("é", CtDemo, self.stage, self.CtStage, StageTiling, {"é": stage}, f"{StageTiling}")
        call(stage=stage, demo="demo", text="CtStage", other=cast("CtStage", x))
        names = [stage for stage in range(3)], stage_module.CtStage, other.stage, other
        path = "mla_var3.kernel.cutile.mla.demo.demo.stage", (lambda stage: stage)
        return KernelPipeline(_name="demo", stages=[KernelPipeline("stage", [demo_cost, names])])

    def local(self):
        from .stage import CtStage
        from elsewhere import StageTiling

        stage = CtStage(StageTiling, CtDemo)
        return stage
"""

CLONED_PLAN = """\
\"\"\"demo_v5: a pipeline, compared with demo_extra.

Parent: demo.

Runs `stage_v5` and `stage_extra`.
\"\"\"
from typing import Literal, cast

import cuda.tile as ct
import mla_var3.kernel.cutile.mla.demo.demo_v5.stage_v5 as stage_module
from mla_var3.kernel.cutile.mla.demo.demo_v5 import stage_v5 as other
from mla_var3.kernel.cutile.mla.tile_ops import stage_extra
from mla_var3.op.mla.cost import demo_cost

from .helpers import CtStageV5 as Alias, helper
from .stage_v5 import CtStageV5, StageTilingV5, stage_v5

__all__ = ["CtDemoV5", "demo_cost"]


# demo and CtStage in a comment stay, é too; so does demo_extra
class CtDemoV5(MlaPlan):
    \"\"\"Plan of version 5 of demo.\"\"\"

    stage: int = 0
    tiling: "StageTilingV5 | None" = None
    kind: Literal["CtDemo"] = "CtDemo"

    def plan(self, CtDemo, é=1) -> "list[CtStageV5]":
        x = ("é", CtDemo, self.stage, self.CtStage, StageTilingV5, {"é": stage_v5}, f"{StageTilingV5}")
        call(stage=stage_v5, demo="demo", text="CtStage", other=cast("CtStageV5", x))
        names = [stage for stage in range(3)], stage_module.CtStageV5, other.stage_v5, other
        path = "mla_var3.kernel.cutile.mla.demo.demo_v5.stage_v5", (lambda stage: stage)
        return KernelPipeline(_name="demo_v5", stages=[KernelPipeline("stage_v5", [demo_cost, names])])

    def local(self):
        from .stage_v5 import CtStageV5
        from elsewhere import StageTiling

        stage = CtStageV5(StageTiling, CtDemoV5)
        return stage
"""  # noqa: E501

DEMO = {
    "__init__.py": '"""The base version of demo."""\n',
    "demo.py": PLAN,
    "helpers.py": "from .stage import CtStage\n\n\ndef helper(x: CtStage): ...\n",
    "notes.txt": "demo\n",
    "stage.py": (
        "class StageTiling(LatentTiling):\n"
        '    def validate(self, pd: "CtStage"): ...\n\n\n'
        "@ct.kernel(occupancy=2)\ndef stage(x): ...\n\n\n"
        "@cute.kernel\ndef stage_small(x): ...\n\n\n"
        "def stage_host(x): ...\n\n\n"
        "class CtStage(MlaPlan): ...\n"
    ),
}


@pytest.fixture
def tree(tmp_path: Path, source_root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the kernels, in the folder of a package, that the commands of a test work on."""
    root = tmp_path / "package"
    skip = shutil.ignore_patterns("__pycache__")
    shutil.copytree(source_root / "kernel", root / "kernel", ignore=skip)
    for kernel in KERNELS:
        if kernel.number:  # their numbers are free for the tests
            folder = version_folder(kernel).relative_to(source_root)
            shutil.rmtree(root / folder)
    monkeypatch.setattr(mla_var3.kernel, "__path__", [str(root / "kernel")])
    return root


@pytest.fixture
def demo(tree: Path) -> Path:
    """The folder of a small design in that copy, with everything that must not be renamed."""
    folder = tree / MLA / "demo"
    (folder / "demo").mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    for name, text in DEMO.items():
        (folder / "demo" / name).write_text(text, encoding="utf-8")
    return folder


def snapshot(root: Path) -> dict[str, bytes]:
    """Every file and folder below a root, hidden ones too."""
    return {
        path.relative_to(root).as_posix(): path.read_bytes() if path.is_file() else b"<folder>"
        for path in root.rglob("*")
    }


def meta_module(repo_root: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, repo_root / "tests" / "meta" / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # its dataclasses look themselves up there
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[name]
    return module


# --- clones of every kernel -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkout(repo_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package in a checkout of its own."""
    root = tmp_path_factory.mktemp("checkout")
    skip = shutil.ignore_patterns("__pycache__")
    shutil.copytree(repo_root / "src" / "mla_var3", root / "src" / "mla_var3", ignore=skip)
    shutil.copy(repo_root / "pyproject.toml", root)
    return root


def test_every_clone_and_its_clone_pass_their_check(
    checkout: Path, repo_root: Path, package_environment: dict[str, str], tmp_path: Path
) -> None:
    environment = {**package_environment, "PYTHONPATH": str(checkout / "src")}
    done = subprocess.run(
        [sys.executable, "-c", CLONE_ALL],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["clones"] == 2 * len(KERNELS) > 0
    assert set(report["codes"].values()) == {0}, done.stdout + done.stderr
    assert done.stdout.count("check passed") == len(report["plans"]) > 0
    for name, plan in report["plans"].items():
        assert plan.endswith("V" + name.rpartition("_v")[2])

    # What the rules of the repository say about the tree that now holds them.
    package = checkout / "src" / "mla_var3"
    sources = {
        path.relative_to(package).as_posix(): path.read_text()
        for path in sorted(package.rglob("*.py"))
    }
    assert meta_module(repo_root, "test_kernel_names").naming_problems(sources) == []
    assert meta_module(repo_root, "test_layers").violations_in(sources) == []
    kernels = str(package / "kernel")
    for command in (["format"], ["check", "--fix"], ["format", "--check"], ["check"]):
        ruff = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--no-cache", kernels],
            cwd=checkout,
            capture_output=True,
            text=True,
            check=False,
        )
        assert ruff.returncode == 0, ruff.stdout + ruff.stderr


@pytest.mark.parametrize(("name", "language"), BASES)
def test_nothing_of_the_clone_keeps_a_name_of_its_source(
    name: str, language: str, tree: Path
) -> None:
    """Through a clone and back: v7 -> v8 and v7 of another copy differ in the number alone."""
    first = plan_clone(name, "v7", language)
    write_clone(first)
    second = plan_clone(f"{name}_v7", "v8", language)
    third = plan_clone(name, "v8", language)
    assert set(second.contents) == set(third.contents)
    for path, text in second.contents.items():
        assert text.replace(f"Parent: {name}_v7.", f"Parent: {name}.") == third.contents[path]
        for old in first.renames.values():
            assert old not in text.replace(f"Parent: {name}_v7.", "")


def test_the_names_of_the_specification(tree: Path) -> None:
    write_clone(plan_clone("mla_var6_plus", "v2"))
    plan = plan_clone("mla_var6_plus_v2", "v5")
    stage = plan.contents["decompress_combine_v5.py"]
    assert "class CtDecompressCombineV5(MlaPlan):" in stage
    assert 'def validate(self, pd: "CtDecompressCombineV5")' in stage
    assert "@ct.kernel\ndef decompress_combine_v5(" in stage
    entry = plan.contents["mla_var6_plus_v5.py"]
    assert entry.startswith('"""mla_var6_plus_v5: ')
    assert "\nParent: mla_var6_plus_v2.\n" in entry
    assert "class CtMlaVar6PlusV5(NewestWindowPlan):" in entry
    assert '_name="mla_var6_plus_v5"' in entry
    assert "import decompress_combine_cost, mla_var6_plus_cost" in entry
    assert "from mla_var3.kernel.newest_window import NewestWindowPlan" in entry
    assert plan.contents["__init__.py"] == '"""Version 5 of mla_var6_plus."""\n'


# --- identifiers ----------------------------------------------------------------------------------


def test_only_real_identifiers_change(demo: Path) -> None:
    files = write_clone(plan_clone("demo", "v5"))
    folder = demo / "demo_v5"
    assert [path.relative_to(folder).as_posix() for path in files] == [
        "__init__.py", "demo_v5.py", "helpers.py", "notes.txt", "stage_v5.py",
    ]  # fmt: skip
    assert (folder / "demo_v5.py").read_text(encoding="utf-8") == CLONED_PLAN
    assert (folder / "notes.txt").read_text() == "demo\n"
    helpers = (folder / "helpers.py").read_text()
    assert helpers == "from .stage_v5 import CtStageV5\n\n\ndef helper(x: CtStageV5): ...\n"
    stage = (folder / "stage_v5.py").read_text()
    for line in (
        "class StageTilingV5(LatentTiling):",
        'def validate(self, pd: "CtStageV5"): ...',
        "def stage_v5(x): ...",
        "def stage_small_v5(x): ...",
        "def stage_host(x): ...",
        "class CtStageV5(MlaPlan): ...",
    ):
        assert line in stage
    assert find_kernel("demo", "v5").full_name == "demo_v5"


def test_names_are_followed_through_modules(demo: Path) -> None:
    """Re-exports, stars, folders below the package and paths without an alias."""
    (demo / "demo" / "parts").mkdir()
    files = {
        "__init__.py": "from .demo import *\nfrom .stage import CtStage as Public\n",
        "demo.py": (
            "import mla_var3.kernel.cutile.mla.demo.demo.stage\n"
            "from . import stage\nfrom .. import demo\nfrom ..demo import parts\n"
            "from ..demo.parts.small import CtSmall\n"
            "class CtDemo(CtSmall, mla_var3.kernel.cutile.mla.demo.demo.stage.CtStage):\n"
            "    def stage(self): return stage.stage, demo.demo.CtDemo, parts.small.CtSmall\n"
        ),
        "parts/__init__.py": "",
        "parts/small.py": "from ..stage import *\nclass CtSmall(CtStage): ...\n",
    }
    for name, text in files.items():
        (demo / "demo" / name).write_text(text)
    contents = plan_clone("demo", "v5").contents
    assert contents["__init__.py"] == (
        "from .demo_v5 import *\nfrom .stage_v5 import CtStageV5 as Public\n"
    )
    assert contents["demo_v5.py"].partition("\n\n")[2] == (
        "import mla_var3.kernel.cutile.mla.demo.demo_v5.stage_v5\n"
        "from . import stage_v5\nfrom .. import demo_v5\nfrom ..demo_v5 import parts\n"
        "from ..demo_v5.parts.small_v5 import CtSmallV5\n"
        "class CtDemoV5(CtSmallV5, mla_var3.kernel.cutile.mla.demo.demo_v5.stage_v5.CtStageV5):\n"
        "    def stage(self): return stage_v5.stage_v5, demo_v5.demo_v5.CtDemoV5,"
        " parts.small_v5.CtSmallV5\n"
    )
    assert contents["parts/small_v5.py"] == (
        "from ..stage_v5 import *\nclass CtSmallV5(CtStageV5): ...\n"
    )


def test_the_clone_keeps_line_endings_and_modes(demo: Path) -> None:
    stage = demo / "demo" / "stage.py"
    stage.write_bytes(stage.read_bytes().replace(b"\n", b"\r\n"))
    stage.chmod(0o640)
    write_clone(plan_clone("demo", "v5"))
    copy = demo / "demo_v5" / "stage_v5.py"
    assert copy.read_bytes().count(b"\r\n") == stage.read_bytes().count(b"\r\n") > 5
    assert b"class CtStageV5(MlaPlan)" in copy.read_bytes()
    assert copy.stat().st_mode == stage.stat().st_mode
    assert (demo / "demo_v5").stat().st_mode == (demo / "demo").stat().st_mode


@pytest.mark.parametrize(
    ("old", "new"),
    [("CtFooV2", "CtFooV5"), ("FooV2Tiling", "FooV5Tiling"), ("FooTilingV2", "FooTilingV5"),
     ("CtFoo", "CtFooV5"), ("CtFooV22", "CtFooV22V5"), ("CtV2Foo", "CtV2FooV5")],
)  # fmt: skip
def test_class_names(old: str, new: str) -> None:
    assert clone._camel(old, 2, 5) == new


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('"""demo."""\n', '"""demo_v5.\n\nParent: demo.\n"""\n'),
        ('"""demo.\n\nBase version. Fast.\n"""\n', '"""demo_v5.\n\nParent: demo.\nFast.\n"""\n'),
        ('"""demo.\n\nBase version.\n"""\n', '"""demo_v5.\n\nParent: demo.\n"""\n'),
        ("x = 1\n", '"""Parent: demo."""\n\nx = 1\n'),
        (
            f'"""demo: {"a " * 45}b.\n\nBase version.\n"""\n',
            f'"""demo_v5.\n\nA {"a " * 44}b.\n\nParent: demo.\n"""\n',
        ),
    ],
)
def test_the_contract_names_the_parent(before: str, after: str, demo: Path) -> None:
    (demo / "demo" / "demo.py").write_text(before)
    assert plan_clone("demo", "v5").contents["demo_v5.py"] == after


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "version", ["", "5", "v0", "v05", "V5", "v-1", "v5 ", "v5\n", "v5/x", "v٥"]
)
def test_a_version_is_vn(version: str, tree: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="version: expected vN with N at least 1"):
        plan_clone("flash_mla", version)


@pytest.mark.parametrize("source", ["flash_mia", "../flash_mla", "flash_mla/x", "", "flash_mla_v3"])
def test_an_unknown_source(source: str, tree: Path) -> None:
    before = snapshot(tree)
    with pytest.raises(UnknownNameError):
        plan_clone(source, "v5")
    assert snapshot(tree) == before


def test_the_command_refuses_in_one_line(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["clone", "flash_mla", "v5"]) == 0
    before = snapshot(tree)
    capsys.readouterr()
    for argv, message in (
        (["flash_mia", "v5"], "did you mean 'flash_mla'"),
        (["flash_mla", "v5"], "is there already"),
        (["flash_mla_v5", "v5"], "another version than flash_mla_v5"),
        (["flash_mla", "five"], "vN with N at least 1"),
        (["flash_mla", "v6", "--language=cuda"], "unknown language 'cuda'"),
        (["flash_mla_split_kv", "v6", "--language=cute-dsl"], "It exists in cutile-dsl"),
        (["flash_mla"], "required: version"),
        (["flash_mla", "v6", "v7"], "unexpected argument 'v7'"),
    ):
        assert main(["clone", *argv]) == 2
        captured = capsys.readouterr()
        assert message in captured.err
        assert captured.err.count("\n") == 1 and captured.out == ""
    assert snapshot(tree) == before


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_nothing_is_overwritten(kind: str, demo: Path) -> None:
    plan = plan_clone("demo", "v5")
    target = demo / "demo_v5"
    if kind == "file":
        target.write_text("mine")
    elif kind == "folder":
        target.mkdir()
    else:
        target.symlink_to(demo / "nowhere")
    before = snapshot(demo)
    with pytest.raises(InvalidArgumentError, match="does not exist yet"):
        plan_clone("demo", "v5")
    with pytest.raises(InvalidArgumentError, match="does not exist yet"):
        write_clone(plan)
    assert snapshot(demo) == before


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("class CtDemo(:\n", "modules that compile, got demo.py:1"),
        ("return 1\n", "modules that compile, got demo.py:1"),
        ("class CtDemo(MlaPlan): ...\nCtDemoV5 = 1\n", "no other use of CtDemoV5"),
    ],
)
def test_a_source_that_cannot_be_renamed(text: str, message: str, demo: Path) -> None:
    (demo / "demo" / "demo.py").write_text(text)
    before = snapshot(demo)
    with pytest.raises(InvalidArgumentError, match=message):
        plan_clone("demo", "v5")
    assert snapshot(demo) == before


def test_a_source_without_its_module(demo: Path) -> None:
    (demo / "demo" / "demo.py").unlink()
    with pytest.raises(InvalidArgumentError, match="a package with demo.py"):
        plan_clone("demo", "v5")


# --- all or nothing -------------------------------------------------------------------------------


def test_a_dry_run_changes_nothing(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = snapshot(tree)
    assert main(["clone", "mla_var6_plus", "v5", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "not written" in out and "next:" not in out
    assert "  CtDecompressCombine -> CtDecompressCombineV5\n" in out
    assert snapshot(tree) == before


def test_the_command_says_what_it_made(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["clone", "mla_var6_plus", "v5"]) == 0
    out = capsys.readouterr().out
    assert "  decompress_combine_v5.py  (was decompress_combine.py)\n" in out
    check = "python -m mla_var3.kernel.cutile.mla.mla_var6_plus v5 --prof_type=disabled --check"
    assert f"  {check}\n" in out


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
@pytest.mark.parametrize("step", ["copymode", "copyfile"])
def test_an_interrupted_copy_leaves_nothing(
    step: str, error: type[BaseException], demo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = snapshot(demo)
    plan = plan_clone("demo", "v5")

    def fail(source: Path, target: Path) -> None:
        assert Path(target).exists() or step == "copyfile"
        raise error

    monkeypatch.setattr(clone.shutil, step, fail)
    with pytest.raises(error):
        write_clone(plan)
    assert snapshot(demo) == before


def test_a_broken_clone_is_not_put_in_place(demo: Path) -> None:
    before = snapshot(demo)
    plan = plan_clone("demo", "v5")
    plan.contents["demo_v5.py"] = "class ("  # type: ignore[index]
    with pytest.raises(InvalidArgumentError, match="modules that compile"):
        write_clone(plan)
    assert snapshot(demo) == before


def test_the_script_works_on_its_own_checkout(
    checkout: Path, repo_root: Path, tmp_path: Path
) -> None:
    (checkout / "scripts").mkdir()
    script = Path(shutil.copy(repo_root / "scripts" / "clone-kernel.py", checkout / "scripts"))
    done = subprocess.run(
        [sys.executable, script, "flash_mla", "v990"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    folder = checkout / "src" / "mla_var3" / MLA / "flash_mla" / "flash_mla_v990"
    assert str(folder) in done.stdout
    assert (folder / "flash_mla_v990.py").is_file()
