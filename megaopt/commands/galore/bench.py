"""`megaopt galore bench`: times of a step without a refresh, by kernel and rank, beside floors."""

from __future__ import annotations

import gc
import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from torch.nn import Parameter

from megaopt.commands import exits
from megaopt.commands.bench.command import why_not
from megaopt.commands.bench.instance import Instance, build
from megaopt.commands.bench.measure import Copy, Figures, measure, record_of_figures
from megaopt.commands.bench.peers import SHARED
from megaopt.commands.bench.sets import TensorSet
from megaopt.commands.console import make_console, make_table, print_table
from megaopt.commands.galore.errors import (
    KERNELS,
    WEIGHTS,
    Setup,
    check_setup,
    measure_errors,
)
from megaopt.commands.regression.outputs import make_folder
from megaopt.commands.regression.picture import save
from megaopt.commands.source import describe_source, made_with
from megaopt.commands.toml_tables import ConfigError, require
from megaopt.galore import GaLoreAdamW
from megaopt.kernels.matrix.products import BF16, PRECISIONS, TF32, product
from megaopt.saving.files import write_json

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
COLOURS = {
    "grouped": "#2c7a4b", "hybrid": "#3b6ea5", "compiled": "#c98a2b", "torch": "#b4b4b4",
}  # fmt: skip
FLOOR = "#222222"


def floor_bytes(setup: Setup) -> int:
    """The bytes that a step without a refresh must move, of m rows, n columns and rank r.

    m * n * (gradient read + weight written + its fp32 value read [+ written, of a master])
    + 2 * 2 * 4 * L (two fp32 moments, read and written) + 4 * K (the projection, read once),
    where on the right L = m * r and K = r * n, on the left L = r * n and K = m * r. The projected
    gradient and its direction are not counted: a step need not keep them in memory. All times the
    number of matrices.
    """
    shape, low_rank = (setup.rows, setup.columns), setup.low_rank
    size = WEIGHTS[setup.weights].itemsize
    master = 0 if setup.weights == "float32" else 4
    low = torch.Size(low_rank.low_shape(shape)).numel()
    projection = torch.Size(low_rank.projection_shape(shape)).numel()
    each = size + size + 4 + master
    bytes_of_one = setup.rows * setup.columns * each + 2 * 2 * 4 * low + 4 * projection
    return setup.matrices * bytes_of_one


def operations(setup: Setup) -> int:
    """Floating-point operations of the two products, a multiplication and an addition each."""
    return setup.matrices * 2 * 2 * setup.rows * setup.columns * setup.rank


@dataclass(frozen=True)
class Result:
    """One case: figures, or why there are none."""

    setup: Setup
    figures: Figures | None
    """`bytes` are those of `floor_bytes`, counted on the tensors."""
    problem: str | None = None
    speed: float = math.inf
    """Operations per second of a large product of torch's, of the same precision."""

    @property
    def floor_ms(self) -> float | None:
        """Milliseconds of a copy of the bytes that the step must move, or of its operations."""
        figures = self.figures
        if figures is None:
            return None
        moving = figures.bytes / figures.copy_bandwidth
        return 1e3 * max(moving, operations(self.setup) / self.speed)


def select(
    shapes: Sequence[tuple[int, int]],
    ranks: Sequence[int],
    kernels: Sequence[str],
    weights: Sequence[str],
    precisions: Sequence[str],
    matrices: Sequence[int],
    device: torch.device,
) -> list[Setup]:
    """The cases of a run; kernels stand beside each other.

    Raises:
        ValueError: there are none, or `check_setup` refuses one of them on the device.
    """
    given: dict[str, Sequence[Any]] = {"N": shapes, "matrices": matrices, "weights": weights}
    given |= {"precisions": precisions, "ranks": ranks, "kernels": kernels}
    for name, values in given.items():
        require(len(values) > 0, name, [], "at least one value")
    fields = ("matrices", "weights", "precision", "rank", "kernel")
    setups = [
        Setup(rows=rows, columns=columns, **dict(zip(fields, own, strict=True)))
        for (rows, columns), *own in itertools.product(*given.values())
    ]
    for setup in setups:
        check_setup(setup, device)
    return setups


