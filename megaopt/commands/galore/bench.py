"""`megaopt galore bench`: times of a step without a refresh, by kernel and rank, beside floors."""

from __future__ import annotations

import gc
import shlex
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
from megaopt.commands.bench.report import print_table
from megaopt.commands.bench.sets import TensorSet
from megaopt.commands.console import make_console
from megaopt.commands.galore.cases import (
    Result,
    floor_bytes,
    operations,
    record_of_result,
    select,
)
from megaopt.commands.galore.errors import WEIGHTS, Setup, measure_errors
from megaopt.commands.galore.picture import draw
from megaopt.commands.regression.outputs import make_folder
from megaopt.commands.toml_tables import ConfigError
from megaopt.files import write_json
from megaopt.galore import GaLoreAdamW
from megaopt.source import describe_source

__all__ = ["main", "run"]

NO_REFRESH = 2**30
"""Steps from refresh to refresh: more than are taken, but for the first one, which warms up."""


def main(
    out: Path,
    shapes: Sequence[tuple[int, int]],
    ranks: Sequence[int],
    kernels: Sequence[str],
    weights: Sequence[str],
) -> int:
    """Measures each case, prints and draws the times, and writes a record.

    Args:
        out: the folder for record.json and speed.png; made where missing.
        shapes: rows and columns of the matrices, each measured alone.
        ranks: of their projections.
        kernels: of errors.KERNELS.
        weights: of errors.WEIGHTS.

    Returns:
        0 where every case was measured, 1 where one was not.

    Raises:
        ConfigError: an argument is not allowed, or there is no CUDA GPU on which the kernels run.
        OSError: the record or the picture cannot be written.
    """
    if reason := why_not():
        raise ConfigError(f"galore bench cannot run here: {reason}")
    device, console = torch.device("cuda", torch.cuda.current_device()), make_console()
    try:
        setups = select(shapes, ranks, kernels, weights, device)
        source = describe_source()
    except ValueError as error:
        raise ConfigError(str(error)) from error
    make_folder(out)
    results = _measure_all(setups, device, console)
    print_table(console, table_of(results))
    described = environment.describe()
    record: dict[str, Any] = {"source": source, "environment": described}
    record["command"] = shlex.join(["megaopt", *sys.argv[1:]])
    record["cases"] = [record_of_result(result) for result in results]
    write_json(out / "record.json", record)
    draw(out / "speed.png", results, described["gpu"])
    console.print(f"{out / 'record.json'}, {out / 'speed.png'}", markup=False)
    return exits.DONE if all(result.figures for result in results) else exits.DIFFERENT


def _measure_all(setups: Sequence[Setup], device: torch.device, console: Console) -> list[Result]:
    copy, results = Copy(device), []
    for setup in setups:
        console.print(f"{_name(setup)}: {setup.kernel}", markup=False, highlight=False)
        result = run(setup, device, copy)
        gc.collect()  # an optimizer can be part of a reference cycle
        torch.cuda.empty_cache()
        if result.problem:
            console.print(f"no speed: {result.problem}", style="red", markup=False)
        results.append(result)
    return results


def _name(setup: Setup) -> str:
    return f"{setup.rows} x {setup.columns}, {setup.weights}, rank {setup.rank}"


def run(setup: Setup, device: torch.device, copy: Copy) -> Result:
    """Measures a case; only where its errors are within their bounds."""
    try:
        if wrong := [each.name for each in measure_errors(setup, device) if not each.holds]:
            return Result(setup, None, f"errors beyond their bounds: {', '.join(wrong)}")
        figures = measure(_instance(setup, device), copy)
        # the bench counts a projection as read and written, as moments are
        return Result(setup, replace(figures, bytes=floor_bytes(setup)))
    except torch.OutOfMemoryError as error:
        return Result(setup, None, f"out of memory: {error}")


def _instance(setup: Setup, device: torch.device) -> Instance:
    def make(parameters: Sequence[Parameter]) -> torch.optim.Optimizer:
        return GaLoreAdamW(
            parameters,
            **SHARED,
            rank=setup.rank,
            update_proj_gap=NO_REFRESH,
            proj_type=setup.proj_type,
            kernel=setup.kernel,
            dtype=None if setup.weights == "float32" else torch.float32,
        )

    tensors = TensorSet.of_shapes(_name(setup), _name(setup), [(setup.rows, setup.columns)])
    dtype = WEIGHTS[setup.weights]
    return build(make, tensors, dtype, device, weight=Parameter, seed=setup.seed)


def table_of(results: Sequence[Result]) -> Table:
    """Times, floors, and the speed of the two products, as a table for the terminal."""
    table = Table(
        title="GaLore's step without a refresh: ms on the device; floor: a copy of its bytes",
        title_justify="left",
    )
    for name in ("matrix", "weights"):
        table.add_column(name, no_wrap=True)
    table.add_column("rank", justify="right")
    table.add_column("kernel", no_wrap=True)
    for name in ("ms", "floor ms", "of floor", "TFLOP/s", "wall", "launches", "scratch MiB"):
        table.add_column(name, justify="right")
    previous = None
    for result in results:
        setup = result.setup
        place = (setup.rows, setup.columns, setup.weights)
        if previous not in (None, place):
            table.add_section()
        previous = place
        shape = f"{setup.rows} x {setup.columns}"
        table.add_row(shape, setup.weights, str(setup.rank), setup.kernel, *_cells(result))
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
