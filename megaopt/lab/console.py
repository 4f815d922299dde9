"""The console of the commands: a terminal, or a pipe or file, where no line is cut or folded.

A text is shown as it is: names in square brackets are no markup, `:cat:` is no picture, and what is
no printable character is shown as its escape. Only `coloured` makes colours.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console, JustifyMethod
from rich.measure import Measurement
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from megaopt.recording.printable import short

UNLIMITED = 10_000
"""Columns of what is no terminal: more than any line has."""
EVERY = 15.0
"""Seconds between two lines of progress in a log."""


class _Console(Console):
    def render_str(self, text: str, **options: Any) -> Text:
        """A text on its way to the terminal, in cells of tables too."""
        return super().render_str(short(text), **{**options, "markup": False, "emoji": False})

    def on_broken_pipe(self) -> None:
        """Let the error through: rich would end the process with 1, which means a difference."""
        raise


def make_console() -> Console:
    """A console on stdout, as wide as the terminal; elsewhere as wide as its lines.

    The environment's COLUMNS goes first.
    """
    console = _Console(markup=False, emoji=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = UNLIMITED
    return console


class _Lines(Progress):
    """Progress where no bar can move, as in a log: a line now and then."""

    def __init__(self, console: Console) -> None:
        super().__init__(console=console, auto_refresh=False, disable=True)
        self._began = self._last_line = time.monotonic()

    def update(self, task_id: TaskID, **values: Any) -> None:
        """Changes a task, and says how far it is."""
        super().update(task_id, **values)
        self._tell(task_id)

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        """Counts steps of a task, and says how far it is."""
        super().advance(task_id, advance)
        self._tell(task_id)

    def _tell(self, task_id: TaskID) -> None:
        now = time.monotonic()
        if now - self._last_line < EVERY:
            return
        self._last_line = now
        task = next(task for task in self.tasks if task.id == task_id)
        line = f"{now - self._began:5.0f} s  {task.description}: {task.completed:.0f}"
        self.console.print(f"{line} of {task.total:.0f}", highlight=False, markup=False)


def step_progress(console: Console) -> Progress:
    """A progress bar over steps, with the time that has passed and the time left.

    Where the console is no terminal, a line every 15 seconds.
    """
    if not console.is_terminal:
        return _Lines(console)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
    times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    # steps may take seconds: the estimate is of the last five minutes, not of thirty seconds
    return Progress(*columns, *times, console=console, speed_estimate_period=300)


def coloured(colour: str, text: str, rest: str = "") -> Text:
    """A text in a colour, and what follows it without one."""
    return Text.assemble((short(text), colour), short(rest))


def make_table(
    title: str | None, headings: Sequence[str], rows: Iterable[Iterable[str | Text]] = ()
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
