"""Files that are replaced whole: written beside their place, then moved in.

The temporary file is locked (flock) while it is written. The system lets go of the lock when its
process ends, killed or not, so that whoever finds one unlocked knows that it was left behind.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import platform
import secrets
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

if sys.platform != "win32":
    import fcntl

__all__ = ["replacing", "write_json"]

PREFIX, SUFFIX = ".megaopt-", ".tmp"
DAY = 24 * 60 * 60.0


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A new file to write, which takes the place of `path` when the block ends.

    A reader finds the older file or the whole new one, never a part. An error in the block, or a
    full disk, leaves the older file as it was. Temporary files that killed processes left in the
    folder are removed: those of this host at once, those of others after a day, where nothing was
    written to them. Where files cannot be locked (Windows, some network file systems), they stay.

    Args:
        path: the file, new or not; its folder must exist. A symbolic link stays one. An older
            file's mode is kept; its owner and group too, as far as the system allows.

    Yields:
        The temporary file, open for writing and reading in binary; its `name` is its path.

    Raises:
        OSError: the file cannot be written (no such folder, no space left, not a file, ...).
    """
    target = Path(os.path.realpath(path))
    with _named(path, target):
        older = _status_of(target)
        _remove_abandoned(target.parent)
        file, lock = _new_file(target.parent, 0o666 if older is None else older.st_mode)
        temporary = Path(file.name)
        try:
            with file:
                yield file
                file.flush()
                if older is not None:
                    _give_status(temporary, older)
                os.fsync(file.fileno())
            temporary.replace(target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        finally:
            if lock is not None:
                os.close(lock)
    _sync_folder(target.parent)


def write_json(path: str | os.PathLike[str], record: Any) -> None:
    """Writes a record as JSON, as `replacing` writes files; raises TypeError for what is none."""
    text = json.dumps(record, indent=2) + "\n"
    with replacing(path) as file:
        file.write(text.encode())


@contextmanager
def _named(path: str | os.PathLike[str], target: Path) -> Iterator[None]:
    """Errors name the file as it was asked for: not the temporary one, its real place, or none."""
    try:
        yield
    except OSError as error:
        found = error.filename
        is_other = not (found is None or PREFIX in str(found) or str(found) == str(target))
        if error.errno is None or is_other:
            raise
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error


def _status_of(target: Path) -> os.stat_result | None:
    """Of the file that is to be replaced, None where there is none; OSError for what is no file."""
    try:
        status = os.stat(target)
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(target))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(target))
    return status


def _give_status(temporary: Path, older: os.stat_result) -> None:
    if hasattr(os, "chown"):
        for owner, group in ((-1, older.st_gid), (older.st_uid, -1)):
            with suppress(OSError):
                os.chown(temporary, owner, group)
    mode = stat.S_IMODE(older.st_mode)
    # after chown, which may clear some of it; only where needed, as some file systems have no modes
    if stat.S_IMODE(temporary.stat().st_mode) != mode:
        temporary.chmod(mode)


# --- temporary files


def _own_prefix() -> str:
    """What the names of this host's temporary files begin with; short, whatever the target's."""
    return f"{PREFIX}{hashlib.sha256(platform.node().encode()).hexdigest()[:8]}-"


def _new_file(folder: Path, mode: int) -> tuple[BinaryIO, int | None]:
    """A locked file of a new name, and what holds the lock when the file is closed."""
    # nobody may read the new file who may not read the older one, not for a moment either
    opener = partial(os.open, mode=stat.S_IMODE(mode) & 0o777 | stat.S_IRUSR | stat.S_IWUSR)
    while True:
        name = folder / f"{_own_prefix()}{secrets.token_hex(8)}{SUFFIX}"
        file = open(name, "x+b", opener=opener)  # noqa: SIM115  # the caller closes it
        if sys.platform == "win32":
            return file, None
        with suppress(OSError):  # a file system without locks
            fcntl.flock(file.fileno(), fcntl.LOCK_EX)
        if os.fstat(file.fileno()).st_nlink:
            return file, os.dup(file.fileno())
        file.close()  # another process removed it before it was locked


def _remove_abandoned(folder: Path) -> None:
    if sys.platform == "win32":
        return
    for path in folder.glob(f"{PREFIX}*{SUFFIX}"):
        with suppress(OSError):  # locked, gone meanwhile, or another user's
            _remove_unlocked(path)


def _remove_unlocked(path: Path) -> None:
    descriptor = os.open(path, os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # some file systems keep locks to one host
        is_own = path.name.startswith(_own_prefix())
        if is_own or time.time() - os.fstat(descriptor).st_mtime > DAY:
            path.unlink()
    finally:
        os.close(descriptor)


def _sync_folder(folder: Path) -> None:
    """Makes the rename itself survive a power cut, where the system can open a folder."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
