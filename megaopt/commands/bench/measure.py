"""The timing of a step: interleaved with a copy, on a queue that is never empty."""

import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import torch

from megaopt.commands.bench.instance import Instance, bytes_held, bytes_per_step
from megaopt.kernels.galore.products import BF16, IEEE, TF32, fp32_products

MOST_STEPS = 50
LEAST_STEPS = 3
SECONDS = 0.6
"""About how long a case's steps may take in one loop."""

Record = dict[str, Any]
"""A case, ready for JSON: what it is, "problem" (None: none), and what was measured of it."""
SIDE = 4096
"""Rows and columns of the matrices whose product says how fast the device multiplies.

An H200 makes products of bf16 numbers at 785 TFLOP/s with 4096, for as long as its power lasts.
"""
PRODUCTS = 50


class Copy:
    """A device-to-device copy, the measure of what the memory can do."""

    def __init__(self, device: torch.device, size: int = 2**30) -> None:
        # random values: memory and caches can treat zeros better than real data
        self.source = torch.empty(size // 4, dtype=torch.int32, device=device).random_()
        self.target = torch.empty_like(self.source)
        self.bytes = 2 * self.source.nbytes

    def __call__(self) -> None:
        """Enqueue the copy."""
        self.target.copy_(self.source)


def measure(instance: Instance, copy: Copy, most: int = MOST_STEPS) -> Record:
    """Measure a case on the current CUDA device; each time is of at most so many steps.

    Returns:
        Times in milliseconds, of the GPU unless wall is said, ready for JSON.
        tensors, elements, bytes (what a step must move) and held_bytes (weights and states), all
        counted on the tensors.
        repetitions: steps behind each time.
        step_ms and step_ms_quartiles: the median is with the host's time where the device waits
        for it, through 10 copies and more.
        copy_bytes (read plus written), copy_ms and copy_ms_quartiles, of the copy.
        wall_ms: median time until a step is done, as the host sees it, with gradients in place.
        wall_moved_ms: the same with every gradient newly allocated before each step (not timed).
        kernels: CUDA kernels of one step, by name; empty where the profiler sees no device.
        transfers: copies and fills of one step, by name.
        scratch_bytes: memory that a step takes above what is allocated before it.
        And what `with_rates` adds.
    """
    step = instance.optimizer.step
    for _ in range(2):  # compile, allocate the state, fill the plan
        step()
    scratch, seconds = scratch_and_time(step)
    # a slow step is repeated less often
    count = min(most, max(LEAST_STEPS, min(MOST_STEPS, int(SECONDS / seconds))))
    copies, steps = _device_times(step, copy, count)
    kernels, transfers = launches(step)
    return with_rates(
        {
            "tensors": len(instance.parameters),
            "elements": sum(parameter.numel() for parameter in instance.parameters),
            "bytes": bytes_per_step(instance),
            "held_bytes": bytes_held(instance),
            "repetitions": count,
            "step_ms": statistics.median(steps),
            "step_ms_quartiles": _quartiles(steps),
            "copy_bytes": copy.bytes,
            "copy_ms": statistics.median(copies),
            "copy_ms_quartiles": _quartiles(copies),
            "wall_ms": wall_ms(step, lambda: None, count),
            "wall_moved_ms": wall_ms(step, instance.move_gradients, count),
            "kernels": kernels,
            "transfers": transfers,
            "scratch_bytes": scratch,
        }
    )


def with_rates(figures: Record) -> Record:
    """The figures of `measure`, and what follows from them.

    launches: kernels per step, None where the profiler saw none; copy_bandwidth, the copy's bytes
    per second; percent_of_copy, the step's bytes per second over the copy's.
    """
    copied = figures["copy_bytes"] / figures["copy_ms"]
    return figures | {
        "launches": sum(figures["kernels"].values()) or None,
        "copy_bandwidth": copied * 1e3,
        "percent_of_copy": 100 * (figures["bytes"] / figures["step_ms"]) / copied,
    }


def _device_times(
    step: Callable[[], object], copy: Copy, count: int
) -> tuple[list[float], list[float]]:
    """Return the times of the copies and of the steps, interleaved, in milliseconds.

    Untimed copies go first: while the device works on them, the host enqueues the timed pair, so
    that the events enclose the device's work and not the host's. They also leave nothing of the
    case in the cache.
    """
    pairs = []
    for _ in range(count):
        for _ in range(10):
            copy()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]  # type: ignore[no-untyped-call]
        events[0].record()
        copy()
        events[1].record()
        step()
        events[2].record()
        torch.cuda.synchronize()
        pairs.append((events[0].elapsed_time(events[1]), events[1].elapsed_time(events[2])))
    copies, steps = zip(*pairs, strict=True)
    return list(copies), list(steps)


def _quartiles(times: list[float]) -> tuple[float, float]:
    low, _, high = statistics.quantiles(times, n=4)
    return low, high


def wall_ms(
    step: Callable[[], object], prepare: Callable[[], object], count: int, waits: bool = True
) -> float:
    """Return the median milliseconds of a step on an idle device; `prepare` goes before, untimed.

    Until the device has finished the step or, where it does not wait, until the call returns.
    """
    times = []
    for _ in range(count):
        prepare()
        finish()
        start = time.perf_counter()
        step()
        if waits:
            finish()
        times.append(time.perf_counter() - start)
    # not the mean: some libraries compile again at a later step
    return 1e3 * statistics.median(times)


def finish() -> None:
    """Waits for the current CUDA device, where there is one."""
    if torch.cuda.is_available():  # tests time steps on the CPU
        torch.cuda.synchronize()


def launches(step: Callable[[], object]) -> tuple[dict[str, int], dict[str, int]]:
    """Counts the kernels of one step on the current CUDA device, and its copies, by name."""
    with warnings.catch_warnings():
        # torch announces that a later cycle drops this one's events; there is none
        warnings.simplefilter("ignore", UserWarning)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            step()
            torch.cuda.synchronize()
    return count_device_work(profile.events() or ())


def count_device_work(events: Iterable[Any]) -> tuple[dict[str, int], dict[str, int]]:
    """Count the kernels of a profile's `events()`, and its copies and fills, by name."""
    # torch annotates each optimizer's step: a range on the device that is no work of its own
    work = [
        event.name
        for event in events
        if event.device_type.name == "CUDA" and not event.is_user_annotation
    ]
    transfers = Counter(name for name in work if name.startswith(("Memcpy", "Memset")))
    return dict(Counter(work) - transfers), dict(transfers)


def scratch_and_time(step: Callable[[], object]) -> tuple[int, float]:
    """Return the memory that a step takes above what is allocated before it, and its seconds."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, start = torch.cuda.memory_allocated(), time.perf_counter()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before, time.perf_counter() - start


def product_speed(device: torch.device, precision: str) -> float:
    """Operations per second of torch's product of square matrices: the fastest of PRODUCTS.

    The first ones find the card's clock low, the last ones may find its power spent.
    """
    dtype = torch.bfloat16 if precision == BF16 else torch.float32
    some, out = (torch.randn(SIDE, SIDE, device=device).to(dtype) for _ in range(2))
    events = [torch.cuda.Event(enable_timing=True) for _ in range(PRODUCTS + 1)]  # type: ignore[no-untyped-call]
    with fp32_products(TF32 if precision == TF32 else IEEE):
        for event in events:
            event.record()
            torch.mm(some, some, out=out)
    torch.cuda.synchronize()
    times = [start.elapsed_time(end) for start, end in pairwise(events)]
    return float(2 * SIDE**3 / (1e-3 * min(times)))
