"""`megaopt galore test`: the errors of one step, and whether they are within their bounds."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from rich.console import Console
from rich.table import Table

from megaopt.commands import exits
from megaopt.commands.console import coloured, make_console, make_table, print_table
from megaopt.commands.galore.errors import Setup, TensorMeasurement, check_setup, measure_errors
from megaopt.commands.toml_tables import ConfigError, require

CALLED = {
    "exp_avg": "running mean (exp_avg)",
    "exp_avg_sq": "running variance (exp_avg_sq)",
    "update": "params",
    "update of the master": "params (master)",
    "update of the weight": "params (weight)",
}
"""Findings in the words of galore_torch's pull request."""
MOST = 5
"""Elements that --verbose shows of each tensor."""


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
    findings, console = measure_errors(setup, device), make_console()
    console.print(f"{_title(setup)}, on {device}", soft_wrap=True, highlight=False)
    print_table(console, _table(findings))
    console.print("relative err: the largest error, by the mean magnitude in fp64", highlight=False)
    for finding in findings:
        console.print(largest_error(finding), highlight=False)
    for finding in findings if verbose else ():
        for line in largest(finding):
            console.print(line, highlight=False)
    return _verdict(findings, console)


def current_device() -> torch.device:
    """The GPU at hand, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _title(setup: Setup) -> str:
    side, masters = setup.low_rank.side, "" if setup.weights == "float32" else ", fp32 masters"
    shape = f"{setup.rows} x {setup.columns}, rank {setup.rank} on the {side}"
    kernel = f"kernel {setup.kernel}, precision {setup.precision}"
    return f"{kernel}, {shape}, {setup.weights} weights{masters}, seed {setup.seed}"


def _table(findings: Sequence[TensorMeasurement]) -> Table:
    """Errors in parts of the norm of what fp64 gives."""
    headings = ("against fp64, by norm", ">error", ">torch's error", ">bound", ">error / bound", "")
    table = make_table(None, headings)
    for finding in findings:
        shares = [
            f"{part / finding.norm:.3g}" for part in (finding.error, finding.torchs, finding.bound)
        ]
        verdict = "within" if finding.holds else coloured("red", "BEYOND")
        table.add_row(finding.name, *shares, f"{_part_of_bound(finding):.3f}", verdict)
    return table


def largest_error(finding: TensorMeasurement) -> str:
    """A line with the largest error of an element, under the names of GaLore's kernels."""
    most = float((finding.value - finding.exact).abs().max())
    relative = most / finding.mean if finding.mean else most
    return f"{CALLED[finding.name]}: max err {most:.3g}, relative err {relative:.3g}"


def _part_of_bound(finding: TensorMeasurement) -> float:
    # numbers so few that plain torch makes no error
    return finding.error / finding.bound if finding.bound else float(not finding.holds)


def largest(finding: TensorMeasurement) -> list[str]:
    """A line for each of the elements furthest from fp64; NaN first."""
    away = (finding.value - finding.exact).abs().nan_to_num(nan=torch.inf).flatten()
    columns, lines = finding.value.shape[1], []
    for place in away.topk(min(MOST, away.numel())).indices.tolist():
        value, exact = (float(t.flatten()[place]) for t in (finding.value, finding.exact))
        row, column = divmod(place, columns)
        lines.append(
            f"{finding.name}[{row}, {column}]: {value:.9g}, in fp64 {exact:.9g}, "
            f"off by {abs(value - exact):.3g}"
        )
    return lines


def _verdict(findings: Sequence[TensorMeasurement], console: Console) -> int:
    beyond = [finding.name for finding in findings if not finding.holds]
    if beyond:
        line = f"beyond their bounds: {', '.join(beyond)}"
        console.print(line, soft_wrap=True, highlight=False, style="red")
        return exits.DIFFERENT
    console.print("all errors within their bounds", highlight=False, style="green")
    return exits.DONE
