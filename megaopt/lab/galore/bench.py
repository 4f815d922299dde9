"""`megaopt galore bench`: times of a step without a refresh, by kernel and rank, beside floors."""

from __future__ import annotations

import importlib
import itertools
import sys
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from importlib.util import find_spec
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch.nn import Parameter

from megaopt.galore import GaLoreAdamW
from megaopt.kernels.files import write_json
from megaopt.kernels.galore.launch import why_not_kernel
from megaopt.kernels.galore.products import BF16, IEEE, PRECISIONS, TF32, fp32_products
from megaopt.kernels.galore.rule import RIGHT
from megaopt.kernels.refusals import refuse
from megaopt.lab import exits
from megaopt.lab.bench import report
from megaopt.lab.bench.instance import Instance, build
from megaopt.lab.bench.measure import MOST_STEPS, Copy, Record, measure, product_speed, with_rates
from megaopt.lab.bench.report import BenchRun, Columns
from megaopt.lab.bench.sets import TensorSet
from megaopt.lab.bench.subjects import SHARED
from megaopt.lab.galore.check import KERNELS, WEIGHTS, Setup, check_setup, measure_errors
from megaopt.lab.toml_tables import ConfigError, require

TITLE = (
    "GaLore's step without a refresh: ms on the device; floor: a copy of its bytes, or its "
    "operations at the speed of a large product"
)
NO_REFRESH = 2**30
"""Steps from refresh to refresh: more than are taken, but for the first one, which warms up."""
COLOURS = {
    "fused": "#7a2c6b", "grouped": "#2c7a4b", "hybrid": "#3b6ea5", "compiled": "#c98a2b",
    "torch": "#b4b4b4", "galore_torch": "#a53b3b",
}  # fmt: skip
COMPILED, GALORE_TORCH = "compiled", "galore_torch"
PACKAGES = ("galore_torch", "transformers")
"""The packages that galore_torch needs."""
BETAS, EPS = (0.9, 0.999), 1e-6


def main(
    *,
    M: int = 4096,
    N: tuple[int, ...] = (4096, 11008),
    ranks: tuple[int, ...] = (32, 64, 128, 256, 512),
    kernels: tuple[str, ...] = KERNELS,
    weights: tuple[str, ...] = tuple(WEIGHTS),
    grads: tuple[str, ...] = ("",),
    moments: tuple[str, ...] = ("float32",),
    precisions: tuple[str, ...] = PRECISIONS,
    matrices: tuple[int, ...] = (1,),
    matched: bool = False,
    allow_tf32: bool = False,
    repetitions: int = MOST_STEPS,
    seconds: int = 0,
    out: Path = Path("out/galore"),
) -> int:
    """Time GaLoreAdamW's step without a refresh, against a copy of the bytes that it must move.

    Args:
        M: Rows.
        N: Columns, of one shape each.
        ranks: Of the projections.
        kernels: torch, hybrid, grouped, fused; compiled, all of the pull request's reference by
            torch.compile; galore_torch, which has no masters, and moments in its weights' dtype.
        weights: float32, bfloat16 (with fp32 masters).
        grads: Dtypes of the gradients, float32, bfloat16; else as the weights'.
        moments: Dtypes of Adam's moments, float32, bfloat16.
        precisions: Of the two products: ieee, tf32, bf16.
        matrices: How many of a shape are stepped together.
        matched: Only bf16 products of bfloat16 weights, the others of float32 ones, and hybrid only
            with ieee, elsewhere the same as grouped.
        allow_tf32: As precisions tf32 alone.
        repetitions: Steps behind a time, at most.
        seconds: After so many no case is begun, and those that are left have no speed; 0: no limit.
            compiled comes last, which takes up to a minute to compile.
        out: Folder for the record and the picture.

    Returns:
        0 where every case was measured, 1 where one was not.

    Raises:
        ConfigError: an argument is empty or out of its range, or there is no CUDA GPU on which the
            kernels run.
        OSError: the record or the picture cannot be written.
    """
    report.require_gpu("galore bench")
    device = torch.device("cuda", torch.cuda.current_device())
    options: dict[str, Any] = {"N": [(M, columns) for columns in N], "weights": weights}
    options |= {"grads": [grad or None for grad in grads], "moments": moments}
    options |= {"precisions": (TF32,) if allow_tf32 else precisions, "matrices": matrices}
    options |= {"ranks": ranks, "kernels": kernels}
    try:
        setups = select(options, device, matched)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    bench, copy = BenchRun(out, seconds), Copy(device)
    speeds = {name: product_speed(device, name) for name in {setup.precision for setup in setups}}
    in_order = list(dict.fromkeys(setup.rank for setup in setups))
    measured: dict[Setup, Record] = {}
    for setup in sorted(setups, key=lambda e: (e.kernel == COMPILED, in_order.index(e.rank))):
        speed = speeds[setup.precision]
        case = partial(run, setup, device, copy, speed, repetitions)
        if bench.is_late():
            case = partial(record_of, setup, speed, None, f"not begun within {seconds} seconds")
        measured[setup] = bench.case(_name(setup), setup.kernel, case)
        bench.record["cases"] = [measured[key] for key in setups if key in measured]
        write_json(out / "record.json", bench.record)  # each time: a run may be ended
    table = report.table_of(TITLE, bench.record["cases"], NAMED, TIMED)
    bench.end([table], {"speed.png": partial(draw, bench.record)})
    return exits.DONE if all(map(report.is_timed, measured.values())) else exits.DIFFERENT


