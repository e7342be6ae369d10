"""Files that are either the old or the new version, never half of one."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_atomic(path: Path, data: bytes | str) -> None:
    """Write a file so that a reader, another writer or a kill never leaves half of it.

    The data goes to a temporary file in the same folder, to the disk, and then takes the name. The
    temporary name is unique, so two processes that write the same file do not mix: the last one
    wins as a whole.
    """
    content = data.encode() if isinstance(data, str) else data
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        # mkstemp makes private files; the result gets what a plain open would have given it.
        temporary.chmod(0o666 & ~_umask())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _umask() -> int:
    """The process's file mode mask; there is no way to read it without setting it."""
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
