"""What `megaopt galore bench` times, what came out, and what a step must move at least."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from megaopt.commands.bench.measure import Figures
from megaopt.commands.galore.errors import WEIGHTS, Setup, check_setup

__all__ = ["Result", "floor_bytes", "operations", "record_of_result", "select"]


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
    given = {"N": shapes, "ranks": ranks, "kernels": kernels, "weights": weights}
    given |= {"precisions": precisions, "matrices": matrices}
    if empty := [name for name, values in given.items() if not values]:
        raise ValueError(f"{empty[0]} must have at least one value, got none")
    setups = [
        Setup(
            kernel=kernel,
            rows=rows,
            columns=columns,
            rank=rank,
            weights=dtype,
            precision=precision,
            matrices=count,
        )
        for rows, columns in shapes
        for count in matrices
        for dtype in weights
        for precision in precisions
        for rank in ranks
        for kernel in kernels
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
        record |= asdict(figures) | {
            "launches": figures.launches,
            "copy_bandwidth": figures.copy_bandwidth,
            "speed": result.speed,
            "floor_ms": result.floor_ms,
        }
    return record
