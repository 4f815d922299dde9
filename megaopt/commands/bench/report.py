"""Asks for a GPU, tells of cases, writes and draws bars, for every bench."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from megaopt.commands.bench.measure import Record
from megaopt.commands.console import coloured, make_table, print_table
from megaopt.commands.regression.picture import save
from megaopt.commands.toml_tables import ConfigError
from megaopt.kernels.backends import BACKENDS
from megaopt.kernels.files import write_json

OURS, PEER, FAILED, FLOOR = "#3b6ea5", "#b4b4b4", "#a03030", "#222222"
Columns = Mapping[str, Callable[[Record], str | Text]]
"""Headings, and what makes the cells beneath."""
KINDS = (Patch(color=OURS, label="megaopt"), Patch(color=PEER, label="other libraries"))
"""Bars' colours in a legend."""


def require_gpu(command: str) -> None:
    """Raises ConfigError where the step cannot be timed, which says why."""
    reason: str | None = "needs a CUDA GPU, torch.cuda.is_available() is False here"
    if torch.cuda.is_available():
        reason = BACKENDS["triton"].why_not(torch.device("cuda"))
    if reason is not None:
        raise ConfigError(f"{command} cannot run here: {reason}")


def told(console: Console, name: str, what: str, run: Callable[[], Record]) -> Record:
    """The record that `run` makes of a case; the console hears of it, and why it has no speed."""
    # a line and no spinner: its thread would stand in the way of the host's times
    console.print(f"{name}: {what}", highlight=False)
    case = run()
    free_memory()
    if case["problem"]:
        console.print(f"{name}: no speed: {case['problem']}", style="red")
    return case


def free_memory() -> None:
    """Gives back what the optimizer of a case had on the GPU."""
    gc.collect()  # an optimizer can be part of a reference cycle
    torch.cuda.empty_cache()


def write(
    console: Console,
    out: Path,
    record: Mapping[str, Any],
    tables: Iterable[Table],
    pictures: Mapping[str, Callable[[], Figure]],
) -> None:
    """Prints tables, writes record.json and pictures into a folder, and says where they are."""
    # before the files are written, which may fail
    for table in tables:
        print_table(console, table)
    write_json(out / "record.json", record)
    for name, draw in pictures.items():
        save(out / name, draw())
    files = [out / name for name in ("record.json", *pictures)]
    console.print(", ".join(map(str, files)))


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


def is_timed(case: Record) -> bool:
    """Returns whether something was measured."""
    return "step_ms" in case


MS: Columns = {">ms": lambda case: f"{case['step_ms']:.3f}"}
OF_FLOOR: Columns = {">of floor": lambda case: f"{100 * case['floor_ms'] / case['step_ms']:.1f}%"}
WALL: Columns = {">wall": lambda case: f"{case['wall_ms']:.3f}"}
LAUNCHES: Columns = {
    ">launches": lambda case: str(case["launches"] or "unknown"),
    ">scratch MiB": lambda case: f"{case['scratch_bytes'] / 2**20:.1f}",
}


def make_figure(title: str, size: tuple[float, float], dpi: int = 150) -> Figure:
    """An empty picture with a title."""
    figure = Figure(figsize=size, dpi=dpi, layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=10, fontweight="bold")
    return figure


def draw_bars(
    axes: Axes,
    places: Sequence[float],
    bars: Sequence[tuple[str, float, bool, str]],
    column: float | None = None,
) -> None:
    """Horizontal bars, each beside a note.

    Args:
        axes: Where they are drawn.
        places: Of the bars, from the top.
        bars: Label, length (0: there is none), whether it is ours, and note.
        column: Where notes begin; None: behind their bars.
    """
    labels, lengths, are_ours, notes = zip(*bars, strict=True)
    axes.barh(places, lengths, color=[OURS if is_ours else PEER for is_ours in are_ours])
    axes.set_yticks(places, labels, fontsize=8)
    for place, length, note in zip(places, lengths, notes, strict=True):
        colour = "black" if length else FAILED
        at = length if column is None else column
        axes.text(at, place, note, va="center", fontsize=8, color=colour)
    axes.spines[["top", "right"]].set_visible(False)
