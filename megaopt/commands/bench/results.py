"""The cases of a run, what came out of them, and the table, record and pictures of that."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from matplotlib.figure import Figure
from rich.table import Table

from megaopt.commands.bench.equality import Check
from megaopt.commands.bench.measure import Figures, record_of_figures
from megaopt.commands.bench.modes import MODES
from megaopt.commands.bench.report import FLOOR, KINDS, draw_bars, make_figure
from megaopt.commands.bench.sets import HOST, SETS, TensorSet
from megaopt.commands.bench.subjects import PEERS, Subject
from megaopt.commands.console import make_table
from megaopt.commands.toml_tables import require

HEADINGS = (
    "case", "bits", ">B/param", ">held", ">ms", ">of copy", ">wall", ">new grads", ">launches",
    ">scratch", "against: ours faster, ms / wall / new grads",
)  # fmt: skip
GAP = 0.95
"""Above a group of bars, for its heading."""


@dataclass(frozen=True)
class Case:
    """One measurement: a set of tensors, and the optimizer that steps them."""

    tensors: TensorSet
    subject: Subject

    @property
    def name(self) -> str:
        """The name in tables and records, "A/bf16"."""
        return f"{self.tensors.name}/{self.subject.name}"


def select(
    sets: tuple[str, ...] = (), only: tuple[str, ...] = (), peers: Sequence[Subject] = ()
) -> list[Case]:
    """Return the cases of a run, set by set, a peer behind the modes that it is compared with.

    fp8 weights are measured on sets whose tensors have shapes. HOST has no cases. No names mean
    all; a mode brings those of the peers that it is against.

    Raises:
        ConfigError: A name is none of SETS, or none of MODES and PEERS; or all names are of fp8
            weights, and no set has shapes.
    """
    for parameter, names, table in (
        ("sets", sets, (*SETS, HOST)),
        ("only", only, (*MODES, *PEERS)),
    ):
        for name in names:
            require(name in table, parameter, name, f"of {', '.join(table)}")
    modes = [mode for mode in MODES.values() if mode.name in (only or MODES)]
    wanted = {*only, *(name for mode in modes for name in mode.against)}
    chosen = [peer for peer in peers if not only or peer.name in wanted]
    cases = [
        Case(tensor_set, subject)
        for tensor_set in SETS.values()
        if tensor_set.name in (sets or SETS)
        for subject in _in_order(modes, chosen)
        if subject.weight is None or tensor_set.shapes
    ]
    if not cases and only and modes + chosen and {*sets} != {HOST}:
        allowed = ", ".join(tensor_set.name for tensor_set in SETS.values() if tensor_set.shapes)
        require(False, "sets", [*sets], f"of {allowed}, which have matrices for fp8 weights")
    return cases


def _in_order(modes: Sequence[Subject], peers: Sequence[Subject]) -> Iterator[Subject]:
    last = {name: mode.name for mode in modes for name in mode.against}
    for mode in modes:
        yield mode
        yield from (peer for peer in peers if last.get(peer.name) == mode.name)
    yield from (peer for peer in peers if peer.name not in last)


@dataclass(frozen=True)
class Result:
    """One case: figures where its bits are those promised, otherwise why there are none."""

    case: Case
    figures: Figures | None
    problem: str | None = None
    check: Check | None = None
    """What the bits were compared with; None for a peer."""

    @property
    def bytes_per_parameter(self) -> float:
        """The bytes counted on the tensors where the case was measured, else the declared ones."""
        if self.figures is None:
            return self.case.subject.bytes_per_parameter
        return self.figures.bytes / self.figures.elements


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """A peer's times over ours, of the same set in the same run: above 1, ours is faster."""

    peer: str
    step: float
    wall: float
    wall_moved: float


def ratios(result: Result, results: Sequence[Result]) -> list[Ratio]:
    """Return a mode's ratios to the peers that it is against, as far as both were measured."""
    ours = result.figures
    if ours is None:
        return []
    measured = {
        other.case.subject.name: other.figures
        for other in results
        if other.case.tensors == result.case.tensors and other.figures
    }
    return [
        Ratio(
            peer=name,
            step=theirs.step_ms / ours.step_ms,
            wall=theirs.wall_ms / ours.wall_ms,
            wall_moved=theirs.wall_moved_ms / ours.wall_moved_ms,
        )
        for name in result.case.subject.against
        if (theirs := measured.get(name)) is not None
    ]


def table_of(results: Sequence[Result]) -> Table:
    """Return the figures as a table for the terminal."""
    title = (
        "the step against a same-run copy: bytes moved and held a parameter, ms on the device, "
        "wall ms, wall ms with new gradients, MiB of scratch"
    )
    table = make_table(title, HEADINGS)
    previous = None
    for result in results:
        if previous not in (None, result.case.tensors):
            table.add_section()
        previous = result.case.tensors
        table.add_row(result.case.name, _bits(result), *_cells(result), _against(result, results))
    return table