def record_of_result(result: Result) -> dict[str, Any]:
    """A case, ready for JSON."""
    setup, figures = result.setup, result.figures
    record = {**asdict(setup), "floor_bytes": floor_bytes(setup), "operations": operations(setup)}
    record["problem"] = result.problem
    if figures is not None:
        record |= record_of_figures(figures)
        record |= {"speed": result.speed, "floor_ms": result.floor_ms}
    return record


def main(
    *,
    M: int = 4096,
    N: tuple[int, ...] = (4096, 11008),
    ranks: tuple[int, ...] = (32, 64, 128, 256, 512),
    kernels: tuple[str, ...] = KERNELS,
    weights: tuple[str, ...] = tuple(WEIGHTS),
    precisions: tuple[str, ...] = PRECISIONS,
    matrices: tuple[int, ...] = (1,),
    allow_tf32: bool = False,
    out: Path = Path("out/galore"),
) -> int:
    """Time GaLoreAdamW's step without a refresh, against a copy of the bytes that it must move.

    Args:
        M: Rows.
        N: Columns, of one shape each.
        ranks: Of the projections.
        kernels: torch, compiled, hybrid, grouped.
        weights: float32, bfloat16 (with fp32 masters and bf16 gradients).
        precisions: Of the two products: ieee, tf32, bf16.
        matrices: How many of a shape are stepped together.
        allow_tf32: As precisions tf32 alone.
        out: Folder for the record and the picture.

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
    shapes, precisions = [(M, columns) for columns in N], (TF32,) if allow_tf32 else precisions
    try:
        setups = select(shapes, ranks, kernels, weights, precisions, matrices, device)
        source = describe_source()
    except ValueError as error:
        raise ConfigError(str(error)) from error
    make_folder(out)
    results = _measure_all(setups, device, console)
    print_table(console, table_of(results))
    record = made_with(source) | {"cases": [record_of_result(result) for result in results]}
    write_json(out / "record.json", record)
    draw(out / "speed.png", results, record["environment"]["gpu"])
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


def _matrix(setup: Setup) -> str:
    count = "" if setup.matrices == 1 else f"{setup.matrices} of "
    return f"{count}{setup.rows} x {setup.columns}"


def _name(setup: Setup) -> str:
    return f"{_matrix(setup)}, {setup.weights}, {setup.precision}, rank {setup.rank}"


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
        named = (_matrix(setup), setup.weights, setup.precision, str(setup.rank), setup.kernel)
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


def draw(path: Path, results: Sequence[Result], hardware: str | None) -> None:
    """Draws a field for each matrix and dtype into a PNG file, with a line for each kernel."""
    fields = list(dict.fromkeys(map(_field, results)))
    columns = min(2, len(fields))
    rows = -(-len(fields) // columns)
    figure = Figure(figsize=(1 + 4.5 * columns, 1 + 3.2 * rows), dpi=150, layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes, field in zip(grid, fields, strict=False):
        _draw_field(axes, field, [result for result in results if _field(result) == field])
    for axes in grid[len(fields) :]:
        axes.set_visible(False)
    title = f"GaLore's step without a refresh, {hardware}"
    figure.suptitle(title, x=0.01, ha="left", fontsize=10, fontweight="bold")
    save(path, figure)


def _field(result: Result) -> str:
    setup = result.setup
    return f"{_matrix(setup)}, {setup.weights} weights, {setup.precision}"


def _draw_field(axes: Axes, title: str, results: Sequence[Result]) -> None:
    for kernel in dict.fromkeys(result.setup.kernel for result in results):
        own = [each for each in results if each.setup.kernel == kernel and each.figures]
        times = [each.figures.step_ms for each in own if each.figures]
        ranks = [each.setup.rank for each in own]
        axes.plot(ranks, times, marker="o", color=COLOURS[kernel], label=kernel)
    floors = {each.setup.rank: each.floor_ms for each in results if each.floor_ms is not None}
    label = "a copy of the bytes, or the operations"
    axes.plot(list(floors), list(floors.values()), "--", color=FLOOR, linewidth=1, label=label)
    axes.set_xscale("log", base=2)
    ranks = sorted({each.setup.rank for each in results})
    axes.set_xticks(ranks, [str(rank) for rank in ranks])
    axes.set_ylim(bottom=0)
    axes.set_title(title, loc="left", fontsize=9)
    axes.set_xlabel("rank")
    axes.set_ylabel("ms")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
