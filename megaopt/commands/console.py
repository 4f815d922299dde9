"""Where the commands print: a terminal, or a pipe or file, where no line is cut or folded."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from rich.console import Console, JustifyMethod
from rich.measure import Measurement
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

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


def make_table(
    title: str | None, headings: Sequence[str], rows: Iterable[Iterable[str]] = ()
) -> Table:
    """A table whose long cells fold, without a head where all headings are empty.

    A heading ">ms" is of a column of numbers, which stand to the right.
    """
    table = Table(title=title, title_justify="left", show_header=any(headings))
    for heading in headings:
        justify: JustifyMethod = "right" if heading.startswith(">") else "left"
        table.add_column(heading.removeprefix(">"), justify=justify, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def print_table(console: Console, table: Table) -> None:
    """Prints a table whole: wider than the terminal where it needs more than that."""
    unlimited = console.options.update_width(UNLIMITED)
    needed = Measurement.get(console, unlimited, table).maximum
    console.width = max(console.width, needed)
    console.print(table)