# --- the cases of a run


def select(
    options: Mapping[str, Sequence[Any]], device: torch.device, matched: bool = False
) -> list[Setup]:
    """The cases of a run; kernels stand beside each other.

    Args:
        options: the values of each option by its name; N: of (rows, columns).
        device: where they are to run.
        matched: as `main` has it.

    Raises:
        ValueError: there are none, or `check_setup` refuses one of them on the device.
    """
    for name, values in options.items():
        require(len(values) > 0, name, [], "at least one value")
    fields = ("weights", "grad", "moments", "precision", "matrices", "rank", "kernel")
    setups = [
        Setup(rows=rows, columns=columns, **dict(zip(fields, settings, strict=True)))
        for (rows, columns), *settings in itertools.product(*options.values())
    ]
    for setup in setups:
        check_case(setup, device)
    if matched:  # elsewhere hybrid is the same as grouped
        setups = [s for s in setups if s.kernel != "hybrid" or s.precision == IEEE]
        setups = list(filter(_is_plain, setups))
    return list(filter(is_there, setups))


def _is_plain(setup: Setup) -> bool:
    """Returns whether products have the dtype of the weights."""
    return (setup.precision == BF16) == (setup.weights == "bfloat16")


def is_there(setup: Setup) -> bool:
    """Returns whether there is such a case: galore_torch's products have its weights' dtype."""
    is_usual = setup.grad is None and setup.moments == "float32"
    return setup.kernel != GALORE_TORCH or (is_usual and _is_plain(setup))


def check_case(setup: Setup, device: torch.device) -> None:
    """Raises ValueError as `check_setup`, also for a peer that does not run on the device."""
    if setup.kernel not in PEERS:
        check_setup(setup, device)
        return
    check_setup(replace(setup, kernel="torch"), device)
    if setup.kernel == COMPILED:
        reason = why_not_kernel(COMPILED, device)
    else:
        missing = [name for name in PACKAGES if name not in sys.modules and find_spec(name) is None]
        reason = f"it needs {', '.join(missing)}" if missing else None
    if reason is not None:
        refuse("kernels", f"others than {setup.kernel} here", f"{setup.kernel}: {reason}")


def run(
    setup: Setup, device: torch.device, copy: Copy, speed: float, most: int = MOST_STEPS
) -> Record:
    """Measures a case; of ours only where its errors are within their bounds.

    Of fp32 moments, and gradients in the weights' dtype: other roundings have no bounds.
    """
    try:
        checked = replace(setup, grad=None, moments="float32")
        wrong = [] if setup.kernel in PEERS else measure_errors(checked, device)
        if beyond := [finding.name for finding in wrong if not finding.holds]:
            problem = f"errors beyond their bounds: {', '.join(beyond)}"
            return record_of(setup, speed, None, problem)
        return record_of(setup, speed, measure(instance_of(setup, device), copy, most))
    except torch.OutOfMemoryError as error:
        return record_of(setup, speed, None, f"out of memory: {error}")


def instance_of(setup: Setup, device: torch.device) -> Instance:
    """A case made real, whose optimizer makes no projection behind its first step."""

    def make(parameters: Sequence[Parameter]) -> Any:
        if setup.kernel in PEERS:
            return PEERS[setup.kernel](parameters, setup)
        return GaLoreAdamW(
            parameters,
            **SHARED,
            **setup.options,
            update_proj_gap=NO_REFRESH,
            dtype=None if setup.weights == "float32" else torch.float32,
            use_decoupled_grad=setup.grad is not None,
        )

    shapes = [(setup.rows, setup.columns)] * setup.matrices
    tensors, dtype = TensorSet.of_shapes(_name(setup), _name(setup), shapes), WEIGHTS[setup.weights]
    grads = WEIGHTS[setup.grad] if setup.grad else None
    return build(make, tensors, dtype, device, grad_dtype=grads, seed=setup.seed)


