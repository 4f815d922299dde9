"""Measures what digests cost on a GPU, and writes a record.

python tools/digest_times.py RECORD

Steps of AdamW over the bench's set B, bf16 weights with fp32 masters: without digests, with those
of weights, with those of all five tensors; a pass of its own over all five; and the host's time at
300 tensors. Then the time that a recorder takes, at 300 tensors and over set B, beside this AdamW
and torch's fused one over fp32 weights: of the host, and of the GPU, which has its work queued
before it begins. Before anything is timed the digests are compared with the twin's.
"""

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from megaopt import FusedAdam, Recorder
from megaopt.commands.bench.sets import SETS
from megaopt.commands.environment import describe
from megaopt.commands.source import describe_source
from megaopt.kernels import native
from megaopt.kernels.digest.codes import initial
from megaopt.kernels.digest.reference import add_reference
from megaopt.kernels.place import Place
from megaopt.recording.digest import Digester
from megaopt.recording.recorder import SAMPLED_FIRST

ALL = ("grad", "weight", "master_param", "exp_avg", "exp_avg_sq")
RECORDED = {"none": None, "weight": ("weight",), "all": ALL}
RECORDERS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "loss": {"level": "loss"},
    "step": {"level": "step"},
    "step, sampled": {"level": "step", "samples": 1},
}
ROUNDS, STEPS = 5, 20
PAUSE = 2**28
"""Cycles of the GPU, for which the host queues what is timed."""


def optimizer_of(sizes: list[int]) -> FusedAdam:
    """AdamW of bf16 weights with random values, which has stepped once."""
    weights = [torch.randn(size, device="cuda").bfloat16() for size in sizes]
    params = [torch.nn.Parameter(weight) for weight in weights]
    optimizer = FusedAdam(params, lr=1e-4, weight_decay=0.1, dtype=torch.float32)
    for param in params:
        param.grad = torch.randn_like(param)
    optimizer.step()
    return optimizer


def torch_optimizer_of(sizes: list[int]) -> torch.optim.AdamW:
    """AdamW of torch, fused, of fp32 weights with random values."""
    params = [torch.nn.Parameter(torch.randn(size, device="cuda")) for size in sizes]
    for param in params:
        param.grad = torch.randn_like(param)
    return torch.optim.AdamW(params, lr=1e-4, weight_decay=0.1, fused=True)


OPTIMIZERS: dict[str, Callable[[list[int]], torch.optim.Optimizer]] = {
    "FusedAdam": optimizer_of,
    "torch.optim.AdamW(fused=True)": torch_optimizer_of,
}


def tensors_of(optimizer: FusedAdam) -> list[torch.Tensor]:
    """Gradients, weights and states, parameter by parameter."""
    state = optimizer.state
    return [
        {"grad": param.grad, "weight": param.detach(), **state[param]}[name]
        for param in optimizer.param_groups[0]["params"]
        for name in ALL
    ]


def gpu_ms(run: Callable[[], Any]) -> list[float]:
    """The GPU's time of each of STEPS calls, after two that do not count."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(STEPS + 1)]
    run(), run()
    torch.cuda._sleep(PAUSE)
    for event in events[:-1]:
        event.record()
        run()
    events[-1].record()
    torch.cuda.synchronize()
    return [one.elapsed_time(other) for one, other in pairwise(events)]


def host_ms(run: Callable[[], Any]) -> float:
    """The host's median time of a call, where the GPU has nothing to do."""
    times = []
    for _ in range(200):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def assert_right() -> None:
    """Launch and own pass give the twin's numbers, whole chunks and ends of tensors."""
    optimizer = optimizer_of([2**20, 4097, 12345, 3, 2048])
    optimizer.record_digests(ALL)
    optimizer.step()
    tensors, places = tensors_of(optimizer), [Place(0)] * 25
    truth = initial([tensor.numel() for tensor in tensors], torch.device("cuda"))
    add_reference(places, tensors, truth)
    assert torch.equal(Digester(tensors, places)(tensors), truth)
    assert torch.equal(optimizer.digests[0].lanes.flatten(0, 1), truth[:, :2])


