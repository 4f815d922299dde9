"""What the bench leaves behind: a table, a record and a picture."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.table import Table

from megaopt.bench.cases import SETS, Case
from megaopt.bench.measure import Figures

__all__ = ["Result", "draw", "record_of", "table_of", "write_record"]


@dataclass(frozen=True)
class Result:
    """One case: figures where its bits are the reference's, otherwise why there are none."""

    case: Case
    figures: Figures | None
    problem: str | None = None


def table_of(results: Sequence[Result]) -> Table:
    """Return the figures as a table for the terminal."""
    table = Table(title="the step against a same-run copy", title_justify="left")
    table.add_column("case")
    names = ("B/param", "ms", "of copy", "wall ms", "wall ms, new grads", "launches", "scratch MiB")
    for heading in names:
        table.add_column(heading, justify="right")
    previous = None
    for result in results:
        if previous not in (None, result.case.tensors):
            table.add_section()
        previous = result.case.tensors
        table.add_row(result.case.name, *_cells(result))
    return table


def _cells(result: Result) -> list[str]:
    figures = result.figures
    if figures is None:
        return [str(result.case.mode.bytes_per_parameter), "[red]no speed[/red]"]
    return [
        f"{figures.bytes / figures.elements:g}",
        f"{figures.step_ms:.3f}",
        f"{figures.percent_of_copy:.1f}%",
        f"{figures.wall_ms:.3f}",
        f"{figures.wall_moved_ms:.3f}",
        "unknown" if figures.launches is None else str(figures.launches),
        f"{figures.scratch_bytes / 2**20:.1f}",
    ]


def record_of(
    results: Sequence[Result], environment: Mapping[str, str | None], command: str
) -> dict[str, Any]:
    """Return everything that was measured, and with what, ready for JSON."""
    return {
        "environment": dict(environment),
        "command": command,
        "sets": {result.case.tensors.name: result.case.tensors.description for result in results},
        "cases": [_case_record(result) for result in results],
    }


def _case_record(result: Result) -> dict[str, Any]:
    case, figures = result.case, result.figures
    record: dict[str, Any] = {
        "case": case.name,
        "set": case.tensors.name,
        "mode": case.mode.name,
        "description": case.mode.description,
        "bytes_per_parameter": case.mode.bytes_per_parameter,
        "equal_to_reference": figures is not None,
        "problem": result.problem,
    }
    if figures is not None:
        record |= asdict(figures) | {
            "launches": figures.launches,
            "copy_bandwidth": figures.copy_bandwidth,
            "percent_of_copy": figures.percent_of_copy,
        }
    return record


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    """Write a record as JSON."""
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def draw(path: Path, results: Sequence[Result], hardware: str | None) -> None:
    """Draw the percentages of copy as horizontal bars, one panel per set, into a PNG."""
    names = list(dict.fromkeys(result.case.tensors.name for result in results))
    groups = [[r for r in results if r.case.tensors.name == name] for name in names]
    rows = [len(group) for group in groups]
    # notes stand in one column, right of the line and of the longest bar
    column = 3 + max([100.0, *(r.figures.percent_of_copy for r in results if r.figures)])
    figure = Figure(figsize=(9, 0.9 + sum(0.34 * count + 0.75 for count in rows)), dpi=150)
    figure.set_layout_engine("constrained")
    panels = figure.subplots(len(groups), 1, sharex=True, squeeze=False, height_ratios=rows)[:, 0]
    for panel, name, group in zip(panels, names, groups, strict=True):
        _draw_set(panel, group, column)
        panel.set_title(f"{name}: {SETS[name].description}", loc="left", fontsize=10)
    panels[-1].set_xticks(range(0, 101, 20))
    panels[-1].set_xlabel("bytes that the step must move / time, in percent of a same-run copy")
    figure.suptitle(f"megaopt on {hardware}", x=0.01, ha="left", fontweight="bold")
    figure.savefig(path)


def _draw_set(panel: Axes, group: Sequence[Result], column: float) -> None:
    labels = [f"{r.case.mode.name} ({r.case.mode.bytes_per_parameter} B)" for r in group]
    speeds = [r.figures.percent_of_copy if r.figures else 0.0 for r in group]
    panel.barh(range(len(group)), speeds, color="#3b6ea5", height=0.7)
    panel.set_yticks(range(len(group)), labels)
    panel.invert_yaxis()
    panel.axvline(100, color="#222222", linewidth=1, linestyle="--")
    panel.set_xlim(0, column + 45)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)
    for row, result in enumerate(group):
        panel.text(column, row, _note(result), va="center", fontsize=8)


def _note(result: Result) -> str:
    figures = result.figures
    if figures is None:
        return "no speed: see record.json"
    times = f"{figures.step_ms:.2f} ms, wall {figures.wall_ms:.2f} ms"
    return f"{figures.percent_of_copy:.0f}%  {times}"
