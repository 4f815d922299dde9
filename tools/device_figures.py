"""Times and memory of what a device does, and a record of them.

Without a GPU the kernels are interpreted, and times are the host's: to see that a tool runs.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

GPU = torch.cuda.is_available()
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # it counts from before megaopt is imported

from megaopt.commands.environment import describe  # noqa: E402
from megaopt.commands.source import describe_source, portable  # noqa: E402

DEVICE = "cuda" if GPU else "cpu"
WAIT = 40_000_000
"""Cycles that the device is kept busy while the host launches: some 20 ms."""


class Record:
    """What was measured; a file that is written anew with each case."""

    def __init__(self, out: Path) -> None:
        self.out, self.start = out, time.perf_counter()
        self.found: dict[str, Any] = {
            "source": describe_source(),
            "environment": describe(),
            "command": " ".join(portable(["python", *sys.argv])),
        }

    def say(self, name: str, **figures: Any) -> None:
        """Keeps a case, and prints it."""
        self.found[name] = figures
        shown = (f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in figures.items())
        print(f"[{self.seconds():.0f} s] {name}: {', '.join(shown)}", flush=True)
        self.out.write_text(json.dumps(self.found, indent=1), encoding="utf-8")

    def seconds(self) -> float:
        """Since it began."""
        return time.perf_counter() - self.start


def synchronize() -> None:
    """The host waits for the device."""
    if GPU:
        torch.cuda.synchronize()


def free() -> None:
    """Gives back the memory of what nobody has any more."""
    gc.collect()
    if GPU:
        torch.cuda.empty_cache()


def device_ms(call: Callable[[], object], wait: int = WAIT) -> float:
    """Of one call; on a CPU the host's."""
    if not GPU:
        start = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - start)
    before, behind = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(wait)
    before.record()
    call()
    behind.record()
    torch.cuda.synchronize()
    return float(before.elapsed_time(behind))


def median_ms(call: Callable[[], object], count: int = 11, wait: int = WAIT) -> float:
    """Of so many calls behind a first one."""
    call()
    return statistics.median(device_ms(call, wait) for _ in range(count if GPU else 1))


def cold_ms(call: Callable[[], object]) -> float:
    """The median of nine calls, before each of which the cache is filled with something else."""
    other = torch.empty(2**26 if GPU else 8, dtype=torch.int32, device=DEVICE)
    found = []
    for _ in range(9 if GPU else 1):
        other.zero_()
        found.append(device_ms(call, 2_000_000))
    return statistics.median(found)


def graph_of(optimizer: Any) -> Callable[[], object]:
    """Replays a CUDA graph of one step; a step on a CPU."""
    if not GPU:
        return optimizer.step
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        optimizer.step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    return graph.replay


def peak_bytes(call: Callable[[], object]) -> int:
    """What a call allocates for a while, on a GPU; 0 on a CPU, where nobody counts."""
    if not GPU:
        call()
        return 0
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def copy_speed() -> float:
    """Bytes a second, read and written, of a copy of 1 GiB."""
    source = torch.empty(2**28 if GPU else 2**16, dtype=torch.int32, device=DEVICE).random_()
    target = torch.empty_like(source)
    return 2 * source.nbytes / median_ms(lambda: target.copy_(source)) * 1e3
