"""The source that a record was made with, and the command: no folder of the machine is in it."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import megaopt
from megaopt.lab import environment
from megaopt.recording.environment import output

Source = dict[str, str | bool | None]

COMMIT_VARIABLE = "MEGAOPT_COMMIT"
"""Names the commit of a copy of the source that has no .git folder: 40 hex digits."""
FOLDERS = ("kernels", "integration")
"""Beside the package in a checkout, within it where it is installed."""
SUFFIXES = (".py", ".cpp")
PACKAGE = Path(megaopt.__file__).parent
CHECKOUT = PACKAGE.parent


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
    return {
        "version": megaopt.__version__,
        "commit": head or named,
        "dirty": None if changes is None else changes != "",
        "sha256": _digest(),
    }


def made_with(source: Source) -> dict[str, Any]:
    """Returns a record's beginning: the source, versions and hardware, and the command line."""
    command = shlex.join(portable(["megaopt", *sys.argv[1:]]))
    return {"source": source, "environment": environment.describe(), "command": command}


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


def _digest() -> str:
    """The digest of the package's source files by name; installed ones are found twice, as same."""
    roots = {"": PACKAGE}
    for folder in FOLDERS:
        spec = importlib.util.find_spec(f"megaopt.{folder}")
        if spec is not None and spec.origin is not None:
            roots[folder] = Path(spec.origin).parent
    files = {
        (Path(folder) / path.relative_to(root)).as_posix(): path
        for folder, root in roots.items()
        for path in root.rglob("*")
        if path.suffix in SUFFIXES
    }
    digests = {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()}
    lines = [f"{digest}  {name}\n" for name, digest in sorted(digests.items())]
    return hashlib.sha256("".join(lines).encode()).hexdigest()
