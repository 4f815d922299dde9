"""`megaopt galore test`: errors of GaLoreAdamW's step against fp64, beside those of plain torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import torch
from rich.console import Console
from torch.nn import Parameter

from megaopt.galore import PROJ_TYPES, GaLoreAdamW, side_of
from megaopt.kernels.galore.launch import why_not_kernel
from megaopt.kernels.galore.products import IEEE, PRECISIONS
from megaopt.kernels.galore.rule import LowRank, projected, projected_back
from megaopt.kernels.refusals import one_of, refuse
from megaopt.lab.bench.errors import VERDICTS, conclude, current_device, distance
from megaopt.lab.console import make_console, make_table, print_table
from megaopt.lab.toml_tables import ConfigError, require

CALLED = {
    "exp_avg": "running mean (exp_avg)",
    "exp_avg_sq": "running variance (exp_avg_sq)",
    "update": "params",
    "update of the master": "params (master)",
    "update of the weight": "params (weight)",
}
"""Findings in the words of galore_torch's pull request."""
SHOWN = 5
"""Elements that --verbose shows of each tensor."""
KERNELS = ("torch", "compiled", "hybrid", "grouped", "fused")
WEIGHTS = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""Dtypes of weights, gradients and moments, by name; bf16 weights have fp32 masters."""
MOST = 2**20
"""Rows or columns; of their square in fp64 torch can still say that there is no memory for it."""
FACTOR = 1.5
"""The largest quotient of an error and torch's own: two orders of the same roundings give errors
of about one size."""
GROUP: Mapping[str, Any] = MappingProxyType(
    # with this lr an update is about as large as the weight, so that rounding the weight hides none
    # of the update's own error
    {"lr": 0.3, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.1, "scale": 0.25}
)
UNIT = 2.0**-24
"""fp32's largest relative error of one rounding."""
STEP = 2
"""The step that is looked at: the first one, which makes the projection, gives it its moments."""

Tensors = dict[str, torch.Tensor]


def main(
    *,
    kernel: str = "hybrid",
    M: int = 4096,
    N: int = 4096,
    rank: int = 128,
    weights: str = "float32",
    precision: str = "ieee",
    proj_type: str = "std",
    seed: int = 0,
    tf32: bool = False,
    allow_tf32: bool = False,
    verbose: bool = False,
) -> int:
    """Step a random matrix with GaLoreAdamW; compare its errors against fp64 with torch's own.

    Args:
        kernel: torch, compiled, hybrid, grouped or fused; the last three run slowly without a GPU.
        M: Rows.
        N: Columns.
        rank: Of the projection; with rank * (M + N) < M * N.
        weights: float32, or bfloat16 with fp32 masters and bf16 gradients.
        precision: Of the two products: ieee, tf32 or bf16.
        proj_type: Side of the projection: std, reverse_std, right, left or auto.
        seed: Of weight, gradients and first projection.
        tf32: As precision tf32, and refused beside another but ieee, the default.
        allow_tf32: The same.
        verbose: Also print the largest errors, and where they are.

    Returns:
        0 where every error is within its bound, 1 otherwise.

    Raises:
        ConfigError: an argument is out of its range, or the kernel does not run here.
    """
    if tf32 or allow_tf32:
        name = "--tf32" if tf32 else "--allow_tf32"
        require(precision in ("ieee", "tf32"), "precision", precision, f"'tf32' beside {name}")
        precision = "tf32"
    setup = Setup(
        kernel=kernel, rows=M, columns=N, rank=rank, weights=weights, precision=precision,
        proj_type=proj_type, seed=seed,
    )  # fmt: skip
    device = current_device()
    try:
        check_setup(setup, device)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    console, side = make_console(), setup.low_rank.side
    findings = measure_errors(setup, device)
    masters = "" if weights == "float32" else ", fp32 masters"
    shape = f"{M} x {N}, rank {rank} on the {side}, {weights} weights{masters}, seed {seed}"
    title = f"kernel {kernel}, precision {precision}, {shape}, on {device}"
    console.print(title, soft_wrap=True, highlight=False)
    print_findings(console, findings, SHOWN if verbose else 0)
    beyond = [finding.name for finding in findings if not finding.holds]
    wrong = f"beyond their bounds: {', '.join(beyond)}" if beyond else None
    return conclude(console, wrong, "all errors within their bounds")


