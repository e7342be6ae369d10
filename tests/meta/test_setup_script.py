"""`setup_cutile.sh` and `.ci/run`: fail clearly, and never take a half environment for a whole one.

The script runs here on a copy of the checkout's top files, with stand-ins for the interpreter: no
package is installed and no network is used.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.programs import run_program, write_script

STAMP = ".hyper-mla-setup"

# Stands in for the interpreter in PATH. `-m venv DIR` makes a folder with the second stand-in.
OUTER = """#!/usr/bin/env bash
case "$*" in
    "-c import sys; print("*) echo "${STAND_IN_VERSION:-3.11.9}" ;;
    "-c import ensurepip, venv") exit "${STAND_IN_NO_VENV:-0}" ;;
    "-m venv "*)
        mkdir -p "$3/bin"
        touch "$3/pyvenv.cfg"
        cp "$STAND_IN_INNER" "$3/bin/python"
        ;;
esac
"""

# Stands in for the environment's interpreter; notes every pip install it is asked for.
INNER = """#!/usr/bin/env bash
case "$*" in
    "-c import sys; print("*) echo "${STAND_IN_VERSION:-3.11.9}" ;;
    "-c import mla_var3"*) exit "${STAND_IN_IMPORT:-0}" ;;
    "-m pip --version") exit "${STAND_IN_NO_PIP:-0}" ;;
    "-m pip install"*)
        echo "$*" >>"$STAND_IN_CALLS"
        if [[ "$*" == *"${STAND_IN_BREAKS:-nothing at all}"* ]]; then
            echo "WARNING: Retrying after connection broken by 'NewConnectionError'"
            exit 1
        fi
        ;;
    "- "*"pyproject.toml") cat >/dev/null; exit 1 ;;
    "- "*) cat >/dev/null ;;
