"""Configuration that ships with the package: devices, models, measured rates and energies."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

from mla_var3.errors import InvalidArgumentError


def shipped(name: str) -> Path:
    """A table of the package."""
    return Path(str(resources.files(__name__) / name))


def read_json(path: str | Path, expected: str, argument: str = "") -> Any:
    """The contents of a JSON file; an error names the argument that gave it, else its path."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        got = getattr(error, "strerror", None) or error
        raise InvalidArgumentError(argument or str(path), expected, got) from error
