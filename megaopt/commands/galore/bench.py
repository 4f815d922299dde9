"""`megaopt galore bench`: times of a step without a refresh, by kernel and rank, beside floors."""

from __future__ import annotations

import gc
import shlex
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.nn import Parameter

from megaopt.commands import environment, exits
from megaopt.commands.bench.command import why_not
from megaopt.commands.bench.instance import Instance, build
from megaopt.commands.bench.measure import Copy, measure
from megaopt.commands.bench.peers import SHARED
from megaopt.commands.bench.sets import TensorSet
from megaopt.commands.console import make_console, make_table, print_table
from megaopt.commands.galore.cases import (
    Result,
    operations,
    record_of_result,
    select,
)
from megaopt.commands.galore.errors import WEIGHTS, Setup, measure_errors
from megaopt.commands.galore.picture import draw
from megaopt.commands.regression.outputs import make_folder
from megaopt.commands.source import describe_source, portable
from megaopt.commands.toml_tables import ConfigError
from megaopt.galore import GaLoreAdamW
from megaopt.kernels.matrix.products import BF16, IEEE, product
from megaopt.saving.files import write_json

__all__ = ["main", "run"]

SIDE = 8192
"""Rows and columns of the matrices whose product says how fast the device multiplies."""
TITLE = (
    "GaLore's step without a refresh: ms on the device; floor: a copy of its bytes, or its "
    "operations at the speed of a large product"
)
HEADINGS = (
    "matrix", "weights", "precision", ">rank", "kernel", ">ms", ">floor ms", ">of floor",
    ">TFLOP/s", ">wall", ">launches", ">scratch MiB",
)  # fmt: skip
NO_REFRESH = 2**30
"""Steps from refresh to refresh: more than are taken, but for the first one, which warms up."""


def main(
    out: Path,
    shapes: Sequence[tuple[int, int]],
    ranks: Sequence[int],
    kernels: Sequence[str],
    weights: Sequence[str],
    precisions: Sequence[str] = (IEEE,),
    matrices: Sequence[int] = (1,),
) -> int:
    """Measures each case, prints and draws the times, and writes a record.

    Args:
        out: the folder for record.json and speed.png; made where missing.
        shapes: rows and columns of the matrices.
        ranks: of their projections.
        kernels: of errors.KERNELS.
        weights: of errors.WEIGHTS.
        precisions: of the two products.
        matrices: how many of a shape are stepped together.

    Returns:
        0 where every case was measured, 1 where one was not.

    Raises:
        ConfigError: an argument is empty or out of its range, or there is no CUDA GPU on which the
            kernels run.
        OSError: the record or the picture cannot be written.
    """
    if reason := why_not():
        raise ConfigError(f"galore bench cannot run here: {reason}")
    device, console = torch.device("cuda", torch.cuda.current_device()), make_console()
    try:
        setups = select(shapes, ranks, kernels, weights, precisions, matrices, device)
        source = describe_source()
    except ValueError as error:
        raise ConfigError(str(error)) from error
    make_folder(out)
    results = _measure_all(setups, device, console)
    print_table(console, table_of(results))
    described = environment.describe()
    record: dict[str, Any] = {"source": source, "environment": described}
    record["command"] = shlex.join(portable(["megaopt", *sys.argv[1:]]))
    record["cases"] = [record_of_result(result) for result in results]
    write_json(out / "record.json", record)
    draw(out / "speed.png", results, described["gpu"])
    console.print(f"{out / 'record.json'}, {out / 'speed.png'}", markup=False)
    return exits.DONE if all(result.figures for result in results) else exits.DIFFERENT


def _measure_all(setups: Sequence[Setup], device: torch.device, console: Console) -> list[Result]:
    copy, results = Copy(device), []
    speeds = {name: product_speed(device, name) for name in {each.precision for each in setups}}
    for setup in setups:
        console.print(f"{_name(setup)}: {setup.kernel}", markup=False, highlight=False)
        result = replace(run(setup, device, copy), speed=speeds[setup.precision])
        gc.collect()  # an optimizer can be part of a reference cycle
        torch.cuda.empty_cache()
        if result.problem:
            console.print(f"no speed: {result.problem}", style="red", markup=False)
        results.append(result)
    return results


def _name(setup: Setup) -> str:
    count = "" if setup.matrices == 1 else f"{setup.matrices} of "
    shape = f"{count}{setup.rows} x {setup.columns}"
    return f"{shape}, {setup.weights}, {setup.precision}, rank {setup.rank}"


def product_speed(device: torch.device, precision: str) -> float:
    """Operations per second of torch's product of square matrices: the median of three."""
    dtype = torch.bfloat16 if precision == BF16 else torch.float32
    some = torch.randn(SIDE, SIDE, device=device).to(dtype)
    product(some, some, precision)
    times: list[float] = []
    for _ in range(3):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
        events[0].record()
        product(some, some, precision)
        events[1].record()
        torch.cuda.synchronize()
        times.append(events[0].elapsed_time(events[1]))
    return float(2 * SIDE**3 / (1e-3 * statistics.median(times)))


def run(setup: Setup, device: torch.device, copy: Copy) -> Result:
    """Measures a case; only where its errors are within their bounds."""
    try:
        if wrong := [each.name for each in measure_errors(setup, device) if not each.holds]:
            return Result(setup, None, f"errors beyond their bounds: {', '.join(wrong)}")
        return Result(setup, measure(_instance(setup, device), copy))
    except torch.OutOfMemoryError as error:
        return Result(setup, None, f"out of memory: {error}")


def _instance(setup: Setup, device: torch.device) -> Instance:
    def make(parameters: Sequence[Parameter]) -> torch.optim.Optimizer:
        return GaLoreAdamW(
            parameters,
            **SHARED,
            **setup.options,
            update_proj_gap=NO_REFRESH,
            dtype=None if setup.weights == "float32" else torch.float32,
        )

    shapes = [(setup.rows, setup.columns)] * setup.matrices
    tensors = TensorSet.of_shapes(_name(setup), _name(setup), shapes)
    dtype = WEIGHTS[setup.weights]
    return build(make, tensors, dtype, device, weight=Parameter, seed=setup.seed)


def table_of(results: Sequence[Result]) -> Table:
    """Times, floors, and the speed of the two products, as a table for the terminal."""
    table = make_table(TITLE, HEADINGS)
    previous = None
    for result in results:
        setup = result.setup
        place = (setup.rows, setup.columns, setup.matrices, setup.weights)
        if previous not in (None, place):
            table.add_section()
        previous = place
        count = "" if setup.matrices == 1 else f"{setup.matrices} of "
        shape = f"{count}{setup.rows} x {setup.columns}"
        named = (shape, setup.weights, setup.precision, str(setup.rank), setup.kernel)
        table.add_row(*named, *_cells(result))
    return table


def _cells(result: Result) -> list[str]:
    figures, floor = result.figures, result.floor_ms
    if figures is None or floor is None:
        return ["[red]no speed[/red]", *[""] * 6]
    return [
        f"{figures.step_ms:.3f}",
        f"{floor:.3f}",
        f"{100 * floor / figures.step_ms:.1f}%",
        f"{operations(result.setup) / figures.step_ms / 1e9:.1f}",
        f"{figures.wall_ms:.3f}",
        "unknown" if figures.launches is None else str(figures.launches),
        f"{figures.scratch_bytes / 2**20:.1f}",
    ]