def print_findings(
    console: Console, findings: Sequence[TensorMeasurement], elements: int = 0
) -> None:
    """Prints errors in parts of the norm of what fp64 gives, and each tensor's largest error.

    elements: so many of those furthest from fp64 have a line, NaN first.
    """
    headings = ("against fp64, by norm", ">error", ">torch's error", ">bound", ">error / bound", "")
    table = make_table(None, headings)
    for finding in findings:
        parts = (finding.error, finding.torchs, finding.bound)
        # there may be numbers so few that plain torch makes no error
        of_bound = finding.error / finding.bound if finding.bound else float(not finding.holds)
        shares = [f"{part / finding.norm:.3g}" for part in parts]
        table.add_row(finding.name, *shares, f"{of_bound:.3f}", VERDICTS[finding.holds])
    print_table(console, table)
    lines = ["relative err: the largest error, by the mean magnitude in fp64"]
    for finding in findings:
        most = float((finding.value - finding.exact).abs().max())
        relative = most / finding.mean if finding.mean else most
        lines.append(f"{CALLED[finding.name]}: max err {most:.3g}, relative err {relative:.3g}")
    for finding in findings if elements else ():
        away = (finding.value - finding.exact).abs().nan_to_num(nan=torch.inf).flatten()
        for place in away.topk(min(elements, away.numel())).indices.tolist():
            value, exact = (float(t.flatten()[place]) for t in (finding.value, finding.exact))
            row, column = divmod(place, finding.value.shape[1])
            lines.append(
                f"{finding.name}[{row}, {column}]: {value:.9g}, in fp64 {exact:.9g}, "
                f"off by {abs(value - exact):.3g}"
            )
    for line in lines:
        console.print(line, highlight=False)


# --- the setup, and its errors


@dataclass(frozen=True, kw_only=True)
class Setup:
    """One step of a matrix [rows, columns], or of several."""

    kernel: str
    """One of KERNELS."""
    rows: int
    columns: int
    rank: int
    weights: str = "float32"
    """One of WEIGHTS."""
    proj_type: str = "std"
    precision: str = IEEE
    """One of products.PRECISIONS."""
    matrices: int = 1
    """The number of matrices of this shape that are stepped together."""
    seed: int = 0
    grad: str | None = None
    """Dtype of the gradient, one of WEIGHTS; None: the weight's."""
    moments: str = "float32"
    """Dtype of both moments, one of WEIGHTS."""

    @property
    def grad_name(self) -> str:
        """The attribute of parameters that has their gradient."""
        return "grad" if self.grad is None else "decoupled_grad"

    @property
    def low_rank(self) -> LowRank:
        """Side and rank."""
        return LowRank(side_of(self.proj_type, self.rows, self.columns), self.rank)

    @property
    def options(self) -> dict[str, Any]:
        """Returns the arguments of GaLoreAdamW that it sets."""
        names = ("rank", "proj_type", "kernel", "precision")
        moments = dict.fromkeys(("exp_avg_dtype", "exp_avg_sq_dtype"), self.moments)
        return {**{name: getattr(self, name) for name in names}, **moments}


@dataclass(frozen=True)
class TensorMeasurement:
    """One tensor that a step makes; norms are of the whole tensor, in its own unit."""

    name: str
    error: float
    """Norm of the difference from fp64."""
    torchs: float
    """The same of plain torch in the same dtypes."""
    bound: float
    """The largest error allowed."""
    norm: float
    """Norm of what fp64 gives."""
    mean: float
    """Mean magnitude in fp64; of an update that of the param that it makes."""
    value: torch.Tensor
    """fp64."""
    exact: torch.Tensor

    @property
    def holds(self) -> bool:
        """Returns whether the error is within its bound; a NaN is not."""
        return self.error <= self.bound


