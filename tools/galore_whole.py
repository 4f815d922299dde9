"""GaLoreAdamW's step of all of Llama-7B's matrices, beside FusedAdam's and galore_torch's.

    python tools/galore_whole.py OUT.json

On a GPU that holds 104 GB (weights, gradients and FusedAdam's state), for about a minute; on a CPU
with tiny matrices, to see that it runs.
Times are of the device, which has work to do until the host has launched everything. A floor is the
time of a copy of the bytes that a step must move. OUT.json is written anew behind every case.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from device_figures import (
    DEVICE,
    GPU,
    WAIT,
    Record,
    cold_ms,
    copy_speed,
    free,
    graph_of,
    median_ms,
    peak_bytes,
    synchronize,
)
from galore_torch_peer import adamw, why_not
from torch.nn import Parameter

from megaopt import FusedAdam, GaLoreAdamW


@dataclass(frozen=True)
class Sizes:
    """Of a Llama and of its projections.

    `ranks` are those of single matrices, `many` how many of one shape are stepped together.
    """

    layers: int
    width: int
    inner: int
    rank: int
    ranks: tuple[int, ...]
    gap: int
    steps: int
    many: int

    @property
    def layer(self) -> list[tuple[int, int]]:
        """A layer's seven matrices."""
        wide, tall = (self.width, self.inner), (self.inner, self.width)
        return [(self.width, self.width)] * 4 + [tall] * 2 + [wide]


LLAMA = Sizes(32, 4096, 11008, 128, (32, 128, 256), gap=200, steps=200, many=16)
TINY = Sizes(1, 8, 16, 2, (2,), gap=2, steps=2, many=2)
SIZES = LLAMA if GPU else TINY
HYPER: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.01}
NEVER = 2**30
"""An update_proj_gap in which no projection is refreshed."""
KERNELS = ("grouped", "hybrid")
LIBRARIES = {
    "fp32 tf32": (torch.float32, "tf32"),
    "bf16": (torch.bfloat16, "bf16"),
    "fp32 ieee": (torch.float32, "ieee"),
}
"""Weights and precision of the steps beside galore_torch's."""
KINDS = {
    "bf16, fp32 master": (torch.bfloat16, "bf16", True),
    "fp32": (torch.float32, "tf32", False),
}
"""Weights, precision, and whether there is a master, of single matrices."""


# --- parameters and optimizers


def parameters(
    shapes: Iterable[tuple[int, int]], dtype: torch.dtype = torch.bfloat16
) -> list[Parameter]:
    """Random matrices of this dtype, with random gradients of the same."""
    found = []
    for shape in shapes:
        param = Parameter((0.02 * torch.randn(shape, device=DEVICE)).to(dtype))
        param.grad = torch.randn(shape, device=DEVICE, dtype=dtype)
        found.append(param)
    return found


def galore(params: list[Parameter], **options: Any) -> GaLoreAdamW:
    """Ours: without refreshes, with fp32 masters and products of bf16 unless options say more."""
    usual = {"rank": SIZES.rank, "update_proj_gap": NEVER, "scale": 0.25, "backend": "triton"}
    usual |= {"precision": "bf16", "dtype": torch.float32}
    return GaLoreAdamW(params, **HYPER, **(usual | options))


def stepped(params: list[Parameter], **options: Any) -> GaLoreAdamW:
    """The same, behind the step that made projections and one that compiled."""
    optimizer = galore(params, **options)
    optimizer.step()
    optimizer.step()
    return optimizer


def floor_ms(params: list[Parameter], speed: float, master: bool, rank: int) -> float:
    """Of a copy of what a step moves.

    The gradient, the weight written and the master, or the weight, both ways; two fp32 moments both
    ways, and the projection.
    """
    total = 0
    for param in params:
        each = param.element_size()
        total += param.numel() * (2 * each + (8 if master else each))
        total += rank * (16 * max(param.shape) + 4 * min(param.shape))
    return total / speed * 1e3


def elements(params: list[Parameter]) -> int:
    """Of all of them."""
    return sum(param.numel() for param in params)


# --- what is measured


def beside_galore_torch(record: Record, speed: float) -> None:
    """One matrix, stepped by galore_torch's AdamW and by all kernels of ours, without masters."""
    if why_not():
        record.found["galore_torch skipped"] = why_not()
        return
    shape = (SIZES.width, SIZES.inner)
    for name, (dtype, precision) in LIBRARIES.items():
        params = parameters([shape], dtype)
        theirs = peer_ms(params, precision == "tf32")
        ours = {}
        for kernel in ("torch", "hybrid", "grouped", *(["compiled"] if GPU else []), "auto"):
            optimizer = stepped(params, kernel=kernel, precision=precision, dtype=None)
            ours[f"{kernel}_ms"] = median_ms(optimizer.step)
        record.say(
            f"galore_torch {name}",
            shape=list(shape),
            galore_torch_ms=theirs,
            **ours,
            faster=theirs / min(ours.values()),
            auto_faster=theirs / ours["auto_ms"],
            floor_ms=floor_ms(params, speed, False, SIZES.rank),
        )
        free()


