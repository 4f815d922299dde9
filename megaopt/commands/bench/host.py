"""The host's share of a step: how long a call of step() keeps the thread that calls it."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from rich.table import Table
from torch.nn import Parameter

from megaopt.commands.bench.equality import check
from megaopt.commands.bench.instance import build
from megaopt.commands.bench.modes import MODES
from megaopt.commands.bench.peers import SHARED
from megaopt.commands.bench.sets import HOST, TensorSet
from megaopt.commands.console import make_table
from megaopt.state import native

__all__ = ["COUNTS", "HostFigures", "host_record", "host_table", "measure_host"]

COUNTS = (16, 148, 291, 723, 4000)
"""The tensors of a small model, GPT-2, Llama-3.1-8B, Llama-3.1-70B, and a mixture of experts."""
ELEMENTS = 1024
"""The elements of each tensor: so few that the device is done before the host."""
WARM_UP, STEPS = 20, 100
"""After three steps of a fresh process the host still took 0.48 ms where it took 0.33 later."""
MODE = MODES["bf16"]


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
    device: torch.device, counts: Sequence[int] = COUNTS, backend: str = "triton"
) -> list[HostFigures]:
    """Measure ours and torch's, one after the other, for each number of tensors.

    Raises RuntimeError where ours differs from the reference by a bit.
    """
    native.build()
    checked = check(MODE, tensors_of(min(counts)), device) if backend == "triton" else None
    if checked is not None and checked.difference is not None:
        raise RuntimeError(f"differs from {checked.against}: {checked.difference}")
    return [_figures(count, device, backend) for count in counts]


def tensors_of(count: int) -> TensorSet:
    """Return a set of so many small tensors."""
    return TensorSet(name=HOST, description=f"{count} tensors", sizes=(ELEMENTS,) * count)


def _figures(count: int, device: torch.device, backend: str) -> HostFigures:
    ours = _times(partial(MODE.optimizer, backend=backend), count, device)
    theirs = _times(_torch_adamw, count, device)
    return HostFigures(
        tensors=count,
        ours_ms=ours[0],
        torch_ms=theirs[0],
        ours_moved_ms=ours[1],
        torch_moved_ms=theirs[1],
    )


def _torch_adamw(parameters: Sequence[Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(list(parameters), fused=True, **SHARED)


def _times(
    make: Callable[[Sequence[Parameter]], torch.optim.Optimizer], count: int, device: torch.device
) -> tuple[float, float]:
    """Return the medians with the gradients in place, and with new ones."""
    instance = build(make, tensors_of(count), torch.bfloat16, device)
    for _ in range(WARM_UP):  # compiles, allocates the state, fills the plan
        instance.optimizer.step()
    return (
        _median(instance.optimizer.step, lambda: None, device),
        _median(instance.optimizer.step, instance.move_gradients, device),
    )


def _median(
    step: Callable[[], object], prepare: Callable[[], object], device: torch.device
) -> float:
    times = []
    for _ in range(STEPS):
        prepare()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


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
        "elements": ELEMENTS,
        "repetitions": STEPS,
        "cases": [asdict(each) for each in figures],
    }