def record_of(
    setup: Setup, speed: float, figures: Record | None, problem: str | None = None
) -> Record:
    """The record of a case: its floor is a copy of the bytes that it must move, or its operations.

    Args:
        setup: What was measured.
        speed: Operations per second of a large product of torch's, of the same precision.
        figures: None where there are none.
        problem: Why there are none.
    """
    # a multiplication and an addition each, of both products
    operations = setup.matrices * 2 * 2 * setup.rows * setup.columns * setup.rank
    record = {**asdict(setup), "floor_bytes": floor_bytes(setup), "operations": operations}
    record["problem"] = problem
    if figures is not None:
        record |= with_rates(figures | {"bytes": floor_bytes(setup)})
        moving = floor_bytes(setup) / figures["copy_bandwidth"]
        record |= {"speed": speed, "floor_ms": 1e3 * max(moving, operations / speed)}
    return record


def floor_bytes(setup: Setup) -> int:
    """The bytes that a step without a refresh must move, of m rows, n columns and rank r.

    m * n * (gradient read + weight written + its fp32 value read [+ written, of a master])
    + 2 * 2 * L (two moments, read and written, in bytes) + 4 * K (the projection, read once),
    where on the right L is of m * r numbers and K = r * n, on the left L of r * n and K = m * r.
    The projected gradient and its direction are not counted: a step need not keep them in memory.
    All times the number of matrices.
    """
    shape, low_rank = (setup.rows, setup.columns), setup.low_rank
    size = WEIGHTS[setup.weights].itemsize
    master = 0 if setup.weights == "float32" else 4
    low = torch.Size(low_rank.low_shape(shape)).numel()
    projection = torch.Size(low_rank.projection_shape(shape)).numel()
    grad = WEIGHTS[setup.grad or setup.weights].itemsize
    element_bytes, moments = grad + size + 4 + master, WEIGHTS[setup.moments].itemsize * low
    bytes_of_one = setup.rows * setup.columns * element_bytes + 2 * 2 * moments + 4 * projection
    return setup.matrices * bytes_of_one


# --- table and picture


def _name(setup: Setup) -> str:
    case = asdict(setup)
    return f"{_matrix(case)}, {_dtypes(case)}, {setup.precision}, rank {setup.rank}"


def _matrix(case: Record) -> str:
    count = "" if case["matrices"] == 1 else f"{case['matrices']} of "
    return f"{count}{case['rows']} x {case['columns']}"


def _dtypes(case: Record) -> str:
    grads = f", {case['grad']} gradients" if case["grad"] else ""
    moments = f", {case['moments']} moments" if case["moments"] != "float32" else ""
    return f"{case['weights']}{grads}{moments}"


NAMED: Columns = {
    "matrix": _matrix,
    "weights": _dtypes,
    "precision": itemgetter("precision"),
    ">rank": lambda case: str(case["rank"]),
    "kernel": itemgetter("kernel"),
}
TIMED: Columns = {
    **report.MS,
    ">floor ms": lambda case: f"{case['floor_ms']:.3f}",
    **report.OF_FLOOR,
    ">TFLOP/s": lambda case: f"{case['operations'] / case['step_ms'] / 1e9:.1f}",
    **report.WALL,
    **report.LAUNCHES,
}


def draw(record: Record) -> Figure:
    """A field for each matrix and dtype, with a line for each kernel."""
    fields: dict[str, list[Record]] = {}
    for case in record["cases"]:
        title = f"{_matrix(case)}, {case['precision']}, weights {_dtypes(case)}"
        fields.setdefault(title, []).append(case)
    columns = min(2, len(fields))
    rows = -(-len(fields) // columns)
    title = f"GaLore's step without a refresh, {record['environment']['gpu']}"
    figure = report.make_figure(title, (1 + 4.5 * columns, 1 + 3.2 * rows))
    grid = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes, (title, cases) in zip(grid, fields.items(), strict=False):
        timed = sorted(filter(report.is_timed, cases), key=itemgetter("rank"))
        for kernel in dict.fromkeys(case["kernel"] for case in cases):
            times = {case["rank"]: case["step_ms"] for case in timed if case["kernel"] == kernel}
            style = {"marker": "o", "color": COLOURS[kernel], "label": kernel}
            axes.plot(list(times), list(times.values()), **style)
        floors = {case["rank"]: case["floor_ms"] for case in timed}
        style = {"color": report.FLOOR, "linewidth": 1, "linestyle": "--"}
        label = "a copy of the bytes, or the operations"
        axes.plot(list(floors), list(floors.values()), label=label, **style)
        axes.set_xscale("log", base=2)
        ranks = sorted({case["rank"] for case in cases})
        axes.set_xticks(ranks, [str(rank) for rank in ranks])
        axes.set_ylim(bottom=0)
        axes.set_title(title, loc="left", fontsize=9)
        axes.set_xlabel("rank")
        axes.set_ylabel("ms")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8)
    for axes in grid[len(fields) :]:
        axes.set_visible(False)
    return figure


