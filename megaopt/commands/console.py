"""Where the commands print: a terminal, or a pipe or file, where no line is cut or folded."""

from __future__ import annotations

import os

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

__all__ = ["make_console", "step_progress"]

UNLIMITED = 10_000
"""Columns of what is no terminal: more than any line has."""


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Let the error through: rich would end the process with 1, which means a difference."""
        raise


def make_console() -> Console:
    """A console on stdout, as wide as the terminal; elsewhere as wide as its lines.

    The environment's COLUMNS goes first.
    """
    console = _Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = UNLIMITED
    return console


def step_progress(console: Console) -> Progress:
    """A progress bar over steps, with the time that has passed and the time left."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    # steps may take seconds: the estimate is of the last five minutes, not of thirty seconds
    return Progress(*columns, *times, console=console, speed_estimate_period=300)
