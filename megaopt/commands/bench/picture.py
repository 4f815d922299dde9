"""The bench's picture: bars of ours and the peers against the roofline, a file for each set."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from megaopt.commands.bench.modes import Mode
from megaopt.commands.bench.results import Result
from megaopt.commands.regression.picture import save

__all__ = ["draw"]

OURS, PEER, FAILED = "#3b6ea5", "#b4b4b4", "#a03030"
BAR = 0.8
GAP = 0.95
"""Above a group of bars, for its heading."""


def draw(folder: Path, results: Sequence[Result], hardware: str | None) -> list[Path]:
    """Draw percentages of a same-run copy as horizontal bars, into speed_<set>.png for each set.

    Args:
        folder: Where the files go.
        results: Of the run; neighbours with one description stand together under it.
        hardware: The GPU's name, for the title.

    Returns:
        The files.
    """
    paths = []
    for name in dict.fromkeys(result.case.tensors.name for result in results):
        group = [result for result in results if result.case.tensors.name == name]
        paths.append(folder / f"speed_{name}.png")
        _draw_set(paths[-1], group, hardware)
    return paths


def _draw_set(path: Path, results: Sequence[Result], hardware: str | None) -> None:
    rows, headings = _rows(results)
    height = rows[-1] + 1
    figure = Figure(figsize=(10, 1.5 + 0.24 * height), dpi=150)
    figure.set_layout_engine("constrained")
    axes = figure.subplots()
    # notes stand in one column, right of the line and of the longest bar
    column = 3 + max([100.0, *(r.figures.percent_of_copy for r in results if r.figures)])
    _draw_bars(axes, results, rows, column)
    for row, heading in headings:
        axes.text(1, row, heading, va="center", fontsize=8, color="#555555", style="italic")
    axes.set_ylim(height - 0.4, -0.6)
    axes.set_xlim(0, column + 55)
    axes.set_xticks(range(0, 101, 20))
    axes.set_xlabel("bytes that the step must move / time, in percent of a same-run copy")
    tensors = results[0].case.tensors
    title = f"{tensors.name}, {hardware}: {tensors.description}"
    figure.suptitle(title, x=0.01, ha="left", fontsize=10, fontweight="bold")
    patches = [Patch(color=OURS, label="megaopt"), Patch(color=PEER, label="other libraries")]
    figure.legend(handles=patches, loc="outside lower right", ncols=2, fontsize=8, frameon=False)
    save(path, figure)


def _rows(results: Sequence[Result]) -> tuple[list[float], list[tuple[float, str]]]:
    """Return the place of each bar from the top, and of each heading with its text."""
    rows: list[float] = []
    headings = []
    row, previous = -1.0, ""
    for result in results:
        row += 1
        heading = result.case.subject.description
        if heading != previous:
            headings.append((row + 0.15, heading))
            row += GAP
        rows.append(row)
        previous = heading
    return rows, headings


def _draw_bars(axes: Axes, results: Sequence[Result], rows: Sequence[float], column: float) -> None:
    colours = [OURS if isinstance(r.case.subject, Mode) else PEER for r in results]
    speeds = [r.figures.percent_of_copy if r.figures else 0.0 for r in results]
    axes.barh(rows, speeds, color=colours, height=BAR)
    labels = [f"{r.case.subject.name} ({r.bytes_per_parameter:.4g} B)" for r in results]
    axes.set_yticks(rows, labels, fontsize=8)
    axes.axvline(100, color="#222222", linewidth=1, linestyle="--")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for row, result in zip(rows, results, strict=True):
        colour = "black" if result.figures else FAILED
        axes.text(column, row, _note(result), va="center", fontsize=8, color=colour)


def _note(result: Result) -> str:
    figures = result.figures
    if figures is None:
        return "no speed: see record.json"
    times = f"{figures.step_ms:.3g} ms, wall {figures.wall_ms:.3g} ms"
    unchecked = result.check is not None and result.check.against is None
    return f"{figures.percent_of_copy:.0f}%  {times}{', bits unchecked' if unchecked else ''}"
