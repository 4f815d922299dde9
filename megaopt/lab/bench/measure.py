"""The engine of all benches: times a step on the device and on the host, and measures the card."""

import gc
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from megaopt.kernels.galore.products import BF16, IEEE, TF32, fp32_products
from megaopt.lab.bench.instance import Instance, bytes_held, bytes_per_step

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

    def __call__(self, times: int = 1) -> None:
        """Enqueue the copy, so many times."""
        for _ in range(times):
            self.target.copy_(self.source)


class StepTimes(NamedTuple):
    """Milliseconds of steps, in the order of the steps."""

    before: list[float]
    """The device's time of what goes directly before the step."""
    step: list[float]
    """The device's time of the step, with the host's where the device waits for it."""
    host: list[float]
    """The time until the call of the step returns."""
    wall: list[float]
    """The time until the device is done with it."""


def finish() -> None:
    """Waits for the current CUDA device, where there is one."""
    if torch.cuda.is_available():  # tests time steps on the CPU
        torch.cuda.synchronize()


def nothing() -> None:
    """Does nothing: what goes before a step that follows nothing."""


def time_steps(
    step: Callable[[], object],
    count: int,
    device: torch.device,
    *,
    prepare: Callable[[], object] = nothing,
    queue: Callable[[], object] = nothing,
    before: Callable[[], object] = nothing,
) -> StepTimes:
    """Time so many steps, each on a device that is idle or at work on what `queue` gave it.

    Args:
        step: What is timed.
        count: How often.
        device: Where it runs; on a CPU all times are the host's.
        prepare: Goes first, untimed; the device has finished it before anything else begins.
        queue: Goes next, untimed. While the device works on it, the host enqueues what is timed, so
            that events enclose the device's work and not the host's.
        before: Goes directly before the step, and has a time of its own.
    """

    def mark() -> Any:
        if device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    rows = []
    for _ in range(count):
        prepare()
        finish()
        queue()
        marks = [mark()]
        before()
        marks.append(mark())
        start = time.perf_counter()
        step()
        host = time.perf_counter() - start
        marks.append(mark())
        finish()
        wall = time.perf_counter() - start
        device_times = [
            first.elapsed_time(last) if device.type == "cuda" else 1e3 * (last - first)
            for first, last in pairwise(marks)
        ]
        rows.append((*device_times, 1e3 * host, 1e3 * wall))
    return StepTimes(*map(list, zip(*rows, strict=True)))


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
    step, device = instance.optimizer.step, instance.parameters[0].device
    for _ in range(2):  # compile, allocate the state, fill the plan
        step()
    scratch, seconds = scratch_and_time(step)
    # a slow step is repeated less often
    count = min(most, max(LEAST_STEPS, min(MOST_STEPS, int(SECONDS / seconds))))
    # the copies also leave nothing of the case in the cache
    queued = time_steps(step, count, device, queue=partial(copy, 10), before=copy)
    figures: Record = {
        "tensors": len(instance.parameters),
        "elements": sum(parameter.numel() for parameter in instance.parameters),
        "bytes": bytes_per_step(instance),
        "held_bytes": bytes_held(instance),
        "repetitions": count,
        "copy_bytes": copy.bytes,
        "scratch_bytes": scratch,
    }
    for name, times in (("step", queued.step), ("copy", queued.before)):
        low, _, high = statistics.quantiles(times, n=4)
        figures |= {f"{name}_ms": statistics.median(times), f"{name}_ms_quartiles": (low, high)}
    figures["kernels"], figures["transfers"] = launches(step)
    # medians, not means: some libraries compile again at a later step
    for name, prepare in (("wall", nothing), ("wall_moved", instance.move_gradients)):
        walls = time_steps(step, count, device, prepare=prepare).wall
        figures[f"{name}_ms"] = statistics.median(walls)
    return with_rates(figures)


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
    matrix, out = (torch.randn(SIDE, SIDE, device=device).to(dtype) for _ in range(2))

    def multiply() -> None:
        torch.mm(matrix, matrix, out=out)

    with fp32_products(TF32 if precision == TF32 else IEEE):
        times = time_steps(multiply, PRODUCTS, device, before=multiply)
    return float(2 * SIDE**3 / (1e-3 * min(times.step)))


def free_memory() -> None:
    """Gives back what the optimizer of a case had on the GPU."""
    gc.collect()  # an optimizer can be part of a reference cycle
    torch.cuda.empty_cache()