esac
"""


class Sandbox:
    """A copy of the setup script with its stand-ins."""

    def __init__(self, root: Path, repo_root: Path) -> None:
        self.root, self.venv = root, root / ".venv"
        root.mkdir()
        for name in ("setup_cutile.sh", "pyproject.toml"):
            shutil.copy(repo_root / name, root / name)
        self.environment = {
            **{key: value for key, value in os.environ.items() if key != "VENV"},
            "PYTHON": str(write_script(root / "python-outer", OUTER)),
            "STAND_IN_INNER": str(write_script(root / "python-inner", INNER)),
            "STAND_IN_CALLS": str(root / "calls.txt"),
        }

    @property
    def complete(self) -> bool:
        return (self.venv / STAMP).is_file()

    @property
    def pip_calls(self) -> list[str]:
        calls = self.root / "calls.txt"
        return calls.read_text().splitlines() if calls.exists() else []

    def run(self, *arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
        return run_program(
            [str(self.root / "setup_cutile.sh"), *arguments],
            env={**self.environment, **changes},
            cwd=self.root,
            stdin=subprocess.DEVNULL,
        )


@pytest.fixture
def sandbox(repo_root: Path, tmp_path: Path) -> Sandbox:
    return Sandbox(tmp_path / "a checkout", repo_root)


@pytest.mark.parametrize("name", ["setup_cutile.sh", ".ci/run"])
def test_scripts_are_executable_and_well_formed(repo_root, name):
    script = repo_root / name
    assert os.access(script, os.X_OK)
    assert run_program(["bash", "-n", script]).returncode == 0


def test_first_run_installs_and_the_next_does_only_what_changed(sandbox):
    first = sandbox.run()
    assert first.returncode == 0, first.stderr
    assert sandbox.complete
    torch_call, package_call = sandbox.pip_calls
    assert torch_call.endswith("torch==2.13.0")
    assert package_call.endswith(f"-e {sandbox.root}[cute,cutile,dev,docs,fit]")

    for environment in ({}, {"PYTHON": ""}):
        second = sandbox.run(**environment)
        assert second.returncode == 0, second.stderr
        assert "everything is up to date" in second.stdout
        assert len(sandbox.pip_calls) == 2
    for changed in ("pyproject.toml", "setup_cutile.sh"):
        with (sandbox.root / changed).open("a") as file:
            file.write("\n# changed\n")
        assert "installing" in sandbox.run().stdout and sandbox.complete
    # Extras are added and kept.
    assert "up to date" in sandbox.run("--extras", "cute").stdout
    assert sandbox.run("--extras=profiling").returncode == 0
    assert sandbox.pip_calls[-1].endswith("[cute,cutile,dev,docs,fit,profiling]")
    assert "up to date" in sandbox.run().stdout


OLD = ("python-outer is Python 3.9.18", "PYTHON=/path/to/python3.11 ./setup_cutile.sh")


@pytest.mark.parametrize(
    ("arguments", "changes", "said"),
    [
        (["--extras=cutee"], {}, ["--extras: expected some of profiling, got 'cutee'"]),
        (["--farce"], {}, ["unknown argument '--farce'"]),
        ([], {"STAND_IN_VERSION": "3.9.18"}, ["Python 3.11 or newer is needed", *OLD]),
        ([], {"PYTHON": "/no/such/python"}, ["PYTHON=/no/such/python: no such program"]),
        ([], {"STAND_IN_NO_VENV": "1"}, ["without the venv module", "python3.11-venv"]),
    ],
)
def test_what_cannot_work_is_refused(sandbox, arguments, changes, said):
    result = sandbox.run(*arguments, **changes)
    assert result.returncode == 1
    assert [part for part in said if part not in result.stderr] == []
    assert not sandbox.venv.exists()


@pytest.mark.parametrize(
    ("breaks", "what"), [("torch==", "torch==2.13.0"), ("-e ", "HyperMLA and its extras")]
)
def test_a_failed_download_leaves_no_stamp(sandbox, breaks, what):
    result = sandbox.run(STAND_IN_BREAKS=breaks)
    assert result.returncode == 1
    for words in (f"pip could not install {what}", "is the network away?", "not marked as complete",
                  "run ./setup_cutile.sh again"):  # fmt: skip
        assert words in result.stderr
    result = sandbox.run(STAND_IN_IMPORT="1")
    assert result.returncode == 1 and "does not import" in result.stderr
    assert not sandbox.complete
    assert "up to date" not in sandbox.run().stdout
    assert sandbox.complete


def test_a_half_made_environment_is_made_again_and_force_builds_from_nothing(sandbox):
    sandbox.venv.mkdir()
    (sandbox.venv / "pyvenv.cfg").write_text("")
    result = sandbox.run()
    assert result.returncode == 0, result.stderr
    assert "its interpreter does not run" in result.stdout and sandbox.complete
    (sandbox.venv / "left over").write_text("")
    result = sandbox.run("--force")
    assert result.returncode == 0, result.stderr
    assert not (sandbox.venv / "left over").exists() and sandbox.complete
    other = write_script(sandbox.root / "python-other", OUTER.replace("3.11.9", "3.12.1"))
    result = sandbox.run(PYTHON=str(other))
    assert "it has Python 3.11.9 and 3.12.1 was asked for" in result.stdout


def test_a_folder_that_is_no_environment_is_left_alone(sandbox):
    sandbox.venv.mkdir()
    (sandbox.venv / "thesis.txt").write_text("irreplaceable")
    result = sandbox.run("--force")
    assert result.returncode == 1 and (sandbox.venv / "thesis.txt").exists()
    assert "is not a virtual environment; it is left alone" in result.stderr


@pytest.mark.parametrize("broken", ["", "setup", "test", "test-engines", "docs"])
def test_ci_runs_every_step_and_fails_with_any(repo_root, tmp_path, broken):
    """Also with the one beside the others."""
    (tmp_path / ".ci").mkdir()
    script = Path(shutil.copy(repo_root / ".ci" / "run", tmp_path / ".ci" / "run"))
    (tmp_path / "bin").mkdir()
    make = (
        f'#!/bin/sh\necho "$1" >> {tmp_path}/made\n'
        f'[ "$1" = test ] && echo "marks:${{MARKS-not slow}}" > {tmp_path}/marks\n'
        f'[ "$1" != "{broken}" ]\n'
    )
    path = f"{write_script(tmp_path / 'bin' / 'make', make).parent}:{os.environ['PATH']}"
    done = run_program(["bash", script], env={**os.environ, "PATH": path})
    steps = ["setup", "test", "fuzz", "lint", "docs", "test-engines"]
    made = (tmp_path / "made").read_text().split()
    assert sorted(made) == (["setup"] if broken == "setup" else sorted(steps))
    # The slow tests too.
    assert broken == "setup" or (tmp_path / "marks").read_text().strip() == "marks:"
    assert (done.returncode == 0) is not bool(broken), done.stdout
    assert ("[ci] all passed" in done.stdout) is not bool(broken)
    assert done.stderr.strip() == (f"[ci] FAILED: {broken}" if broken else "")
