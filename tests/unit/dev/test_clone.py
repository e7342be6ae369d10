"""Cloning a kernel version: clones run, only versioned names change, refusals leave nothing."""

import json
import shutil
import sys
from pathlib import Path

import pytest

import mla_var3.kernel
from mla_var3.cli.main import main
from mla_var3.dev import clone
from mla_var3.dev.clone import plan_clone, write_clone
from mla_var3.errors import InvalidArgumentError, UnknownNameError
from mla_var3.runtime.paths import discover_kernels, version_folder
from tests.programs import run_program

MLA = "kernel/cutile/mla"
KERNELS = discover_kernels()
BASES = [(kernel.full_name, kernel.language) for kernel in KERNELS if kernel.number == 0]

# Clones every kernel, and the clones of base versions again, under numbers that no real version
# has. The CPU interpreter then checks the second cuTile clones; every clone is imported.
CLONE_ALL = """
import json
from mla_var3.cli.main import main
from mla_var3.runtime.paths import discover_kernels, plan_class
codes = {}
for i, kernel in enumerate(discover_kernels()):
    language = f"--language={kernel.language}"
    pairs = [(kernel.full_name, 900 + i), (f"{kernel.design}_v{900 + i}", 950 + i)]
    for source, version in pairs[: 1 if kernel.number else 2]:
        codes[f"clone {source}"] = main(["clone", source, f"v{version}", language])
plans = {}
for kernel in [kernel for kernel in discover_kernels() if kernel.number >= 900]:
    plans[f"{kernel.full_name} {kernel.language}"] = plan_class(kernel).__name__
    if kernel.language == "cutile-dsl" and kernel.number >= 950:
        argv = [kernel.design, kernel.version, "--b=1", "--s=2", "--t=70", "--h=8"]
        codes[f"run {kernel.full_name}"] = main(["run", *argv, "--prof_type=disabled", "--check"])
print(json.dumps({"codes": codes, "plans": plans}))
"""


SKIP = shutil.ignore_patterns("__pycache__")


