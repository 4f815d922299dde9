"""The cases of a run, what came out of them, and the table, record and pictures of that."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter

from matplotlib.figure import Figure
from rich.text import Text

from megaopt.commands.bench import report
from megaopt.commands.bench.equality import Check
from megaopt.commands.bench.measure import Record
from megaopt.commands.bench.modes import MODES
from megaopt.commands.bench.report import Columns
from megaopt.commands.bench.sets import HOST, SETS, TensorSet
from megaopt.commands.bench.subjects import PEERS, Subject
from megaopt.commands.console import coloured
from megaopt.commands.toml_tables import require

TITLE = (
    "the step against a same-run copy: bytes moved and held a parameter, ms on the device, "
    "wall ms, wall ms with new gradients, MiB of scratch"
)
TIMES = ("step", "wall", "wall_moved")
GAP = 0.95
"""Above a group of bars, for its heading."""


@dataclass(frozen=True)
class BenchCase:
    """One measurement: a set of tensors, and the optimizer that steps them."""

    tensors: TensorSet
    subject: Subject

    @property
    def name(self) -> str:
        """The name in tables and records, "A/bf16"."""
        return f"{self.tensors.name}/{self.subject.name}"


def select(
    sets: tuple[str, ...] = (), only: tuple[str, ...] = (), peers: Sequence[Subject] = ()
) -> list[BenchCase]:
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
    peer_names = {*only, *(name for mode in modes for name in mode.against)}
    chosen = [peer for peer in peers if not only or peer.name in peer_names]
    cases = [
        BenchCase(tensor_set, subject)
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


def record_of(
    case: BenchCase, figures: Record | None, problem: str | None = None, check: Check | None = None
) -> Record:
    """The record of a case; its bytes are counted where it was measured, else declared.

    Args:
        case: What was measured.
        figures: Only of a case of ours whose bits are those promised.
        problem: Why there are no figures.
        check: What the bits were compared with; None for a peer.
    """
    subject = case.subject
    record: Record = {
        "case": case.name,
        "set": case.tensors.name,
        "ours" if subject.is_ours else "peer": subject.name,
        "description": subject.description,
        "bytes_per_parameter": subject.bytes_per_parameter,
        "problem": problem,
    }
    if subject.is_ours:
        record["contract"] = subject.contract
        if subject.recipe is not None:
            record |= {"scaling": subject.recipe.scaling, "direct": subject.recipe.direct}
        record["checked_against"] = check.against if check else None
        equal = None if check is None or check.against is None else check.difference is None
        record["equal"] = equal
    if figures is not None:
        record |= figures
        record["bytes_per_parameter"] = figures["bytes"] / figures["elements"]
    return record


def add_ratios(cases: Sequence[Record]) -> None:
    """Adds to a mode's case the times, over its own, of the peers that the mode is against.

    They are of the same set in the same run: above 1, ours is faster.
    """
    peers = {(c["set"], c["peer"]): c for c in cases if "peer" in c and report.is_timed(c)}
    for case in cases:
        if "ours" in case and report.is_timed(case):
            names = MODES[case["ours"]].against
            timed_peers = {n: peers[case["set"], n] for n in names if (case["set"], n) in peers}
            case["times_faster_than"] = [
                {"peer": name, **{kind: peer[f"{kind}_ms"] / case[f"{kind}_ms"] for kind in TIMES}}
                for name, peer in timed_peers.items()
            ]


def _bits(case: Record) -> str | Text:
    if "peer" in case:
        return ""
    if case["equal"] is False:
        return coloured("red", "differ")
    if case["checked_against"] is None:
        return "unchecked"
    return "✓ reference" if case["checked_against"] == "reference" else "✓ peer"


def _held(case: Record) -> str:
    return f"{case['held_bytes'] / case['elements']:.4g}" if report.is_timed(case) else ""


def _against(case: Record) -> str:
    return "\n".join(
        f"{ratio['peer']} {' / '.join(f'{ratio[kind]:.2f}x' for kind in TIMES)}"
        for ratio in case.get("times_faster_than", ())
    )


NAMED: Columns = {
    "case": itemgetter("case"),
    "bits": _bits,
    ">B/param": lambda case: f"{case['bytes_per_parameter']:.4g}",
    ">held": _held,
}
TIMED: Columns = {
    **report.MS,
    ">of copy": lambda case: f"{case['percent_of_copy']:.1f}%",
    **report.WALL,
    ">new grads": lambda case: f"{case['wall_moved_ms']:.3f}",
    **report.LAUNCHES,
    "against: ours faster, ms / wall / new grads": _against,
}


def draw(record: Record) -> dict[str, Callable[[], Figure]]:
    """Functions that draw percentages of a same-run copy as bars: speed_<set>.png of each set."""
    return {f"speed_{name}.png": partial(_draw_set, record, name) for name in record["sets"]}


def _draw_set(record: Record, name: str) -> Figure:
    """Neighbours with one description stand together under it."""
    cases = [case for case in record["cases"] if case["set"] == name]
    rows, headings = _rows(cases)
    height = rows[-1] + 1
    title = f"{name}, {record['environment']['gpu']}: {record['sets'][name]}"
    figure = report.make_figure(title, (10, 1.5 + 0.24 * height))
    axes = figure.subplots()
    speeds = [case.get("percent_of_copy", 0.0) for case in cases]
    # notes stand in one column, right of the line and of the longest bar
    column = 3 + max(100.0, *speeds)
    labels = [f"{c.get('ours') or c['peer']} ({c['bytes_per_parameter']:.4g} B)" for c in cases]
    are_ours, notes = ["ours" in case for case in cases], list(map(_note, cases))
    report.draw_bars(axes, rows, list(zip(labels, speeds, are_ours, notes, strict=True)), column)
    axes.axvline(100, color=report.FLOOR, linewidth=1, linestyle="--")
    for row, heading in headings:
        axes.text(1, row, heading, va="center", fontsize=8, color="#555555", style="italic")
    axes.set_ylim(height - 0.4, -0.6)
    axes.set_xlim(0, column + 55)
    axes.set_xticks(range(0, 101, 20))
    axes.set_xlabel("bytes that the step must move / time, in percent of a same-run copy")
    kinds = report.KINDS
    figure.legend(handles=kinds, loc="outside lower right", ncols=2, fontsize=8, frameon=False)
    return figure


def _rows(cases: Sequence[Record]) -> tuple[list[float], list[tuple[float, str]]]:
    """Return the place of each bar from the top, and of each heading with its text."""
    rows: list[float] = []
    headings = []
    row, previous = -1.0, ""
    for case in cases:
        row += 1
        if case["description"] != previous:
            headings.append((row + 0.15, case["description"]))
            row += GAP
        rows.append(row)
        previous = case["description"]
    return rows, headings


def _note(case: Record) -> str:
    if not report.is_timed(case):
        return "no speed: see record.json"
    times = f"{case['step_ms']:.3g} ms, wall {case['wall_ms']:.3g} ms"
    unchecked = "ours" in case and case["checked_against"] is None
    return f"{case['percent_of_copy']:.0f}%  {times}{', bits unchecked' if unchecked else ''}"
