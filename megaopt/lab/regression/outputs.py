"""The files that a command writes: their place is tried before hours of work, not after."""

from __future__ import annotations

import tempfile
from pathlib import Path


def make_folder(path: Path) -> Path:
    """The folder of a record, made where it is missing; says what will be written over.

    Raises:
        OSError: it cannot be made, or nothing can be written in it.
    """
    path.mkdir(parents=True, exist_ok=True)
    try_to_write(path)
    if (path / "record.json").exists():
        print(f"{path} has an earlier run's record, which this one writes over", flush=True)
    return path


def try_to_write(folder: Path) -> None:
    """Raises an OSError about a folder where no file can be made in it."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"0")
    except OSError as error:
        raise about_file(error, folder) from error


def about_file(error: OSError, path: Path) -> OSError:
    """The same error about the file that a user named, and not about a temporary one."""
    return OSError(error.errno, error.strerror or str(error), str(path))
