"""Files that are either the old or the new version, never half of one."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mla_var3.errors import InvalidArgumentError


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


def make_folder(path: Path, argument: str = "out_dir") -> Path:
    """The folder, made if it is not there; an error before any work if nothing can go into it."""
    expected = "a folder that can be written to"
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidArgumentError(argument, expected, f"{path} ({error.strerror})") from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise InvalidArgumentError(argument, expected, f"{path} (no permission)")
    return path


@contextmanager
def output_folder(path: Path, argument: str = "out_dir") -> Iterator[Path]:
    """A folder for the artifacts of a run, made if it is not there.

    Of the folders that this made, those that are empty at the end are removed: a run that failed
    leaves nothing behind.
    """
    made = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        yield make_folder(path, argument)
    finally:
        with suppress(OSError):  # the first that is not empty ends it
            for folder in made:
                folder.rmdir()


def _umask() -> int:
    """The process's file mode mask; there is no way to read it without setting it."""
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
