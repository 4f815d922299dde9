"""`megaopt bench`: checks every case against the reference, then times it."""

import gc
import shlex
import sys
from pathlib import Path

import torch
from rich.console import Console

from megaopt import environment
from megaopt.bench.cases import Case, select
from megaopt.bench.equality import first_difference
from megaopt.bench.instance import build
from megaopt.bench.measure import Copy, measure
from megaopt.bench.report import Result, draw, record_of, table_of, write_record
from megaopt.kernels.backends import BACKENDS

__all__ = ["main"]

CHECKED_ELEMENTS = 2**20


def main(
    out: Path = Path("out/bench"), sets: tuple[str, ...] = (), only: tuple[str, ...] = ()
) -> int:
    """Measure the optimizer step against a same-run device-to-device copy.

    Args:
        out: The folder for record.json and speed.png; made where it is missing.
        sets: Names of tensor sets (cases.SETS); none means all.
        only: Names of modes (cases.MODES); none means all.

    Returns:
        0 when every case had the reference's bits and was measured, 1 when one was not, 2 for an
        unknown name, or without a CUDA GPU on which the kernels run.
    """
    console, errors = Console(), Console(stderr=True)
    try:
        cases = select(sets, only)
    except ValueError as error:
        errors.print(f"bench: {error}", markup=False)
        return 2
    if reason := _why_not():
        errors.print(f"bench: {reason}", markup=False)
        return 2
    results = _measure_all(cases, torch.device("cuda", torch.cuda.current_device()), console)
    _report(out, results, console)
    return 0 if all(result.figures for result in results) else 1


def _why_not() -> str | None:
    if not torch.cuda.is_available():
        return "needs a CUDA GPU, torch.cuda.is_available() is False here"
    return BACKENDS["triton"].why_not(torch.device("cuda"))


def _measure_all(cases: list[Case], device: torch.device, console: Console) -> list[Result]:
    copy = Copy(device)
    results = []
    for case in cases:
        # a line and no spinner: its thread would stand in the way of the host's times
        console.print(f"{case.name}: {case.mode.description}", markup=False)
        result = run(case, device, copy)
        gc.collect()  # an optimizer can be part of a reference cycle
        torch.cuda.empty_cache()
        if result.problem:
            console.print(f"{case.name}: no speed: {result.problem}", style="red", markup=False)
        results.append(result)
    return results


def run(case: Case, device: torch.device, copy: Copy) -> Result:
    """Check a case on a smaller instance, and measure it where every bit is the reference's."""
    try:
        sizes = case.tensors.shrunk(CHECKED_ELEMENTS)
        if found := first_difference(case.mode, sizes, device):
            return Result(case, None, f"the kernel differs from the reference: {found}")
        instance = build(case.mode, case.tensors.sizes, device, "triton")
        return Result(case, measure(instance, copy))
    except torch.OutOfMemoryError as error:
        return Result(case, None, f"out of memory: {error}")


def _report(out: Path, results: list[Result], console: Console) -> None:
    described = environment.describe()
    out.mkdir(parents=True, exist_ok=True)
    write_record(out / "record.json", record_of(results, described, shlex.join(sys.argv)))
    draw(out / "speed.png", results, described["gpu"])
    console.print(table_of(results))
    console.print(f"{out / 'record.json'}, {out / 'speed.png'}", markup=False)
