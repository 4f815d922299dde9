"""`megaopt bench`: checks every case of ours, then times it beside other libraries' optimizers."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from rich.table import Table
from rich.text import Text

from megaopt.kernels import native
from megaopt.lab.bench import report
from megaopt.lab.bench.equality import Check, check
from megaopt.lab.bench.measure import Copy, Record, measure, nothing, time_steps
from megaopt.lab.bench.modes import MODES
from megaopt.lab.bench.report import Bar, BenchRun, Columns
from megaopt.lab.bench.sets import HOST, SETS, TensorSet
from megaopt.lab.bench.subjects import PEERS, Subject
from megaopt.lab.console import coloured, make_table
from megaopt.lab.toml_tables import require

TITLE = (
    "the step against a same-run copy: bytes moved and held a parameter, ms on the device, "
    "wall ms, wall ms with new gradients, MiB of scratch"
)
TIMES = ("step", "wall", "wall_moved")
CHECKED_ELEMENTS = 2**20
HOST_COUNTS = (16, 148, 291, 723, 4000)
"""The tensors of a small model, GPT-2, Llama-3.1-8B, Llama-3.1-70B, and a mixture of experts."""
HOST_ELEMENTS = 1024
"""The elements of each tensor: so few that the device is done before the host."""
WARM_UP, HOST_STEPS = 20, 100
"""After three steps of a fresh process the host still took 0.48 ms where it took 0.33 later."""
HOST_MODE, HOST_PEER = MODES["bf16"], PEERS["torch-fused-bf16"]


def main(
    *,
    out: Path = Path("out/bench"),
    sets: tuple[str, ...] = (),
    only: tuple[str, ...] = (),
    peers: bool = True,
) -> int:
    """Time the optimizer step, and other libraries', beside a copy of its bytes, on a CUDA GPU.

    Args:
        out: Folder for the record and the pictures.
        sets: Sets of tensors to time: A, B, C, llama70b-64, moe64, gpt2, host; all by default.
        only: Forms to time, as bf16 or blocks, with their peers; all by default. Any other word
            shows the list of names.
        peers: Time the other libraries' optimizers that are installed.

    Returns:
        0 when every case of ours was measured, 1 when one was refused.

    Raises:
        ConfigError: An unknown name, or no CUDA GPU on which the kernels run.
        SourceError: A wrong MEGAOPT_COMMIT.
        OSError: The record or a picture cannot be written.
    """
    selection = select(sets, only, tuple(PEERS.values()) if peers else ())
    report.require_gpu("bench")
    bench = BenchRun(out)
    subjects = [case.subject for case in selection]
    skipped = {subject.package: reason for subject in subjects if (reason := subject.why_not())}
    bench.skip(skipped.values())
    device = torch.device("cuda", torch.cuda.current_device())
    copy = Copy(device)
    cases = [case for case in selection if case.subject.package not in skipped]
    timed = []
    for case in cases:
        measure_case = partial(run, case, device, copy)
        timed.append(bench.case(case.name, case.subject.description, measure_case))
    add_ratios(timed)
    peers_timed = [case.subject for case in cases if not case.subject.is_ours]
    libraries = {subject.package: subject.version() for subject in peers_timed}
    bench.record |= {"libraries": dict(sorted(libraries.items())), "skipped": skipped}
    bench.record["sets"] = {case.tensors.name: case.tensors.description for case in cases}
    bench.record["cases"] = timed
    tables = [report.table_of(TITLE, timed, NAMED, TIMED)] if timed else []
    # where it is asked for, or nothing is
    if HOST in sets or not (sets or only):
        host = bench.record["host"] = measure_host(device)
        tables.append(host_table(host["cases"]))
    pictures = {
        f"speed_{name}.png": partial(draw, bench.record, name) for name in bench.record["sets"]
    }
    bench.end(tables, pictures)
    return 0 if all(report.is_timed(case) for case in timed if "ours" in case) else 1


# --- the cases of a run, and what came out of them


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
    report.require_names("sets", sets, (*SETS, HOST), least=0)
    report.require_names("only", only, (*MODES, *PEERS), least=0)
    modes = [mode for mode in MODES.values() if mode.name in (only or MODES)]
    last_mode = {name: mode.name for mode in modes for name in mode.against}
    chosen = [peer for peer in peers if not only or peer.name in {*only, *last_mode}]
    in_order: list[Subject] = []
    for mode in modes:
        in_order += [mode, *(peer for peer in chosen if last_mode.get(peer.name) == mode.name)]
    in_order += [peer for peer in chosen if peer.name not in last_mode]
    pairs = product((SETS[name] for name in SETS if name in (sets or SETS)), in_order)
    cases = [BenchCase(s, subject) for s, subject in pairs if subject.weight is None or s.shapes]
    if not cases and only and in_order and {*sets} != {HOST}:
        allowed = ", ".join(tensor_set.name for tensor_set in SETS.values() if tensor_set.shapes)
        require(False, "sets", [*sets], f"of {allowed}, which have matrices for fp8 weights")
    return cases


def run(case: BenchCase, device: torch.device, copy: Copy) -> Record:
    """Measure a case; one of ours only where a smaller instance of it has the promised bits."""
    subject, checked = case.subject, None
    backend: dict[str, Any] = {"backend": "triton"} if subject.is_ours else {}
    try:
        if subject.is_ours:
            checked = check(subject, case.tensors.shrunk(CHECKED_ELEMENTS), device)
            if checked.difference is not None:
                problem = f"differs from {checked.against}: {checked.difference}"
                return record_of(case, None, problem, checked)
        figures = measure(subject.instance(case.tensors, device, **backend), copy)
        return record_of(case, figures, None, checked)
    except torch.OutOfMemoryError as error:
        return record_of(case, None, f"out of memory: {error}")
    except Exception as error:
        if subject.is_ours:
            raise
        # another library fails in its own way; the run goes on
        return record_of(case, None, f"{type(error).__name__}: {error}")


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


# --- table and pictures


def _bits(case: Record) -> str | Text:
    if "peer" in case:
        return ""
    if case["equal"] is False:
        return coloured("red", "differ")
    if case["checked_against"] is None:
        return "unchecked"
    return "✓ reference" if case["checked_against"] == "reference" else "✓ peer"


NAMED: Columns = {
    "case": itemgetter("case"),
    "bits": _bits,
    ">B/param": lambda case: f"{case['bytes_per_parameter']:.4g}",
    ">held": lambda case: (
        f"{case['held_bytes'] / case['elements']:.4g}" if report.is_timed(case) else ""
    ),
}
TIMED: Columns = {
    **report.MS,
    ">of copy": lambda case: f"{case['percent_of_copy']:.1f}%",
    **report.WALL,
    ">new grads": lambda case: f"{case['wall_moved_ms']:.3f}",
    **report.LAUNCHES,
    "against: ours faster, ms / wall / new grads": lambda case: "\n".join(
        f"{ratio['peer']} {' / '.join(f'{ratio[kind]:.2f}x' for kind in TIMES)}"
        for ratio in case.get("times_faster_than", ())
    ),
}


def draw(record: Record, name: str) -> Figure:
    """Percentages of a same-run copy as bars, on one set; a field for each description."""
    cases = [case for case in record["cases"] if case["set"] == name]
    fields: dict[str, list[Bar]] = {}
    for case in cases:
        label = f"{case.get('ours') or case['peer']} ({case['bytes_per_parameter']:.4g} B)"
        note = "no speed: see record.json"
        if report.is_timed(case):
            times = f"{case['step_ms']:.3g} ms, wall {case['wall_ms']:.3g} ms"
            unchecked = "ours" in case and case["checked_against"] is None
            note = f"{case['percent_of_copy']:.0f}%  {times}{', bits unchecked' * unchecked}"
        bar = Bar(label, case.get("percent_of_copy", 0.0), "ours" in case, note)
        fields.setdefault(case["description"], []).append(bar)
    return report.draw_bars(
        f"{name}, {record['environment']['gpu']}: {record['sets'][name]}",
        "bytes that the step must move / time, in percent of a same-run copy",
        fields,
        floors=dict.fromkeys(fields, 100),
        # right of the line and of the longest bar
        limit=3 + max(100.0, *(case.get("percent_of_copy", 0.0) for case in cases)),
    )


# --- the host's share of a step: how long a call of step() keeps the thread that calls it


def measure_host(
    device: torch.device, counts: Sequence[int] = HOST_COUNTS, backend: str = "triton"
) -> Record:
    """Measure ours and torch's, one after the other, for each number of tensors.

    Ours has bf16 weights with fp32 masters, torch's AdamW(fused=True) bf16 weights alone.

    Returns:
        extension, whether it is there; elements of a tensor; repetitions; and cases, of each:
        tensors; ours_ms and torch_ms, median milliseconds of step() until it returns, the device
        idle before, not waited for after; ours_moved_ms and torch_moved_ms, the same with every
        gradient newly allocated before each step (not timed).

    Raises:
        RuntimeError: ours differs from the reference by a bit.
    """

    def tensors_of(count: int) -> TensorSet:
        return TensorSet(name=HOST, description=f"{count} tensors", sizes=(HOST_ELEMENTS,) * count)

    native.build()
    checked = check(HOST_MODE, tensors_of(min(counts)), device) if backend == "triton" else None
    if checked is not None and checked.difference is not None:
        raise RuntimeError(f"differs from {checked.against}: {checked.difference}")
    optimizers: Sequence[tuple[str, Subject, dict[str, Any]]]
    optimizers = (("ours", HOST_MODE, {"backend": backend}), ("torch", HOST_PEER, {}))
    cases = []
    for count in counts:
        figures: Record = {"tensors": count}
        for name, subject, options in optimizers:
            instance = subject.instance(tensors_of(count), device, **options)
            step = instance.optimizer.step
            for _ in range(WARM_UP):  # compiles, allocates the state, fills the plan
                step()
            for kind, prepare in (("", nothing), ("_moved", instance.move_gradients)):
                host = time_steps(step, HOST_STEPS, device, prepare=prepare).host
                figures[f"{name}{kind}_ms"] = statistics.median(host)
        cases.append(figures)
    extension = native.status().partition(":")[0]
    how = {"extension": extension, "elements": HOST_ELEMENTS, "repetitions": HOST_STEPS}
    return {**how, "cases": cases}


def host_table(figures: Sequence[Record]) -> Table:
    """Return the figures as a table for the terminal."""
    title = "the host's share: ms of step() until it returns, and torch AdamW(fused=True)'s"
    headings = (">tensors", ">ours", ">torch", ">faster", ">new grads: ours", ">torch", ">faster")
    table = make_table(title, headings)
    for figure in figures:
        pairs = [(figure[f"ours{kind}"], figure[f"torch{kind}"]) for kind in ("_ms", "_moved_ms")]
        cells = [[f"{o:.3f}", f"{t:.3f}", f"{t / o:.2f}x"] for o, t in pairs]
        table.add_row(f"{figure['tensors']:,}", *cells[0], *cells[1])
    return table