def steps(optimizer: FusedAdam) -> dict[str, Any]:
    """GPU milliseconds of a step by what is recorded, in turns; medians and quartiles."""
    times: dict[str, list[float]] = {name: [] for name in RECORDED}
    for _ in range(ROUNDS):
        for name, quantities in RECORDED.items():
            optimizer.record_digests(quantities)
            times[name] += gpu_ms(optimizer.step)
    found: dict[str, Any] = {name: summary(each) for name, each in times.items()}
    base = found["none"]["ms"]
    return {name: {**each, "of_step": each["ms"] / base} for name, each in found.items()}


def summary(times: list[float]) -> dict[str, Any]:
    """The median and the quartiles."""
    lower, median, upper = statistics.quantiles(times, n=4)
    return {"ms": median, "ms_quartiles": [lower, upper], "repetitions": len(times)}


def own_pass(optimizer: FusedAdam) -> dict[str, Any]:
    """GPU milliseconds of one launch over all five tensors of each parameter."""
    tensors = tensors_of(optimizer)
    digester = Digester(tensors, [Place(0)] * len(tensors))
    size = sum(tensor.nbytes for tensor in tensors)
    found = summary(gpu_ms(lambda: digester(tensors)))
    return {"bytes": size, "tensors": len(tensors), **found, "TB_s": size / found["ms"] / 1e9}


def copy() -> dict[str, Any]:
    """GPU milliseconds of a copy, for the card's speed: bytes read and written."""
    source = torch.randint(0, 256, (2**31,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    found = summary(gpu_ms(lambda: target.copy_(source)))
    return {"bytes": 2**32, **found, "TB_s": 2**32 / found["ms"] / 1e9}


def host() -> dict[str, Any]:
    """Host milliseconds at 300 tensors of 1,000 elements."""
    optimizer = optimizer_of([1000] * 300)
    tensors = tensors_of(optimizer)[:300]
    digester = Digester(tensors, [Place(0)] * 300)
    found = {"own pass of 300 tensors": host_ms(lambda: digester(tensors))}
    for name, quantities in RECORDED.items():
        optimizer.record_digests(quantities)
        optimizer.step()
        found[f"step of 300 parameters, {name}"] = host_ms(optimizer.step)
    return found


def recorder(sizes: list[int]) -> dict[str, Any]:
    """Milliseconds of a step of the host and of the GPU, by optimizer and by what is recorded."""
    found = {}
    for name, make in OPTIMIZERS.items():
        optimizer = make(sizes)
        found[name] = {what: recorded(optimizer, own) for what, own in RECORDERS.items()}
        del optimizer
    return found


def recorded(optimizer: torch.optim.Optimizer, options: dict[str, Any] | None) -> dict[str, Any]:
    """Milliseconds of steps beside a recorder: of those that are not the first ones."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "recording")
        with nullcontext() if options is None else Recorder([], optimizer, out, **options):
            for _ in range(SAMPLED_FIRST):
                optimizer.step()
            gpu_ms(optimizer.step)  # pins memory for as many steps on their way
            return {"host_ms": host_ms(optimizer.step), "gpu": summary(gpu_ms(optimizer.step))}


def main(out: Path) -> None:
    """Measures, and writes the record."""
    record = {"source": describe_source(), "environment": describe()}
    record["command"] = "python tools/digest_times.py"
    native.build()  # otherwise it comes somewhere on the way, and steps take less from then on
    assert_right()
    record["copy"] = copy()
    optimizer = optimizer_of(list(SETS["B"].sizes))
    record["elements"] = sum(SETS["B"].sizes)
    record |= {"steps": steps(optimizer), "own_pass": own_pass(optimizer)}
    del optimizer
    record["host_ms"] = host()
    sets = {"300 tensors": [1000] * 300, "set B": list(SETS["B"].sizes)}
    record["recorder"] = {name: recorder(sizes) for name, sizes in sets.items()}
    out.write_text(json.dumps(record, indent=1), encoding="utf-8")
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
