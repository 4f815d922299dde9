"""`megaopt bench`: checks every case of ours, then times it beside other libraries' optimizers."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.nn import Parameter

from megaopt.commands.bench.equality import check
from megaopt.commands.bench.instance import build
from megaopt.commands.bench.measure import Copy, measure, wall_ms
from megaopt.commands.bench.modes import MODES, Mode
from megaopt.commands.bench.peers import PEERS, SHARED, Peer
from megaopt.commands.bench.results import Case, Result, draw, record_of, select, table_of
from megaopt.commands.bench.sets import HOST, TensorSet
from megaopt.commands.console import make_console, make_table, print_table
from megaopt.commands.regression.outputs import make_folder
from megaopt.commands.source import Source, describe_source, made_with
from megaopt.commands.toml_tables import ConfigError
from megaopt.kernels import native
from megaopt.kernels.backends import BACKENDS
from megaopt.saving.files import write_json

CHECKED_ELEMENTS = 2**20
HOST_COUNTS = (16, 148, 291, 723, 4000)
"""The tensors of a small model, GPT-2, Llama-3.1-8B, Llama-3.1-70B, and a mixture of experts."""
HOST_ELEMENTS = 1024
"""The elements of each tensor: so few that the device is done before the host."""
WARM_UP, HOST_STEPS = 20, 100
"""After three steps of a fresh process the host still took 0.48 ms where it took 0.33 later."""
HOST_MODE = MODES["bf16"]


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
    wanted = select(sets, only, tuple(PEERS.values()) if peers else ())
    source = describe_source()
    if reason := why_not():
        raise ConfigError(f"bench cannot run here: {reason}")
    make_folder(out)
    cases, skipped = _installed(wanted)
    for reason in skipped.values():
        console.print(f"skipped: {reason}", markup=False)
    device = torch.device("cuda", torch.cuda.current_device())
    results = _measure_all(cases, device, console)
    # where it is asked for, or nothing is
    wants_host = HOST in sets or not (sets or only)
    host = measure_host(device) if wants_host else []
    _report(out, results, source, skipped, console, host)
    return 0 if all(r.figures for r in results if isinstance(r.case.subject, Mode)) else 1


def why_not() -> str | None:
    """Why the step cannot be timed here; None where it can."""
    if not torch.cuda.is_available():
        return "needs a CUDA GPU, torch.cuda.is_available() is False here"
    return BACKENDS["triton"].why_not(torch.device("cuda"))


def _installed(cases: Sequence[Case]) -> tuple[list[Case], dict[str, str]]:
    """Return the cases that can be run, and the libraries that the others lack with the reason."""
    peers = [case.subject for case in cases if isinstance(case.subject, Peer)]
    reasons = {peer.package: peer.why_not() for peer in peers}
    skipped = {library: reason for library, reason in reasons.items() if reason is not None}
    kept = [
        case
        for case in cases
        if isinstance(case.subject, Mode) or case.subject.package not in skipped
    ]
    return kept, skipped


def _measure_all(cases: list[Case], device: torch.device, console: Console) -> list[Result]:
    copy = Copy(device)
    results = []
    for case in cases:
        # a line and no spinner: its thread would stand in the way of the host's times
        console.print(f"{case.name}: {case.subject.description}", markup=False)
        result = run(case, device, copy)
        gc.collect()  # an optimizer can be part of a reference cycle
        torch.cuda.empty_cache()
        if result.problem:
            console.print(f"{case.name}: no speed: {result.problem}", style="red", markup=False)
        results.append(result)
    return results


def run(case: Case, device: torch.device, copy: Copy) -> Result:
    """Measure a case; one of ours only where a smaller instance of it has the promised bits."""
    if isinstance(case.subject, Peer):
        return _run_peer(case, case.subject, device, copy)
    return _run_ours(case, case.subject, device, copy)


def _run_ours(case: Case, mode: Mode, device: torch.device, copy: Copy) -> Result:
    try:
        checked = check(mode, case.tensors.shrunk(CHECKED_ELEMENTS), device)
        if checked.difference is not None:
            problem = f"differs from {checked.against}: {checked.difference}"
            return Result(case, None, problem, checked)
        make = partial(mode.optimizer, backend="triton")
        instance = build(make, case.tensors, mode.weight_dtype, device, weight=mode.weight)
        return Result(case, measure(instance, copy), None, checked)
    except torch.OutOfMemoryError as error:
        return Result(case, None, f"out of memory: {error}")


def _run_peer(case: Case, peer: Peer, device: torch.device, copy: Copy) -> Result:
    try:
        dtype, weight = peer.weight_dtype, peer.weight
        instance = build(peer.optimizer, case.tensors, dtype, device, weight=weight)
        return Result(case, measure(instance, copy))
    except Exception as error:  # another library fails in its own way; the run goes on
        return Result(case, None, f"{type(error).__name__}: {error}")


def _report(
    out: Path,
    results: list[Result],
    source: Source,
    skipped: dict[str, str],
    console: Console,
    host: Sequence[HostFigures] = (),
) -> None:
    peers = [r.case.subject for r in results if isinstance(r.case.subject, Peer)]
    libraries = {peer.package: peer.version() for peer in peers}
    record = made_with(source) | {"libraries": dict(sorted(libraries.items())), "skipped": skipped}
    record |= record_of(results)
    # before the files are written, which may fail
    if results:
        print_table(console, table_of(results))
    if host:
        record["host"] = host_record(host)
        print_table(console, host_table(host))
    write_json(out / "record.json", record)
    pictures = draw(out, results, record["environment"]["gpu"])
    files = ", ".join(map(str, [out / "record.json", *pictures]))
    console.print(files, markup=False)


# --- the host's share of a step: how long a call of step() keeps the thread that calls it


@dataclass(frozen=True, kw_only=True)
class HostFigures:
    """Median milliseconds of step() until it returns, the device idle before, not waited for after.

    Ours has bf16 weights with fp32 masters, torch's AdamW(fused=True) bf16 weights alone.
    """

    tensors: int
    ours_ms: float
    torch_ms: float
    ours_moved_ms: float
    """With every gradient newly allocated before each step (not timed)."""
    torch_moved_ms: float


def measure_host(
    device: torch.device, counts: Sequence[int] = HOST_COUNTS, backend: str = "triton"
) -> list[HostFigures]:
    """Measure ours and torch's, one after the other, for each number of tensors.

    Raises RuntimeError where ours differs from the reference by a bit.
    """
    native.build()
    checked = check(HOST_MODE, tensors_of(min(counts)), device) if backend == "triton" else None
    if checked is not None and checked.difference is not None:
        raise RuntimeError(f"differs from {checked.against}: {checked.difference}")
    return [_host_figures(count, device, backend) for count in counts]


def tensors_of(count: int) -> TensorSet:
    """Return a set of so many small tensors."""
    return TensorSet(name=HOST, description=f"{count} tensors", sizes=(HOST_ELEMENTS,) * count)


def _host_figures(count: int, device: torch.device, backend: str) -> HostFigures:
    ours = _host_times(partial(HOST_MODE.optimizer, backend=backend), count, device)
    theirs = _host_times(_torch_adamw, count, device)
    return HostFigures(
        tensors=count,
        ours_ms=ours[0],
        torch_ms=theirs[0],
        ours_moved_ms=ours[1],
        torch_moved_ms=theirs[1],
    )


def _torch_adamw(parameters: Sequence[Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(list(parameters), fused=True, **SHARED)


def _host_times(
    make: Callable[[Sequence[Parameter]], torch.optim.Optimizer], count: int, device: torch.device
) -> tuple[float, float]:
    """Return the medians with the gradients in place, and with new ones."""
    instance = build(make, tensors_of(count), torch.bfloat16, device)
    for _ in range(WARM_UP):  # compiles, allocates the state, fills the plan
        instance.optimizer.step()
    step, prepared = instance.optimizer.step, (lambda: None, instance.move_gradients)
    in_place, moved = (wall_ms(step, each, HOST_STEPS, waits=False) for each in prepared)
    return in_place, moved


def host_table(figures: Sequence[HostFigures]) -> Table:
    """Return the figures as a table for the terminal."""
    title = "the host's share: ms of step() until it returns, and torch AdamW(fused=True)'s"
    headings = (">tensors", ">ours", ">torch", ">faster", ">new grads: ours", ">torch", ">faster")
    table = make_table(title, headings)
    for each in figures:
        pairs = ((each.ours_ms, each.torch_ms), (each.ours_moved_ms, each.torch_moved_ms))
        cells = [[f"{o:.3f}", f"{t:.3f}", f"{t / o:.2f}x"] for o, t in pairs]
        table.add_row(f"{each.tensors:,}", *cells[0], *cells[1])
    return table


def host_record(figures: Sequence[HostFigures]) -> dict[str, Any]:
    """Return the figures ready for JSON, and whether the extension was there."""
    return {
        "extension": native.status().partition(":")[0],
        "elements": HOST_ELEMENTS,
        "repetitions": HOST_STEPS,
        "cases": [asdict(each) for each in figures],
    }
