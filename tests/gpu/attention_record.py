"""What the measuring modules of the attention call write: figures with all that they depend on."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import torch

from mla_var3.runtime.environment import environment
from mla_var3.runtime.paths import write_atomic


def write_record(path: Path | None, module: str, values: dict[str, Any]) -> None:
    """Write a record as JSON, with the circumstances; nothing without a path.

    Args:
        path: the file; None for none.
        module: name of the module that measured.
        values: what it measured.
    """
    if path is None:
        return
    circumstances = environment()
    circumstances["command"] = shlex.join(["python", "-m", f"tests.gpu.{module}", *sys.argv[1:]])
    record = {"module": module, "environment": circumstances, **values}
    write_atomic(path, json.dumps(record, indent=2) + "\n")


def cuda_is_missing() -> bool:
    """Whether there is no CUDA device; says so."""
    if torch.cuda.is_available():
        return False
    print("expected a CUDA device, got none", file=sys.stderr)
    return True
