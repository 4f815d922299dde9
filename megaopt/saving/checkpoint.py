"""Checkpoints that are whole or refused: torch.save's bytes, a digest behind them, moved in whole.

torch.load reads these files too, and does not look at the digest.
"""

import hashlib
import os
from collections.abc import Callable
from typing import Any, BinaryIO, TypeAlias

import torch

from megaopt.kernels.files import replacing

__all__ = ["CheckpointError", "load", "save"]

MapLocation: TypeAlias = torch.device | str | dict[str, str] | Callable[[Any, str], Any] | None

MARK = b"megaopt: SHA-256 of all bytes before this comment: "
TRAILER_SIZE = len(MARK) + 64
PART = 1 << 20


class CheckpointError(ValueError):
    """A checkpoint that is missing, unreadable, damaged or of another kind."""


class _Digested:
    """Hands torch's bytes to a file, and keeps the OSError, of which torch makes a RuntimeError."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.digest = file, hashlib.sha256()
        self.error: OSError | None = None

    def write(self, content: bytes) -> int:
        self.digest.update(content)
        try:
            return self.file.write(content)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        """Does nothing: torch asks for it, and whoever opened the file flushes it."""


def save(path: str | os.PathLike[str], payload: dict[str, Any]) -> None:
    """Writes `payload` to `path`: afterwards the file is the new one, or, on an error, the old one.

    Args:
        path: the file to write; its folder must exist. A symbolic link stays one, and an older
            file's mode is kept.
        payload: what `torch.load(weights_only=True)` can read back: tensors, which keep their
            dtype and every bit, and plain Python values in dicts, lists and tuples.

    Raises:
        TypeError: `payload` is not a dict.
        CheckpointError: `payload` holds something that `load` would refuse.
        OSError: the file cannot be written (no such folder, no space left, not a file, ...).
    """
    if not isinstance(payload, dict):
        raise TypeError(f"payload must be a dict, got {type(payload).__name__}")
    with replacing(path) as file:
        # torch writes through a wrapper that hashes each byte on its way
        digested = _Digested(file)
        try:
            torch.save(payload, digested)  # type: ignore[arg-type]  # it wants write and flush
        # torch hides the file's OSError behind a RuntimeError
        except RuntimeError as error:
            raise digested.error or error from None
        # the trailer is the comment at the end of torch's zip file: torch.load reads past it
        file.write(MARK + digested.digest.hexdigest().encode())
        file.flush()
        # read back before the old file is replaced; mmap: headers and pickles, no tensor data
        try:
            torch.load(file.name, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:
            raise CheckpointError(
                f"payload cannot be loaded back, {path} is left as it was: {error}"
            ) from error


def load(path: str | os.PathLike[str], map_location: MapLocation = None) -> dict[str, Any]:
    """Reads a checkpoint that `save` wrote.

    Args:
        path: the file to read.
        map_location: where tensors go, as in `torch.load`; None puts each where it was.

    Returns:
        The payload, its tensors with the dtypes and bits that were saved.

    Raises:
        CheckpointError: the file is missing, truncated, damaged, or not one of `save`'s. It names
            the path.
    """
    try:
        # opened once, so that what is checked is what is read
        with open(path, "rb") as file:
            # the trailer has a fixed size, so it is found from the end
            left, digest = max(0, file.seek(0, os.SEEK_END) - TRAILER_SIZE), hashlib.sha256()
            file.seek(left)
            trailer = file.read()
            if not trailer.startswith(MARK):
                raise CheckpointError(
                    "no digest at its end: it is cut off, or not megaopt's (torch.load reads "
                    "torch.save's)"
                )
            # the bytes before it, in parts of 1 MiB
            file.seek(0)
            while part := file.read(min(PART, left)):
                digest.update(part)
                left -= len(part)
            if trailer != MARK + digest.hexdigest().encode():
                raise CheckpointError("it is damaged: its SHA-256 does not fit its bytes")
            file.seek(0)
            loaded: dict[str, Any] = torch.load(file, map_location=map_location, weights_only=True)
            return loaded
    except Exception as error:
        raise CheckpointError(f"checkpoint {path} cannot be read: {error}") from error