def check_setup(setup: Setup, device: torch.device) -> None:
    """Raises ValueError for a field out of its range, or a kernel that the device cannot run."""
    one_of("kernel", setup.kernel, KERNELS)
    one_of("weights", setup.weights, WEIGHTS)
    one_of("grads", setup.grad or setup.weights, WEIGHTS)
    one_of("moments", setup.moments, WEIGHTS)
    one_of("proj_type", setup.proj_type, PROJ_TYPES)
    one_of("precision", setup.precision, PRECISIONS)
    if setup.matrices < 1:
        refuse("matrices", "a whole number >= 1", setup.matrices)
    rows, columns = setup.rows, setup.columns
    for name, size in (("M", rows), ("N", columns)):
        if not 1 <= size <= MOST:
            refuse(name, f"a whole number from 1 to {MOST}", size)
    if not 0 <= setup.seed < 2**63:
        refuse("seed", "a whole number from 0 to 2**63 - 1", setup.seed)
    most = (rows * columns - 1) // (rows + columns)
    if most < 1:
        refuse("M and N", "so large that M + N < M * N: no rank saves anything", (rows, columns))
    if not 1 <= setup.rank <= most:
        why = f"for M={rows} and N={columns}: rank * (M + N) must be below M * N"
        refuse("rank", f"a whole number from 1 to {most} ({why})", setup.rank)
    reason = why_not_kernel(setup.kernel, device)
    if reason is not None:
        refuse("kernel", f"torch on {device} ({reason})", setup.kernel)


def measure_errors(setup: Setup, device: torch.device) -> list[TensorMeasurement]:
    """Takes two steps of random gradients on the device, and compares the second one's results."""
    dtype, shape = WEIGHTS[setup.weights], (setup.rows, setup.columns)
    values, *grads = (tensor.to(dtype) for tensor in _drawn(shape, setup.seed, device))
    weights = [Parameter(0.02 * values) for _ in range(setup.matrices)]
    masters = None if dtype == torch.float32 else torch.float32
    optimizer = GaLoreAdamW(weights, seed=setup.seed, dtype=masters, **setup.options, **GROUP)
    # the last matrix's tensors behind each step; param is the master, or a weight that is its own
    behind: list[Tensors] = []
    for grad in grads:
        for weight in weights:
            weight.grad = grad.clone()
        optimizer.step()
        state = optimizer.state[weights[-1]]
        master = state.get("master_param")
        tensors = {"weight": weights[-1], "param": weights[-1] if master is None else master}
        tensors |= {name: state[name] for name in ("exp_avg", "exp_avg_sq")}
        behind.append({name: tensor.detach().clone() for name, tensor in tensors.items()})
    before, after = behind
    inputs = {"grad": grads[-1], **before, "projection": state["projection"]}
    how, plain = (setup.low_rank.side, GROUP, STEP, setup.precision), list[Tensors]()
    for wide in (torch.float64, torch.float32):
        cast = {name: tensor.to(wide) for name, tensor in inputs.items() if name != "weight"}
        plain.append(plain_step(cast, cast.pop("projection"), *how))
    exact, torchs = plain
    derived = derived_update_error(exact, setup.rank)
    exact["weight"], torchs["weight"] = exact["param"], torchs["param"].to(dtype)
    return compared(before, after, exact, torchs, derived)


