"""`megaopt bench`: checks every case of ours, then times it beside other libraries' optimizers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from megaopt.commands.bench import report
from megaopt.commands.bench.equality import check
from megaopt.commands.bench.measure import Copy, Record, measure, wall_ms
from megaopt.commands.bench.modes import MODES
from megaopt.commands.bench.results import (
    NAMED,
    TIMED,
    TITLE,
    BenchCase,
    add_ratios,
    draw,
    record_of,
    select,
)
from megaopt.commands.bench.sets import HOST, TensorSet
from megaopt.commands.bench.subjects import PEERS, Subject
from megaopt.commands.console import make_console, make_table
from megaopt.commands.regression.outputs import make_folder
from megaopt.commands.source import describe_source, made_with
from megaopt.kernels import native

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
    console = make_console()
    selection = select(sets, only, tuple(PEERS.values()) if peers else ())
    source = describe_source()
    report.require_gpu("bench")
    make_folder(out)
    subjects = [case.subject for case in selection]
    skipped = {subject.package: reason for subject in subjects if (reason := subject.why_not())}
    for reason in skipped.values():
        console.print(f"skipped: {reason}")
    device = torch.device("cuda", torch.cuda.current_device())
    copy = Copy(device)
    cases = [case for case in selection if case.subject.package not in skipped]
    timed = [
        report.told(console, case.name, case.subject.description, partial(run, case, device, copy))
        for case in cases
    ]
    add_ratios(timed)
    peers_timed = [case.subject for case in cases if not case.subject.is_ours]
    libraries = {subject.package: subject.version() for subject in peers_timed}
    record = made_with(source) | {"libraries": dict(sorted(libraries.items())), "skipped": skipped}
    record |= {"sets": {case.tensors.name: case.tensors.description for case in cases}}
    record |= {"cases": timed}
    tables = [report.table_of(TITLE, timed, NAMED, TIMED)] if timed else []
    # where it is asked for, or nothing is
    if HOST in sets or not (sets or only):
        host = measure_host(device)
        record["host"] = host_record(host)
        tables.append(host_table(host))
    report.write(console, out, record, tables, draw(record))
    return 0 if all(report.is_timed(case) for case in timed if "ours" in case) else 1


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


# --- the host's share of a step: how long a call of step() keeps the thread that calls it


def measure_host(
    device: torch.device, counts: Sequence[int] = HOST_COUNTS, backend: str = "triton"
) -> list[Record]:
    """Measure ours and torch's, one after the other, for each number of tensors.

    Ours has bf16 weights with fp32 masters, torch's AdamW(fused=True) bf16 weights alone.

    Returns:
        tensors; ours_ms and torch_ms, median milliseconds of step() until it returns, the device
        idle before, not waited for after; ours_moved_ms and torch_moved_ms, the same with every
        gradient newly allocated before each step (not timed).

    Raises:
        RuntimeError: ours differs from the reference by a bit.
    """
    native.build()
    checked = check(HOST_MODE, tensors_of(min(counts)), device) if backend == "triton" else None
    if checked is not None and checked.difference is not None:
        raise RuntimeError(f"differs from {checked.against}: {checked.difference}")
    figures = []
    for count in counts:
        ours_ms, ours_moved_ms = _host_times(HOST_MODE, count, device, backend=backend)
        torch_ms, torch_moved_ms = _host_times(HOST_PEER, count, device)
        in_place = {"tensors": count, "ours_ms": ours_ms, "torch_ms": torch_ms}
        figures.append(
            in_place | {"ours_moved_ms": ours_moved_ms, "torch_moved_ms": torch_moved_ms}
        )
    return figures


def tensors_of(count: int) -> TensorSet:
    """Return a set of so many small tensors."""
    return TensorSet(name=HOST, description=f"{count} tensors", sizes=(HOST_ELEMENTS,) * count)


def _host_times(
    subject: Subject, count: int, device: torch.device, **more: Any
) -> tuple[float, float]:
    """Return the medians with the gradients in place, and with new ones."""
    instance = subject.instance(tensors_of(count), device, **more)
    step = instance.optimizer.step
    for _ in range(WARM_UP):  # compiles, allocates the state, fills the plan
        step()
    in_place = wall_ms(step, lambda: None, HOST_STEPS, waits=False)
    return in_place, wall_ms(step, instance.move_gradients, HOST_STEPS, waits=False)


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


def host_record(figures: Sequence[Record]) -> dict[str, Any]:
    """Return the figures ready for JSON, and whether the extension was there."""
    return {
        "extension": native.status().partition(":")[0],
        "elements": HOST_ELEMENTS,
        "repetitions": HOST_STEPS,
        "cases": [*figures],
    }
