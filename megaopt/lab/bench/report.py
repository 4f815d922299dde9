"""One run of a bench: its checks, its cases one after another, its table, record and pictures."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from rich.table import Table
from rich.text import Text

from megaopt.kernels.backends import BACKENDS
from megaopt.kernels.files import write_json
from megaopt.lab.bench.measure import Record, free_memory
from megaopt.lab.console import coloured, make_console, make_table, print_table
from megaopt.lab.regression.picture import save
from megaopt.lab.source import describe_source, made_with, make_folder
from megaopt.lab.toml_tables import ConfigError, require

OURS, PEER, FAILED, FLOOR = "#3b6ea5", "#b4b4b4", "#a03030", "#222222"
Columns = Mapping[str, Callable[[Record], str | Text]]
"""Headings, and what makes the cells beneath."""
MS: Columns = {">ms": lambda case: f"{case['step_ms']:.3f}"}
OF_FLOOR: Columns = {">of floor": lambda case: f"{100 * case['floor_ms'] / case['step_ms']:.1f}%"}
WALL: Columns = {">wall": lambda case: f"{case['wall_ms']:.3f}"}
LAUNCHES: Columns = {
    ">launches": lambda case: str(case["launches"] or "unknown"),
    ">scratch MiB": lambda case: f"{case['scratch_bytes'] / 2**20:.1f}",
}


def require_gpu(command: str) -> None:
    """Raises ConfigError where the step cannot be timed, which says why."""
    reason: str | None = "needs a CUDA GPU, torch.cuda.is_available() is False here"
    if torch.cuda.is_available():
        reason = BACKENDS["triton"].why_not(torch.device("cuda"))
    if reason is not None:
        raise ConfigError(f"{command} cannot run here: {reason}")


def require_names(name: str, values: Sequence[str], table: Collection[str], least: int = 1) -> None:
    """Raises ConfigError where a value of an argument is not in the table, or there are too few."""
    allowed = f"of {', '.join(table)}"
    for value in values:
        require(value in table, name, value, allowed)
    require(len(values) >= least, name, None, allowed)


def require_counts(**values: int) -> None:
    """Raises ConfigError for an argument below 1."""
    for name, value in values.items():
        require(value >= 1, name, value, "a whole number >= 1")


class BenchRun:
    """A run of a bench: its record, and the time after which nothing more is begun.

    Args:
        out: Folder for the record and the pictures, which is made.
        seconds: From now on; 0: no limit.
    """

    def __init__(self, out: Path, seconds: float = 0) -> None:
        self.record: Record = made_with(describe_source())
        self.out, self.console = out, make_console()
        make_folder(out)
        self._last = time.monotonic() + (seconds or math.inf)

    def is_late(self) -> bool:
        """Returns whether the time is over."""
        return time.monotonic() > self._last

    def skip(self, reasons: Iterable[str]) -> None:
        """Tells what is left out, and why."""
        for reason in reasons:
            self.console.print(f"skipped: {reason}")

    def case(self, name: str, what: str, run: Callable[[], Record]) -> Record:
        """The record that `run` makes of a case; the console hears of it, and of a failure."""
        # a line and no spinner: its thread would stand in the way of the host's times
        self.console.print(f"{name}: {what}", highlight=False)
        case = run()
        free_memory()
        self.fail(name, case["problem"])
        return case

    def fail(self, name: str, problem: str | None) -> None:
        """Tells why a case has no speed, if it has none."""
        if problem:
            self.console.print(f"{name}: no speed: {problem}", style="red")

    def end(self, tables: Iterable[Table], pictures: Mapping[str, Callable[[], Figure]]) -> None:
        """Prints tables, writes record.json and pictures, and says where they are."""
        # before the files are written, which may fail
        for table in tables:
            print_table(self.console, table)
        write_json(self.out / "record.json", self.record)
        for name, draw in pictures.items():
            save(self.out / name, draw())
        files = [self.out / name for name in ("record.json", *pictures)]
        self.console.print(", ".join(map(str, files)))


def is_timed(case: Record) -> bool:
    """Returns whether something was measured."""
    return "step_ms" in case


def table_of(title: str, cases: Iterable[Record], named: Columns, timed: Columns) -> Table:
    """The table of a bench; a line parts the cases of different sets.

    Args:
        title: Of the table.
        cases: A row each.
        named: The first columns; where cases have no set, the first two cells stand for it.
        timed: Columns of cases that have a time, which is in the first of them.
    """
    table, previous = make_table(title, [*named, *timed]), None
    for case in cases:
        cells = [cell(case) for cell in named.values()]
        if previous not in (None, case.get("set", cells[:2])):
            table.add_section()
        previous = case.get("set", cells[:2])
        without = [coloured("red", "no speed"), *[""] * (len(timed) - 1)]
        figures = [cell(case) for cell in timed.values()] if is_timed(case) else without
        table.add_row(*cells, *figures)
    return table


def make_figure(title: str, size: tuple[float, float], dpi: int = 150) -> Figure:
    """An empty picture with a title."""
    figure = Figure(figsize=size, dpi=dpi, layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=10, fontweight="bold")
    return figure


class Bar(NamedTuple):
    """A horizontal bar."""

    label: str
    length: float
    """0: there is none."""
    is_ours: bool
    note: str


def draw_bars(
    title: str,
    label: str,
    fields: Mapping[str, Sequence[Bar]],
    *,
    floors: Mapping[str, float] | None = None,
    floor_label: str = "",
    limit: float | None = None,
) -> Figure:
    """A field of horizontal bars under each heading, the first one on top, beside their notes.

    Args:
        title: Of the picture.
        label: Of the lengths.
        fields: The bars by headings.
        floors: The place of a line, by headings.
        floor_label: What the line is.
        limit: The length that all fields show, with notes in a column behind it; None: each field
            shows its longest bar, and notes stand behind bars.
    """
    heights = [1 + len(bars) for bars in fields.values()] or [1]
    figure = make_figure(title, (10, 1.6 + 0.3 * sum(heights)), dpi=120)
    every_axes = figure.subplots(
        len(heights), 1, squeeze=False, height_ratios=heights, sharex=limit is not None
    )[:, 0]
    for axes, (heading, bars) in zip(every_axes, fields.items(), strict=False):
        places, lengths = range(len(bars)), [bar.length for bar in bars]
        axes.barh(places, lengths, color=[OURS if bar.is_ours else PEER for bar in bars])
        axes.set_yticks(places, [bar.label for bar in bars], fontsize=8)
        for place, bar in enumerate(bars):
            column = bar.length if limit is None else limit
            colour = "black" if bar.length else FAILED
            axes.text(column, place, bar.note, va="center", fontsize=8, color=colour)
        if floors and heading in floors:
            axes.axvline(floors[heading], color=FLOOR, linewidth=1.2, linestyle="--")
        axes.set_xlim(0, 1.15 * max(1e-9, *lengths) if limit is None else 1.5 * limit)
        axes.invert_yaxis()
        axes.set_title(heading, loc="left", fontsize=9, style="italic", color="#555555")
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    every_axes[-1].set_xlabel(label, fontsize=9)
    marks: list[Artist] = [
        Patch(color=OURS, label="megaopt"),
        Patch(color=PEER, label="other libraries"),
    ]
    if floor_label:
        marks.append(Line2D([], [], color=FLOOR, linestyle="--", label=floor_label))
    style: Record = {"fontsize": 8, "frameon": False}
    figure.legend(handles=marks, loc="outside lower center", ncols=3, **style)
    return figure