@pytest.fixture
def tree(tmp_path: Path, source_root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the kernels' base versions that the commands of a test work on."""
    root = tmp_path / "package"
    shutil.copytree(source_root / "kernel", root / "kernel", ignore=SKIP)
    for kernel in KERNELS:
        if kernel.number:  # their numbers are free for the tests
            shutil.rmtree(root / version_folder(kernel).relative_to(source_root))
    monkeypatch.setattr(mla_var3.kernel, "__path__", [str(root / "kernel")])
    return root


def snapshot(root: Path) -> dict[str, bytes]:
    """Every file and folder below a root, hidden ones too."""
    return {
        path.relative_to(root).as_posix(): path.read_bytes() if path.is_file() else b"<folder>"
        for path in root.rglob("*")
    }


@pytest.fixture
def checkout(repo_root: Path, tmp_path: Path) -> Path:
    """A copy of the package in a checkout of its own, with the script."""
    root = tmp_path / "checkout"
    shutil.copytree(repo_root / "src" / "mla_var3", root / "src" / "mla_var3", ignore=SKIP)
    shutil.copy(repo_root / "pyproject.toml", root)
    (root / "scripts").mkdir()
    shutil.copy(repo_root / "scripts" / "clone-kernel.py", root / "scripts")
    return root


def test_every_clone_and_its_clone_work(checkout, package_environment, tmp_path):
    environment = {**package_environment, "PYTHONPATH": str(checkout / "src")}
    done = run_program([sys.executable, "-c", CLONE_ALL], cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert len(report["plans"]) == len(KERNELS) + len(BASES) > 0
    assert set(report["codes"].values()) == {0}, done.stdout + done.stderr
    for name, plan in report["plans"].items():
        assert plan.endswith("V" + name.split()[0].rpartition("_v")[2])

    # Longer names may push a docstring over the line length; the author wraps it.
    for command in (["format"], ["check", "--fix", "--ignore=E501"], ["format", "--check"]):
        words = [sys.executable, "-m", "ruff", *command, "--no-cache", "src/mla_var3/kernel"]
        ruff = run_program(words, cwd=checkout)
        assert ruff.returncode == 0, ruff.stdout + ruff.stderr
    # The script works on its own checkout.
    script = checkout / "scripts" / "clone-kernel.py"
    done = run_program([sys.executable, script, "flash_mla", "v990"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    folder = checkout / "src" / "mla_var3" / MLA / "flash_mla" / "flash_mla_v990"
    assert str(folder) in done.stdout and (folder / "flash_mla_v990.py").is_file()


@pytest.mark.parametrize(("name", "language"), BASES)
def test_clones_differ_in_the_number_alone(name, language, tree):
    """base -> v7 -> v8 is base -> v8, but for the parent; nothing keeps a name of v7."""
    first = plan_clone(name, "v7", language)
    before = snapshot(tree)
    write_clone(first)
    assert {path: data for path, data in snapshot(tree).items() if path in before} == before
    second = plan_clone(f"{name}_v7", "v8", language)
    third = plan_clone(name, "v8", language)
    assert set(second.contents) == set(third.contents)
    for path, text in second.contents.items():
        assert text.replace(f"Parent: {name}_v7.", f"Parent: {name}.") == third.contents[path]
        assert not [x for x in first.renames.values() if x in text.replace(f"{name}_v7.", "")]


def test_the_names_of_the_specification(tree):
    write_clone(plan_clone("mla_var6_plus", "v2"))
    plan = plan_clone("mla_var6_plus_v2", "v5")
    stage, entry = (
        plan.contents[f"{name}_v5.py"] for name in ("attention_block_specialized", "mla_var6_plus")
    )
    for words in ("class CtAttentionBlockSpecializedV5(",
                  "@ct.kernel\ndef attention_block_specialized_v5("):  # fmt: skip
        assert words in stage
    for words in (
        '"""mla_var6_plus_v5: ',
        "\nParent: mla_var6_plus_v2.\n",
        "CtMlaVar6PlusV5(",
        "mla.mla_var6_plus.mla_var6_plus_v5.attention_block_specialized_v5 import",
    ):
        assert words in entry  # fmt: skip
    assert plan.contents["__init__.py"] == '"""Version 5 of mla_var6_plus."""\n'
    # Names in strings: of a pipeline, and forward references.
    split = plan_clone("flash_mla_split_kv", "v5").contents
    assert '_name="flash_mla_split_kv_v5"' in split["flash_mla_split_kv_v5.py"]
    assert 'def validate(self, pd: "CtSplitKVReduceV5")' in split["split_kv_reduce_v5.py"]
    # An attribute of a class that kernels share keeps its name.
    source = tree / "kernel/cute_python/mla/flash_mla/flash_mla/flash_mla.py"
    source.write_text(f"{source.read_text()}\nKERNELS = (FlashMLASm90.flash_mla,)\n")
    cute = plan_clone("flash_mla", "v5", "cute-dsl").contents["flash_mla_v5.py"]
    assert "FlashMLASm90.flash_mla," in cute and "class CuteFlashMLAV5(" in cute


def test_bad_names_are_refused():
    for version in ("", "5", "v0", "v05", "v5\n", "v5/x", "v٥"):
        with pytest.raises(InvalidArgumentError, match="vN with N"):
            plan_clone("flash_mla", version)
    for source in ("flash_mia", "../flash_mla", "", "flash_mla_v3"):
        with pytest.raises(UnknownNameError):
            plan_clone(source, "v905")


def test_the_command(tree, capsys):
    before = snapshot(tree)
    assert main(["clone", "mla_var6_plus", "v5", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "not written" in out and "next:" not in out
    assert "  CtAttentionBlockSpecialized -> CtAttentionBlockSpecializedV5\n" in out
    assert snapshot(tree) == before

    assert main(["clone", "mla_var6_plus", "v5"]) == 0
    out = capsys.readouterr().out
    assert "  attention_block_specialized_v5.py  (was attention_block_specialized.py)\n" in out
    check = "python -m mla_var3.kernel.cutile.mla.mla_var6_plus v5 --prof_type=disabled --check"
    assert f"  {check}\n" in out
    assert main(["clone", "flash_mla", "v5", "--language=cute-dsl"]) == 0
    command = "python -m mla_var3.kernel.cute_python.mla.flash_mla v5 --prof_type=static"
    assert command in capsys.readouterr().out

    before = snapshot(tree)
    for argv, message in (
        (["flash_mia", "v5"], "did you mean 'flash_mla'"),
        (["mla_var6_plus", "v5"], "one that does not exist yet"),
        (["mla_var6_plus_v5", "v5"], "another version than mla_var6_plus_v5"),
        (["flash_mla", "v6", "--language=cuda"], "unknown language 'cuda'"),
        (["flash_mla"], "required: version"),
    ):
        assert main(["clone", *argv]) == 2
        out, err = capsys.readouterr()
        assert message in err and err.count("\n") == 1 and out == ""
    assert snapshot(tree) == before


def test_what_cannot_be_cloned_leaves_nothing(tree, monkeypatch):
    plan, before = plan_clone("flash_mla", "v5"), snapshot(tree)

    def fail(source: Path, target: Path, **options: bool) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(clone.shutil, "copymode", fail)
        write_clone(plan)
    assert snapshot(tree) == before
    plan.folder.mkdir()
    for attempt in (lambda: plan_clone("flash_mla", "v5"), lambda: write_clone(plan)):
        with pytest.raises(InvalidArgumentError, match="does not exist yet"):
            attempt()
    plan.folder.rmdir()
    entry = tree / MLA / "flash_mla" / "flash_mla" / "flash_mla.py"
    entry.write_text("class CtDemo(:\n")
    with pytest.raises(InvalidArgumentError, match="modules that compile, got flash_mla.py:1"):
        plan_clone("flash_mla", "v5")
    entry.unlink()
    with pytest.raises(InvalidArgumentError, match="a package with flash_mla.py"):
        plan_clone("flash_mla", "v5")
