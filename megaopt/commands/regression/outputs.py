"""The files that a command writes: their place is tried before hours of work, not after."""

from __future__ import annotations

import tempfile
from pathlib import Path

from megaopt.commands.toml_tables import require


def require_file(key: str, path: Path | None) -> None:
    """Tries whether a file can be written at `path`; None: nothing is to be written.

    Args:
        key: the option's name, for the message.
        path: the file.

    Raises:
        ConfigError: it is a folder, or there is no folder for it.
        OSError: nothing can be written there.
    """
    if path is not None:
        require(not path.is_dir(), key, str(path), "a file, not a folder")
        require(path.parent.is_dir(), key, str(path), "a file in a folder that exists")
        _try_to_write(path.parent)


def require_new_folder(key: str, path: Path | None) -> None:
    """Tries whether a folder can be made at `path`, as `require_file`."""
    if path is not None:
        require(not path.exists(), key, str(path), "a folder that is not there yet")
        require(path.parent.is_dir(), key, str(path), "in a folder that exists")
        _try_to_write(path.parent)


def make_folder(path: Path) -> Path:
    """The folder of a record, made where it is missing; says what will be written over.

    Raises:
        OSError: it cannot be made, or nothing can be written in it.
    """
    path.mkdir(parents=True, exist_ok=True)
    _try_to_write(path)
    if (path / "record.json").exists():
        print(f"{path} has an earlier run's record, which this one writes over", flush=True)
    return path


def _try_to_write(folder: Path) -> None:
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"0")
    except OSError as error:
        raise about_file(error, folder) from error


def about_file(error: OSError, path: Path) -> OSError:
    """The same error about the file that a user named, and not about a temporary one."""
    return OSError(error.errno, error.strerror or str(error), str(path))
