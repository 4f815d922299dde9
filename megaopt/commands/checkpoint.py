"""Checkpoints that are whole or refused: written beside their place, read back, then moved in.

A crash, a full disk or an exception while saving leaves the older file as it was. Behind the zip
archive that torch wrote lies, as its comment, a digest of every byte before it. Loading checks it,
so that a damaged file is refused and never read as slightly different weights. torch.load, which
does not look at it, reads these files too.
"""

import hashlib
import os
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import torch

from megaopt.commands.files import replacing

__all__ = ["CheckpointError", "load", "save"]

MapLocation: TypeAlias = torch.device | str | dict[str, str] | Callable[[Any, str], Any] | None

PART = 1 << 20
MARK = b"megaopt: SHA-256 of all bytes before this comment: "
TRAILER_SIZE = len(MARK) + 64
ARCHIVE_END, ARCHIVE_END_SIZE = b"PK\x05\x06", 22
"""A zip archive's last record; its last two bytes say how long the comment behind it is."""


class CheckpointError(ValueError):
    """A checkpoint that is missing, unreadable, damaged or of another kind."""


def save(path: str | os.PathLike[str], payload: dict[str, Any]) -> None:
    """Write `payload` to `path`: afterwards the file is the new one, or, on an error, the old one.

    An older file's mode is kept. What a killed save left in the folder is removed (files.py).

    Args:
        path: The file to write; its folder must exist. A symbolic link stays one.
        payload: What `torch.load(weights_only=True)` can read back: tensors, which keep their
            dtype and every bit, and plain Python values in dicts, lists and tuples.

    Raises:
        TypeError: `payload` is not a dict.
        CheckpointError: `payload` holds something that `load` would refuse.
        OSError: The file cannot be written (no such folder, no space left, not a file, ...).
    """
    if not isinstance(payload, dict):
        raise TypeError(f"payload must be a dict, got {type(payload).__name__}")
    with replacing(path) as file:
        _write(payload, file)
        _add_digest(file)
        _check_readable(file, path)


def load(path: str | os.PathLike[str], map_location: MapLocation = None) -> dict[str, Any]:
    """Read a checkpoint that `save` wrote.

    A file without a digest is read too: one of torch.save, or of `save` before there were digests.
    It has to begin and end where its zip archive does, the CRCs of its records have to fit, and
    none may be marked as a folder; no digest says that this is all.

    Args:
        path: The file to read.
        map_location: Where tensors go, as in `torch.load`; None puts each where it was.

    Returns:
        The payload, its tensors with the dtypes and bits that were saved.

    Raises:
        CheckpointError: The file is missing, unreadable, truncated, damaged, no checkpoint at all,
            or holds something else than a dict of tensors and plain values. It names the path.
    """
    target = Path(path)
    if not os.path.isfile(target):
        kind = "not a file" if os.path.exists(target) else "no such file"
        raise CheckpointError(f"checkpoint {target}: {kind}")
    try:
        # opened once, so that what is checked is what is read
        with target.open("rb") as file:
            _check_bytes(file)
            file.seek(0)
            payload = torch.load(file, map_location=map_location, weights_only=True, mmap=False)
    # torch.load and zipfile raise whatever the damaged bytes lead them to: RuntimeError, KeyError,
    # UnpicklingError, EOFError, BadZipFile, NotImplementedError, OSError, ...
    except Exception as error:
        raise CheckpointError(f"checkpoint {target} cannot be read: {error}") from error
    if not isinstance(payload, dict):
        found = type(payload).__name__
        raise CheckpointError(f"checkpoint {target} holds a {found}, expected a dict")
    return payload


# --- writing


class _Kept:
    """Hands torch's bytes to a file and keeps the OSError, of which torch makes a RuntimeError."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.error: OSError | None = None

    def write(self, content: bytes) -> int:
        try:
            return self.file.write(content)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        """As torch asks for: whoever opened the file flushes it."""


def _write(payload: dict[str, Any], file: BinaryIO) -> None:
    kept = _Kept(file)
    try:
        torch.save(payload, kept)  # type: ignore[arg-type]  # it wants write and flush alone
    except RuntimeError:
        if kept.error is None:
            raise
        raise kept.error from None


def _check_readable(file: BinaryIO, path: str | os.PathLike[str]) -> None:
    """Raise unless `load` will take the file; maps its tensors, so that no second copy is made."""
    file.flush()
    try:
        _check_records(file)
        torch.load(file.name, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        raise CheckpointError(
            f"payload cannot be loaded back, {path} is left as it was: {error}"
        ) from error


# --- the digest


def _add_digest(file: BinaryIO) -> None:
    """Put the digest behind an archive, as its comment."""
    file.seek(-2, os.SEEK_END)
    file.write(struct.pack("<H", TRAILER_SIZE))
    size = file.tell()
    trailer = _trailer(file, size)
    file.seek(size)
    file.write(trailer)


def _trailer(file: BinaryIO, size: int) -> bytes:
    """What stands behind the first `size` bytes of a file."""
    digest = hashlib.sha256()
    file.seek(0)
    while size:
        part = file.read(min(PART, size))
        if not part:
            raise EOFError(f"the file ended {size} bytes early while it was read")
        digest.update(part)
        size -= len(part)
    return MARK + digest.hexdigest().encode()


def _check_bytes(file: BinaryIO) -> None:
    """Raise unless the file is what its digest says, or a whole zip archive without one."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - TRAILER_SIZE))
    tail = file.read()
    if tail.startswith(MARK):
        if tail != _trailer(file, size - TRAILER_SIZE):
            raise CheckpointError("it is damaged: its SHA-256 does not fit its bytes")
        return
    end = tail[-ARCHIVE_END_SIZE:]
    if not (end.startswith(ARCHIVE_END) and end.endswith(b"\0\0")):
        raise CheckpointError("it ends neither with a digest nor with the end of a zip archive")
    _check_records(file)


def _check_records(file: BinaryIO) -> None:
    """Raise unless the file is a whole zip archive (torch's format) and every CRC in it fits.

    zipfile passes over what torch's reader would take for a folder, and over bytes in front.
    """
    with zipfile.ZipFile(file) as archive:
        records = archive.infolist()
        for record in records:
            if record.external_attr or record.is_dir():
                raise CheckpointError(f"{record.filename} is damaged: it is marked as a folder")
        if not records or records[0].header_offset != 0:
            raise CheckpointError("its zip archive does not begin where the file begins")
        damaged = archive.testzip()
    if damaged is not None:
        raise CheckpointError(f"{damaged} is damaged: its CRC does not fit its bytes")
