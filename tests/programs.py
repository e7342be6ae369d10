"""Starts programs for tests, and makes stand-ins for those that they start."""

import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any


def run_program(command: Sequence[object], **settings: Any) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, whatever its exit code; what it prints is kept as text."""
    defaults: dict[str, Any] = {"capture_output": True, "timeout": 300}
    words = [str(word) for word in command]
    return subprocess.run(words, text=True, check=False, **{**defaults, **settings})


def write_script(path: Path, text: str) -> Path:
    """Write an executable script."""
    path.write_text(text)
    path.chmod(0o755)
    return path


def python_stand_in(path: Path, body: str) -> Path:
    """An executable Python script that plays another program; its arguments are in `args`."""
    return write_script(path, f"#!{sys.executable}\nimport sys\nargs = sys.argv[1:]\n{body}\n")


def tools_alone(folder: Path, tools: Iterable[str]) -> Path:
    """A folder for PATH with these programs of the machine and no others."""
    folder.mkdir()
    for tool in tools:
        (folder / tool).symlink_to(str(shutil.which(tool)))
    return folder


def load_module(path: Path) -> ModuleType:
    """Run a file as a module; it is known by its name while it runs, as dataclasses need it."""
    spec = importlib.util.spec_from_file_location(path.stem.replace("-", "_"), path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[spec.name]
    return module


def run_snippet(body: str, folder: Path) -> ModuleType:
    """Run a documented snippet as a module: kernel languages read functions from their file."""
    path = folder / "documented_snippet.py"
    path.write_text(body)
    return load_module(path)