@lru_cache(maxsize=1)
def _drawn(shape: tuple[int, int], seed: int, device: torch.device) -> list[torch.Tensor]:
    """A weight's numbers and two gradients', fp32; drawn on a CPU, the same for every device."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(device) for _ in range(3)]


def compared(
    before: Tensors, after: Tensors, exact: Tensors, torchs: Tensors, derived: float
) -> list[TensorMeasurement]:
    """A finding for each moment and each update: the master's, and a 16-bit weight's.

    Args:
        before: exp_avg, exp_avg_sq, weight, param as they were.
        after: as the kernel left them.
        exact: the same in fp64.
        torchs: the same of plain torch.
        derived: what the bound of an update has beside torch's error: `derived_update_error`.
    """
    slots = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "update": "param"}
    if after["weight"].dtype != torch.float32:
        del slots["update"]
        slots |= {"update of the master": "param", "update of the weight": "weight"}
    findings = []
    for name, slot in slots.items():
        value, by_torch, truth = (tensors[slot].double() for tensors in (after, torchs, exact))
        # moments get nothing beside torch's error: the same products, and operations in the same
        # order
        bound, mean = 0.0, float(truth.abs().mean())
        if name not in after:
            old, bound = before[slot].double(), derived
            value, by_torch, truth = value - old, by_torch - old, truth - old
        torchs_error = distance([by_torch], [truth])
        errors = distance([value], [truth]), torchs_error, FACTOR * torchs_error + bound
        norm = float(truth.norm())
        findings.append(TensorMeasurement(name, *errors, norm, mean, value, truth))
    return findings


# --- the step in torch's own operations: of the kernels' twin it has only the products


def plain_step(
    before: Mapping[str, torch.Tensor],
    projection: torch.Tensor,
    side: str,
    group: Mapping[str, Any],
    step: int,
    precision: str = IEEE,
) -> dict[str, torch.Tensor]:
    """One step without a refresh, in the dtype of the tensors.

    Args:
        before: grad and param [m, n]; exp_avg and exp_avg_sq of the projected gradient's shape.
            All of one dtype, fp32 or fp64.
        projection: of that dtype; [rank, n] on the right, [m, rank] on the left.
        side: "right" or "left".
        group: lr, betas, eps, weight_decay, scale; with bias correction.
        step: the number of this update, from 1.
        precision: of the two products of fp32 numbers.

    Returns:
        The new exp_avg, exp_avg_sq and param; and step, what was taken from param before decay.
    """
    (beta1, beta2), grad = group["betas"], before["grad"]
    low = projected(grad, projection, side, precision)
    exp_avg = beta1 * before["exp_avg"] + (1 - beta1) * low
    exp_avg_sq = beta2 * before["exp_avg_sq"] + (1 - beta2) * (low * low)
    low = exp_avg / (exp_avg_sq.sqrt() + group["eps"])
    back = projected_back(low, projection, side, precision)
    correction = math.sqrt(1 - beta2**step) / (1 - beta1**step)
    taken = group["lr"] * group["scale"] * correction * back
    param = before["param"] - taken
    param = param - group["lr"] * group["weight_decay"] * param
    return {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq, "param": param, "step": taken}


def derived_update_error(exact: Mapping[str, torch.Tensor], rank: int) -> float:
    """The norm of an fp32 update's error in the mean, where the product's sums have any order.

    Args:
        exact: what `plain_step` gives in fp64.
        rank: numbers in a sum.
    """
    # Roundings are taken as independent, each evenly spread over at most +-UNIT of its result, so
    # that its square is UNIT**2 / 3 in the mean (Higham and Mary 2019, SIAM J. Sci. Comput. 41).
    # Of a sum of r products N_ij P_jk, of signs that are random as those of the gradient, a partial
    # sum's square is in the mean at most that of all products together, sum_j (N_ij P_jk)**2.
    # There are r partial sums in any order, and one more of that size for the products' own
    # roundings. Over the matrix that is (r + 1) |N|**2, as a row of P has the length 1; and as rows
    # are orthogonal, |N| = |N P|. Root, eps, quotient and step_size round four times more, relative
    # to the same. Then two subtractions round numbers of the weight's size.
    step, param = (float(exact[name].norm()) for name in ("step", "param"))
    return UNIT * math.sqrt(((rank + 5) * step**2 + 2 * param**2) / 3)
