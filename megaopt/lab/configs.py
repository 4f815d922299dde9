"""The configs that come with the package, found from any folder."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Annotated

import tyro

import megaopt

DEFAULT = Path("configs/gpt_tiny.toml")
PACKAGE = Path(megaopt.__file__).parent


def folder() -> Path:
    """Returns their folder: within the installed package, or beside it in a checkout."""
    installed = PACKAGE / "configs"
    return installed if installed.is_dir() else PACKAGE.parent / "configs"


def shipped() -> list[str]:
    """Returns the names of the package's configs, without .toml."""
    return sorted(path.stem for path in folder().glob("*.toml"))


_HELP = f"TOML file of the run, or the name of one that comes with megaopt: {', '.join(shipped())}."
Config = Annotated[Path, tyro.conf.arg(help=_HELP)]
"""The argument of commands: a path, whose help names the package's configs."""


def find_config(path: Path) -> Path:
    """The file that a user means.

    Args:
        path: of a file; or, where there is no such file, the name of a config of the package, with
            or without .toml, with or without the folder configs before it.

    Returns:
        A file of that path, else the package's, else the path as it is.

    Raises:
        FileNotFoundError: path is a name alone, of no file and of no config; those are named.
    """
    if path.exists() or path.parent not in (Path(), Path("configs")):
        return path
    file = folder() / path.with_suffix(".toml").name
    if path.suffix in ("", ".toml") and file.is_file():
        return file
    if path == Path(path.stem):
        message = f"config must be a file or one of {', '.join(shipped())}"
        raise FileNotFoundError(errno.ENOENT, message, str(path))
    return path