def peer_ms(params: list[Parameter], tf32: bool) -> float:
    """galore_torch's step; tf32: of products, by torch's own switch."""
    group = {"params": params, "rank": SIZES.rank, "update_proj_gap": NEVER}
    group |= {"scale": 0.25, "proj_type": "std"}
    optimizer = adamw().AdamW([group], **HYPER, no_deprecation_warning=True)
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = tf32
    try:
        optimizer.step()
        return median_ms(optimizer.step)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def llama(record: Record, speed: float) -> None:
    """All matrices: refreshes, state, graphs of a step; FusedAdam's beside it."""
    for kernel in KERNELS:  # compiles
        stepped(parameters(SIZES.layer), kernel=kernel)
    free()
    params = parameters(SIZES.layer * SIZES.layers)
    with_refreshes(record, params)
    free()
    found = {}
    for kernel in (*KERNELS, "auto"):
        optimizer = galore(params, kernel=kernel, capturable=True)
        optimizer.step()
        found[kernel] = median_ms(graph_of(optimizer), 7)
        del optimizer
        free()
    floor, least = floor_ms(params, speed, True, SIZES.rank), min(found.values())
    times = {f"{kernel}_ms": ms for kernel, ms in found.items()}
    counts = {"matrices": len(params), "rank": SIZES.rank}
    record.say("llama", **counts, floor_ms=floor, **times, of_floor=least / floor)
    adam = FusedAdam(params, **HYPER, dtype=torch.float32, capturable=True, backend="triton")
    adam.step()
    ms = median_ms(graph_of(adam), 7)
    record.say("fused_adam", ms=ms, ours_of_it=least / ms)


def with_refreshes(record: Record, params: list[Parameter]) -> None:
    """The first step, the state behind it, and steps of which each refreshes some matrices."""
    weights = sum(param.nbytes for param in params)
    optimizer = galore(params, kernel="grouped", update_proj_gap=SIZES.gap)
    synchronize()
    start = time.perf_counter()
    optimizer.step()
    synchronize()
    ms = 1e3 * (time.perf_counter() - start)
    energy = float(optimizer.state[params[0]]["captured_energy"])
    record.say("first step, all bases cold", ms=ms, energy=energy)
    say_state(record, optimizer, params, weights)
    times, walls = step_times(optimizer)
    scratch = peak_bytes(optimizer.step)
    part = scratch / weights
    record.say("scratch of a step with refreshes", bytes=scratch, part_of_weights=part)
    optimizer.param_groups[0]["update_proj_gap"] = NEVER
    for _ in params:  # the turn of parameter n is in step n
        optimizer.step()
    plain = median_ms(optimizer.step, 15, 10 * WAIT)
    workspace = peak_bytes(optimizer.step)
    record.say("workspace", bytes=workspace, part_of_weights=workspace / weights)
    mean = statistics.mean(times)
    record.say(
        "refresh",
        gap=SIZES.gap,
        plain_ms=plain,
        mean_ms=mean,
        worst_ms=max(times),
        amortised=mean / plain - 1,
        worst=max(times) / plain,
        host_ms=statistics.median(walls),
    )


def say_state(
    record: Record, optimizer: GaLoreAdamW, params: list[Parameter], weights: int
) -> None:
    """Bytes of the state, counted on tensors and by formula, and FusedAdam's beside them."""
    own = [value for state in optimizer.state.values() for value in state.values()]
    held = sum(value.nbytes for value in own if isinstance(value, torch.Tensor))
    count, rank = elements(params), SIZES.rank
    # master, two moments, projection, captured energy
    low = sum(rank * (8 * max(param.shape) + 4 * min(param.shape)) + 4 for param in params)
    formula = 4 * count + low
    record.say(
        "state",
        bytes=held,
        formula=formula,
        equal=held == formula,
        without_masters=held - 4 * count,
        weights=weights,
        fused_adams=12 * count,
    )


def step_times(optimizer: GaLoreAdamW) -> tuple[list[float], list[float]]:
    """Milliseconds of steps one behind another, but for the first: the device's, the host's."""
    pairs, walls = [], []
    for _ in range(SIZES.steps):
        start = time.perf_counter()
        ends = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if GPU else []
        for end in ends[:1]:
            end.record()
        optimizer.step()
        for end in ends[1:]:
            end.record()
        pairs.append(ends)
        walls.append(1e3 * (time.perf_counter() - start))
    synchronize()
    times = [before.elapsed_time(behind) for before, behind in pairs] if GPU else walls
    return times[1:], walls[1:]


def some_matrices(record: Record, speed: float) -> None:
    """One matrix, by rank, and many of one shape."""
    for columns in (SIZES.width, SIZES.inner):
        for count in (1, SIZES.many):
            for kind, (dtype, precision, master) in KINDS.items():
                for rank in SIZES.ranks if count == 1 else (SIZES.rank,):
                    params = parameters([(SIZES.width, columns)] * count, dtype)
                    own = {"precision": precision, "dtype": torch.float32 if master else None}
                    found = {}
                    for kernel in KERNELS:
                        optimizer = stepped(
                            params, kernel=kernel, rank=rank, capturable=True, **own
                        )
                        found[f"{kernel}_ms"] = cold_ms(graph_of(optimizer))
                    floor = floor_ms(params, speed, master, rank)
                    name = f"{count} of {SIZES.width}x{columns} rank {rank} {kind} {precision}"
                    ratio = min(found.values()) / floor
                    record.say(name, floor_ms=floor, **found, of_floor=ratio)
                    del params, optimizer
                    free()


@torch.no_grad()
def run(out: Path) -> dict[str, Any]:
    """Everything, one part after another: the record."""
    record = Record(out)
    speed = copy_speed()
    record.say("copy", bytes_per_s=speed)
    for part in (beside_galore_torch, llama, some_matrices):
        part(record, speed)
        free()
    record.say("seconds", all=record.seconds())
    return record.found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path, help="the record, a JSON file")
    run(parser.parse_args().out)
