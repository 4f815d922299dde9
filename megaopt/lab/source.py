"""A record's folder, and what it says of its making: source, versions and hardware, the command.

No folder of the machine is in it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import re
import shlex
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

import megaopt
from megaopt.recording.environment import driver, installed, output, processor

Source = dict[str, str | bool | None]

COMMIT_VARIABLE = "MEGAOPT_COMMIT"
"""Names the commit of a copy of the source that has no .git folder: 40 hex digits."""
FOLDERS = ("kernels", "integration")
"""Beside the package in a checkout, within it where it is installed."""
SUFFIXES = (".py", ".cpp")
PACKAGE = Path(megaopt.__file__).parent
CHECKOUT = PACKAGE.parent
GPU = ("cuda_driver", "gpu", "compute_capability", "gpu_memory")


class SourceError(ValueError):
    """MEGAOPT_COMMIT is not 40 hex digits, or not the commit of the checkout."""


def describe_source() -> Source:
    """Return which source of megaopt runs here.

    Returns:
        version: of the package.
        commit: 40 hex digits; that of the checkout, else MEGAOPT_COMMIT; None where neither says.
        dirty: whether the package's files in the checkout differ from the commit; None where there
            is no checkout to ask.
        sha256: of the lines that sha256sum writes for the package's .py and .cpp files, named from
            the package on (adam.py, kernels/calling.py) and sorted by name: equal for equal source,
            in a checkout, in a copy or installed.

    Raises:
        SourceError: MEGAOPT_COMMIT is not 40 hex digits, or not the commit of the checkout.
    """
    named = os.environ.get(COMMIT_VARIABLE)
    if named is not None and not re.fullmatch("[0-9a-f]{40}", named):
        raise SourceError(f"{COMMIT_VARIABLE} must be 40 hex digits in lower case, got {named!r}")
    head = _git("rev-parse", "HEAD")
    if named and head and named != head:
        raise SourceError(f"{COMMIT_VARIABLE} must be the checkout's commit {head}, got {named!r}")
    changes = _git("status", "--porcelain", "--", PACKAGE.name, *FOLDERS) if head else None
    # the package's source files by name; installed ones are found twice, as same
    roots = {"": PACKAGE}
    for folder in FOLDERS:
        spec = importlib.util.find_spec(f"megaopt.{folder}")
        if spec is not None and spec.origin is not None:
            roots[folder] = Path(spec.origin).parent
    digests = dict[str, str]()
    for folder, root in roots.items():
        for path in (path for path in root.rglob("*") if path.suffix in SUFFIXES):
            name = (Path(folder) / path.relative_to(root)).as_posix()
            digests[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    lines = [f"{digest}  {name}\n" for name, digest in sorted(digests.items())]
    return {
        "version": megaopt.__version__,
        "commit": head or named,
        "dirty": None if changes is None else changes != "",
        "sha256": hashlib.sha256("".join(lines).encode()).hexdigest(),
    }


def made_with(source: Source) -> dict[str, Any]:
    """Returns a record's beginning: the source, versions and hardware, and the command line."""
    command = shlex.join(portable(["megaopt", *sys.argv[1:]]))
    return {"source": source, "environment": describe(), "command": command}


def portable(words: Iterable[str]) -> list[str]:
    """A command line without the folders of this machine.

    Args:
        words: of the command line; a path may stand behind "--out=" too.

    Returns:
        The words. Absolute paths within the checkout are relative to it, of others the last name
        is left.
    """
    shortened = []
    for word in words:
        before, equals, text = word.rpartition("=")
        path = Path(text)
        name = path.relative_to(CHECKOUT) if path.is_relative_to(CHECKOUT) else path.name
        shortened.append(f"{before}{equals}{name}" if path.is_absolute() else word)
    return shortened


def _git(*arguments: str) -> str | None:
    """Returns what git says of the checkout; None where there is no checkout, or no git."""
    # an installed package may lie in the folders of somebody else's checkout
    if not (CHECKOUT / ".git").exists():
        return None
    return output("git", "-C", str(CHECKOUT), *arguments)


# --- versions and hardware


def describe() -> dict[str, str | None]:
    """Return versions and hardware, each as text; None where there is none or it is not known.

    Returns:
        Always the same keys: megaopt, python, torch, triton, cuda_runtime, cuda_driver, gpu (with
        its count where several), compute_capability (of the current GPU, "9.0"), gpu_memory, cpu,
        cores (that this process may use), os.
    """
    gpu: dict[str, str | None] = dict.fromkeys(GPU)
    if torch.cuda.is_available():
        current = torch.cuda.get_device_properties(torch.cuda.current_device())
        count = torch.cuda.device_count()
        gpu = {
            "cuda_driver": driver(),
            "gpu": current.name if count == 1 else f"{count} x {current.name}",
            "compute_capability": f"{current.major}.{current.minor}",
            "gpu_memory": f"{current.total_memory / 2**30:.1f} GiB",
        }
    return {
        "megaopt": megaopt.__version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "triton": installed("triton"),
        "cuda_runtime": torch.version.cuda,
        **gpu,
        "cpu": processor(),
        "cores": str(cores()),
        "os": platform.platform(),
    }


def cores() -> int:
    """Returns the number of cores that this process may use."""
    # a container or a batch system often gives a process fewer cores than the machine has
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


# --- the folder: its place is tried before hours of work, not after


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
