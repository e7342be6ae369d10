"""Starts programs for tests."""

import subprocess
from collections.abc import Sequence
from typing import Any


def run_program(command: Sequence[object], **settings: Any) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, whatever its exit code; what it prints is kept as text."""
    defaults: dict[str, Any] = {"capture_output": True, "timeout": 300}
    words = [str(word) for word in command]
    return subprocess.run(words, text=True, check=False, **{**defaults, **settings})
