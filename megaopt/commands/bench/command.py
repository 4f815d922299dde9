"""`megaopt bench`: checks every case of ours, then times it beside other libraries' optimizers."""

import gc
import shlex
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from rich.console import Console

from megaopt.commands import environment
from megaopt.commands.bench.cases import Case, select
from megaopt.commands.bench.equality import check
from megaopt.commands.bench.host import HostFigures, host_record, host_table, measure_host
from megaopt.commands.bench.instance import build
from megaopt.commands.bench.measure import Copy, Figures, measure
from megaopt.commands.bench.modes import Mode
from megaopt.commands.bench.peers import PEERS, Peer
from megaopt.commands.bench.picture import draw
from megaopt.commands.bench.report import record_of, table_of
from megaopt.commands.bench.results import Result
from megaopt.commands.bench.sets import HOST
from megaopt.commands.console import make_console, print_table
from megaopt.commands.regression.outputs import make_folder
from megaopt.commands.source import Source, describe_source, portable
from megaopt.commands.toml_tables import ConfigError
from megaopt.kernels.backends import BACKENDS
from megaopt.saving.files import write_json

__all__ = ["main", "why_not"]

CHECKED_ELEMENTS = 2**20


def main(
    out: Path = Path("out/bench"),
    sets: tuple[str, ...] = (),
    only: tuple[str, ...] = (),
    peers: bool = True,
) -> int:
    """Measure the optimizer step, ours and the peers', against a same-run copy on the device.

    Args:
        out: The folder for record.json and a speed_<set>.png for each set; made where missing.
        sets: Names of tensor sets (sets.SETS, and sets.HOST for the host's share); none means all.
        only: Names of modes (modes.MODES) and peers (peers.PEERS); none means all. A mode brings
            the peers that it is compared with.
        peers: Whether peers are measured, as far as they are installed.

    Returns:
        0 when every case of ours was measured, 1 when one was refused.

    Raises:
        ConfigError: An unknown name, a wrong MEGAOPT_COMMIT, or no CUDA GPU on which the kernels
            run.
        OSError: The record or a picture cannot be written.
    """
    console = make_console()
    try:
        wanted = select(sets, only, tuple(PEERS.values()) if peers else ())
        source = describe_source()
    except ValueError as error:
        raise ConfigError(str(error)) from error
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
        figures: Figures = measure(instance, copy)
        return Result(case, figures)
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
    described = environment.describe()
    peers = [r.case.subject for r in results if isinstance(r.case.subject, Peer)]
    libraries = {peer.package: peer.version() for peer in peers}
    command = shlex.join(portable(["megaopt", *sys.argv[1:]]))
    versions = dict(sorted(libraries.items()))
    record = record_of(results, source, described, command, versions, skipped)
    # before the files are written, which may fail
    if results:
        print_table(console, table_of(results))
    if host:
        record["host"] = host_record(host)
        print_table(console, host_table(host))
    write_json(out / "record.json", record)
    pictures = draw(out, results, described["gpu"])
    files = ", ".join(map(str, [out / "record.json", *pictures]))
    console.print(files, markup=False)
