"""Files that are replaced whole: written beside their place, then moved in."""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

__all__ = ["replacing", "write_json"]


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Opens a new file, which takes the place of `path` when the block ends.

    Whatever happens, a reader finds the older file or the whole new one. A killed process leaves
    its part of the new one beside it, named .megaopt-*.tmp.

    Args:
        path: the file, new or not; its folder must exist. A symbolic link stays one, and an older
            file's mode is kept.

    Yields:
        The temporary file, open for writing and reading in binary; its `name` is its path.

    Raises:
        OSError: the file cannot be written (no such folder, no space left, ...).
    """
    # the file behind a symbolic link is replaced, the link stays; in its folder, so that a
    # rename is one operation of the file system
    target = Path(os.path.realpath(path))
    temporary = target.with_name(f".megaopt-{secrets.token_hex(8)}.tmp")
    try:
        if target.exists() and not target.is_file():  # a device, say, which nothing may replace
            raise OSError(errno.EINVAL, "not a regular file")
        # x: nobody else's file of this name is overwritten
        with temporary.open("x+b") as file:
            if target.exists():
                shutil.copymode(target, temporary)
            yield file
            # on the disk before the name moves: a crash leaves the old file or the new one
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    except OSError as error:  # it is to name the file that was asked for
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error
    finally:
        # already moved after a success: then there is nothing to take away
        with suppress(OSError):
            temporary.unlink()


def write_json(path: str | os.PathLike[str], record: Any) -> None:
    """Writes a record as JSON, as `replacing` writes files; raises TypeError for what is none."""
    text = json.dumps(record, indent=2) + "\n"
    with replacing(path) as file:
        file.write(text.encode())
