"""Starts programs for tests, and makes stand-ins for those that they start."""

import shutil
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
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


def tools_alone(folder: Path, tools: Iterable[str]) -> Path:
    """A folder for PATH with these programs of the machine and no others."""
    folder.mkdir()
    for tool in tools:
        (folder / tool).symlink_to(str(shutil.which(tool)))
    return folder
