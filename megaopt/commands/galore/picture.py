"""The picture of `megaopt galore bench`: milliseconds by rank, beside the floor."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megaopt.commands.galore.cases import Result
from megaopt.commands.regression.picture import save

__all__ = ["draw"]

COLOURS = {
    "grouped": "#2c7a4b", "hybrid": "#3b6ea5", "compiled": "#c98a2b", "torch": "#b4b4b4",
}  # fmt: skip
FLOOR = "#222222"


def draw(path: Path, results: Sequence[Result], hardware: str | None) -> None:
    """Draws a field for each matrix and dtype, with a line for each kernel.

    Args:
        path: the PNG file.
        results: of the run; those without figures leave a gap.
        hardware: the GPU's name, for the title.
    """
    fields = list(dict.fromkeys(map(_field, results)))
    columns = min(2, len(fields))
    rows = -(-len(fields) // columns)
    figure = Figure(figsize=(1 + 4.5 * columns, 1 + 3.2 * rows), dpi=150, layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes, field in zip(grid, fields, strict=False):
        _draw_field(axes, field, [result for result in results if _field(result) == field])
    for axes in grid[len(fields) :]:
        axes.set_visible(False)
    title = f"GaLore's step without a refresh, {hardware}"
    figure.suptitle(title, x=0.01, ha="left", fontsize=10, fontweight="bold")
    save(path, figure)


def _field(result: Result) -> str:
    setup = result.setup
    count = "" if setup.matrices == 1 else f"{setup.matrices} of "
    shape = f"{count}{setup.rows} x {setup.columns}"
    return f"{shape}, {setup.weights} weights, {setup.precision}"


def _draw_field(axes: Axes, title: str, results: Sequence[Result]) -> None:
    for kernel in dict.fromkeys(result.setup.kernel for result in results):
        own = [each for each in results if each.setup.kernel == kernel and each.figures]
        times = [each.figures.step_ms for each in own if each.figures]
        ranks = [each.setup.rank for each in own]
        axes.plot(ranks, times, marker="o", color=COLOURS[kernel], label=kernel)
    floors = {each.setup.rank: each.floor_ms for each in results if each.floor_ms is not None}
    label = "a copy of the bytes, or the operations"
    axes.plot(list(floors), list(floors.values()), "--", color=FLOOR, linewidth=1, label=label)
    axes.set_xscale("log", base=2)
    ranks = sorted({each.setup.rank for each in results})
    axes.set_xticks(ranks, [str(rank) for rank in ranks])
    axes.set_ylim(bottom=0)
    axes.set_title(title, loc="left", fontsize=9)
    axes.set_xlabel("rank")
    axes.set_ylabel("ms")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
