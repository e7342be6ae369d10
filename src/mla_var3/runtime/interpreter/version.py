"""The cuTile version that the interpreter is written for."""

from __future__ import annotations

import importlib.metadata

from mla_var3.errors import MissingToolError

PINNED_CUTILE_VERSION = "1.7.0"


def require_pinned_cutile() -> None:
    """Refuses to go on with a cuTile whose private interface may differ from the pinned one.

    Raises:
        MissingToolError: If cuda-tile is not installed, or installed in another version.
    """
    wanted = f"cuda-tile=={PINNED_CUTILE_VERSION}"
    try:
        found = importlib.metadata.version("cuda-tile")
    except importlib.metadata.PackageNotFoundError as error:
        raise MissingToolError(
            f"the CPU interpreter needs {wanted}, but cuda-tile is not installed"
        ) from error
    if found != PINNED_CUTILE_VERSION:
        raise MissingToolError(
            f"the CPU interpreter is written for {wanted}, because it builds on private modules "
            f"of that package, but version {found} is installed"
        )