def _bits(result: Result) -> str:
    check = result.check
    if check is None:
        return ""
    if check.difference is not None:
        return "[red]differ[/red]"
    if check.against is None:
        return "unchecked"
    return "✓ reference" if check.against == "reference" else "✓ peer"


def _cells(result: Result) -> list[str]:
    figures, size = result.figures, f"{result.bytes_per_parameter:.4g}"
    if figures is None:
        return [size, "", "[red]no speed[/red]", *[""] * 5]
    return [
        size,
        f"{figures.held_bytes / figures.elements:.4g}",
        f"{figures.step_ms:.3f}",
        f"{figures.percent_of_copy:.1f}%",
        f"{figures.wall_ms:.3f}",
        f"{figures.wall_moved_ms:.3f}",
        "unknown" if figures.launches is None else str(figures.launches),
        f"{figures.scratch_bytes / 2**20:.1f}",
    ]


def _against(result: Result, results: Sequence[Result]) -> str:
    return "\n".join(
        f"{ratio.peer} {ratio.step:.2f}x / {ratio.wall:.2f}x / {ratio.wall_moved:.2f}x"
        for ratio in ratios(result, results)
    )


def record_of(results: Sequence[Result]) -> dict[str, Any]:
    """Return everything that was measured, ready for JSON."""
    return {
        "sets": {result.case.tensors.name: result.case.tensors.description for result in results},
        "cases": [_case_record(result, results) for result in results],
    }


def _case_record(result: Result, results: Sequence[Result]) -> dict[str, Any]:
    case, subject, figures, check = result.case, result.case.subject, result.figures, result.check
    record: dict[str, Any] = {
        "case": case.name,
        "set": case.tensors.name,
        "ours" if subject.is_ours else "peer": subject.name,
        "description": subject.description,
        "bytes_per_parameter": result.bytes_per_parameter,
        "problem": result.problem,
    }
    if subject.is_ours:
        record["contract"] = subject.contract
        if subject.recipe is not None:
            record |= {"scaling": subject.recipe.scaling, "direct": subject.recipe.direct}
        record["checked_against"] = check.against if check else None
        equal = None if check is None or check.against is None else check.difference is None
        record["equal"] = equal
    if figures is not None:
        record |= record_of_figures(figures)
        if subject.is_ours:
            record["times_faster_than"] = [asdict(ratio) for ratio in ratios(result, results)]
    return record


def draw(results: Sequence[Result], hardware: str | None) -> dict[str, Callable[[], Figure]]:
    """What draws percentages of a same-run copy as horizontal bars: speed_<set>.png of each set."""
    groups: dict[str, list[Result]] = {}
    for result in results:
        groups.setdefault(result.case.tensors.name, []).append(result)
    return {f"speed_{n}.png": partial(_draw_set, own, hardware) for n, own in groups.items()}


def _draw_set(results: Sequence[Result], hardware: str | None) -> Figure:
    """Neighbours with one description stand together under it."""
    rows, headings = _rows(results)
    height, tensors = rows[-1] + 1, results[0].case.tensors
    title = f"{tensors.name}, {hardware}: {tensors.description}"
    figure = make_figure(title, (10, 1.5 + 0.24 * height))
    axes = figure.subplots()
    speeds = [r.figures.percent_of_copy if r.figures else 0.0 for r in results]
    # notes stand in one column, right of the line and of the longest bar
    column = 3 + max(100.0, *speeds)
    names = [f"{r.case.subject.name} ({r.bytes_per_parameter:.4g} B)" for r in results]
    ours, notes = [r.case.subject.is_ours for r in results], list(map(_note, results))
    draw_bars(axes, rows, list(zip(names, speeds, ours, notes, strict=True)), column)
    axes.axvline(100, color=FLOOR, linewidth=1, linestyle="--")
    for row, heading in headings:
        axes.text(1, row, heading, va="center", fontsize=8, color="#555555", style="italic")
    axes.set_ylim(height - 0.4, -0.6)
    axes.set_xlim(0, column + 55)
    axes.set_xticks(range(0, 101, 20))
    axes.set_xlabel("bytes that the step must move / time, in percent of a same-run copy")
    figure.legend(handles=KINDS, loc="outside lower right", ncols=2, fontsize=8, frameon=False)
    return figure


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


def _note(result: Result) -> str:
    figures = result.figures
    if figures is None:
        return "no speed: see record.json"
    times = f"{figures.step_ms:.3g} ms, wall {figures.wall_ms:.3g} ms"
    unchecked = result.check is not None and result.check.against is None
    return f"{figures.percent_of_copy:.0f}%  {times}{', bits unchecked' if unchecked else ''}"
