"""Checkpoints that are whole or not there: written beside their place, read back, then moved in.

A crash, a full disk or an exception while saving leaves the older file as it was. Every byte is
checked against its CRC on loading (torch's own reader does not look), so that a damaged file is
refused and never read as slightly different weights.
"""

import os
import secrets
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

import torch

__all__ = ["CheckpointError", "load", "save"]

MapLocation: TypeAlias = torch.device | str | dict[str, str] | Callable[[Any, str], Any] | None


class CheckpointError(ValueError):
    """A checkpoint that is missing, unreadable, damaged or of another kind."""


def save(path: str | os.PathLike[str], payload: dict[str, Any]) -> None:
    """Write `payload` to `path`: afterwards the file is the new one, or, on an error, the old one.

    Args:
        path: The file to write; its folder must exist. A symbolic link stays one.
        payload: What `torch.load(weights_only=True)` can read back: tensors, which keep their
            dtype and every bit, and plain Python values in dicts, lists and tuples.

    Raises:
        TypeError: `payload` is not a dict.
        CheckpointError: `payload` holds something that `load` would refuse.
        OSError: The file cannot be written (no such folder, no space left, ...).
    """
    if not isinstance(payload, dict):
        raise TypeError(f"payload must be a dict, got {type(payload).__name__}")
    target = Path(path).resolve()
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("xb") as file:
            torch.save(payload, file)
            file.flush()
            os.fsync(file.fileno())
        _check_readable(temporary, target)
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(target.parent)


def load(path: str | os.PathLike[str], map_location: MapLocation = None) -> dict[str, Any]:
    """Read a checkpoint that `save` wrote.

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
    if not target.is_file():
        kind = "not a file" if target.exists() else "no such file"
        raise CheckpointError(f"checkpoint {target}: {kind}")
    try:
        _check_bytes(target)
        payload = torch.load(target, map_location=map_location, weights_only=True)
    # torch.load and zipfile raise whatever the damaged bytes lead them to: RuntimeError, KeyError,
    # UnpicklingError, EOFError, BadZipFile, NotImplementedError, OSError, ...
    except Exception as error:
        raise CheckpointError(f"checkpoint {target} cannot be read: {error}") from error
    if not isinstance(payload, dict):
        found = type(payload).__name__
        raise CheckpointError(f"checkpoint {target} holds a {found}, expected a dict")
    return payload


def _check_bytes(path: Path) -> None:
    """Raise unless the file is a whole zip archive (torch's format) and every CRC in it fits."""
    with zipfile.ZipFile(path) as archive:
        damaged = archive.testzip()
    if damaged is not None:
        raise CheckpointError(f"{damaged} is damaged: its CRC does not fit its bytes")


def _check_readable(written: Path, target: Path) -> None:
    """Raise unless `load` will take the file; maps its tensors, so that no second copy is made."""
    try:
        _check_bytes(written)
        torch.load(written, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        raise CheckpointError(
            f"payload cannot be loaded back, {target} is left as it was: {error}"
        ) from error


def _sync_folder(folder: Path) -> None:
    """Make the rename itself survive a power cut, where the system can open a folder."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