# --- the peers: the pull request's reference, compiled, and galore_torch


def reference(
    grad: torch.Tensor,
    projection: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    param: torch.Tensor,
    weight: torch.Tensor,
    right: bool,
) -> None:
    """GaLore's pull request's reference: projection, Adam, back-projection and update, in place.

    Products are of the dtype of grad [m, n] and projection, rounded by torch's global settings;
    moments and param [m, n] are fp32. weight: param in 16 bits, or param itself.
    """
    low = (grad @ projection.mT if right else projection.mT @ grad).float()
    exp_avg.mul_(BETAS[0]).add_(low, alpha=1 - BETAS[0])
    exp_avg_sq.mul_(BETAS[1]).addcmul_(low, low, value=1 - BETAS[1])
    direction = (exp_avg / (exp_avg_sq.sqrt() + EPS)).to(projection.dtype)
    back = direction @ projection if right else projection @ direction
    param.add_(back, alpha=-SHARED["lr"])
    if weight is not param:
        weight.copy_(param)


class Compiled:
    """`reference` of each matrix, as the pull request compiles it: fullgraph, max-autotune."""

    def __init__(self, params: Sequence[Parameter], setup: Setup) -> None:
        """Makes states and projections, random ones: no step makes one."""
        self._setup = setup
        self.state: dict[Parameter, dict[str, Any]] = {param: {} for param in params}
        self._step = torch.compile(reference, fullgraph=True, mode="max-autotune", dynamic=False)
        dtype = torch.bfloat16 if setup.precision == BF16 else torch.float32
        for param in params:
            state, low = self.state[param], setup.low_rank.low_shape(param.shape)
            state["exp_avg"] = torch.zeros(low, device=param.device)
            state["exp_avg_sq"] = torch.zeros_like(state["exp_avg"])
            state["projection"] = _projection(setup, param, dtype)
            is_plain = param.dtype == torch.float32
            state["master_param"] = None if is_plain else param.detach().float()

    @torch.no_grad()
    def step(self) -> None:
        """Steps every matrix once."""
        with _torchs_products(self._setup), warnings.catch_warnings():
            # the compiler advises TF32 where fp32 was asked for
            warnings.filterwarnings("ignore", "TensorFloat32", UserWarning)
            for param, state in self.state.items():
                weight = param.detach()
                projection, master = state["projection"], state["master_param"]
                grad = getattr(param, self._setup.grad_name).to(projection.dtype)
                tensors = (grad, projection, state["exp_avg"], state["exp_avg_sq"])
                right = self._setup.low_rank.side == RIGHT
                self._step(*tensors, weight if master is None else master, weight, right)


class GaLoreTorch:
    """galore_torch's AdamW, without masters, in the dtype of the weights."""

    def __init__(self, params: Sequence[Parameter], setup: Setup) -> None:
        """Makes galore_torch's optimizer, and its projections, which would take an SVD each."""
        if "galore_torch" not in sys.modules:
            # the package's own __init__ wants more than AdamW does
            package, spec = types.ModuleType("galore_torch"), find_spec("galore_torch")
            assert spec is not None
            package.__path__, package.__spec__ = list(spec.submodule_search_locations or ()), spec
            sys.modules["galore_torch"] = package
        module = importlib.import_module("galore_torch.adamw")
        options: dict[str, Any] = {"rank": setup.rank, "update_proj_gap": NO_REFRESH, "scale": 1.0}
        options["proj_type"] = setup.proj_type
        group = {"params": list(params), **options}
        self._optimizer = module.AdamW([group], **SHARED, no_deprecation_warning=True)
        self.state, self._setup = self._optimizer.state, setup
        for param in params:
            projector = module.GaLoreProjector(**options)
            projector.ortho_matrix = _projection(setup, param, param.dtype)
            self.state[param] |= {"step": 1, "projector": projector}

    def step(self) -> None:
        """Steps every matrix once."""
        with _torchs_products(self._setup):
            self._optimizer.step()


PEERS: dict[str, Callable[..., Any]] = {COMPILED: Compiled, GALORE_TORCH: GaLoreTorch}


def _torchs_products(setup: Setup) -> Any:
    """Products of fp32 numbers in TF32, or not, by torch's own switch."""
    return fp32_products(TF32 if setup.precision == TF32 else IEEE)


def _projection(setup: Setup, param: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns a random projection, with rows or columns about as long as an orthonormal one's."""
    size = setup.low_rank.projection_shape(param.shape)
    return torch.randn(size, device=param.device).div_(max(size) ** 0.5).to(dtype)
