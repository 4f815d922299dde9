"""How long a step takes whose state is in host memory, beside copies of the same bytes.

python tools/host_state.py RECORD.json [--elements 1e9] [--beside 2.5e8]

Copies both ways at once, from and to pinned memory, are what the bus allows. Beside other libraries
a step counts with the backward pass before it, within which they copy gradients.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megaopt import FusedAdam
from megaopt.commands import environment
from megaopt.commands.source import describe_source
from megaopt.kernels.host_memory import ALIGNMENT, HostMemory, held_bytes

SIDE, PIECE = 4096, 2**28
MASTER: dict[str, Any] = {"dtype": torch.float32}
BLOCKS = {"exp_avg_dtype": "block_e4m3", "exp_avg_sq_dtype": "block_e5m3"}
CASES: dict[str, dict[str, Any]] = {
    "fp32 moments and masters": {**MASTER, "state_device": "cpu"},
    "fp32 moments, masters on the card": {**MASTER, "state_device": {"moments": "cpu"}},
    "8-bit moments and remainders": {
        **MASTER,
        **BLOCKS,
        "store_param_remainders": True,
        "state_device": "cpu",
    },
    "bf16 moments and remainders": {
        **MASTER,
        "exp_avg_dtype": torch.bfloat16,
        "exp_avg_sq_dtype": torch.bfloat16,
        "store_param_remainders": True,
        "state_device": "cpu",
    },
}


def parameters(elements: int, dtype: torch.dtype) -> list[torch.nn.Parameter]:
    """So many matrices of 4096 rows as have about as many elements; each with a gradient."""
    generator = torch.Generator("cuda").manual_seed(0)
    made = []
    for _ in range(max(1, round(elements / SIDE**2))):
        value = torch.randn(SIDE, SIDE, device="cuda", generator=generator).mul_(0.02)
        param = torch.nn.Parameter(value.to(dtype))
        param.grad = torch.randn(SIDE, SIDE, device="cuda", generator=generator).to(dtype)
        made.append(param)
    return made


def seconds(work: Callable[[], object], count: int) -> list[float]:
    """Of each of so many runs, the device's work included."""
    found = []
    for _ in range(count):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        found.append(time.perf_counter() - start)
    return found


def copies(each_way: int) -> Callable[[], None]:
    """Copies so many bytes to the card and as many from it, at once."""
    memory = HostMemory(torch.device("cuda"))
    host = [memory.empty((PIECE,), torch.uint8) for _ in range(2)]
    card = [torch.empty(PIECE, dtype=torch.uint8, device="cuda") for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]
    pairs = ((card[0], host[0]), (host[1], card[1]))

    def work() -> None:
        left = each_way
        while left > 0:
            size = min(left, PIECE)
            for stream, (target, source) in zip(streams, pairs, strict=True):
                with torch.cuda.stream(stream):
                    target[:size].copy_(source[:size], non_blocking=True)
            left -= size

    return work


def measured(options: dict[str, Any], elements: int, count: int) -> dict[str, Any]:
    """One case's step, and the copies of its bytes, by turns."""
    params = parameters(elements, torch.bfloat16)
    before, start = held_bytes(), time.perf_counter()
    optimizer = FusedAdam(params, lr=1e-3, weight_decay=0.1, contract="te", **options)
    optimizer.step()  # makes the states
    torch.cuda.synchronize()
    first = time.perf_counter() - start
    each_way = sum(
        tensor.nbytes
        for state in optimizer.state.values()
        for tensor in state.values()
        if tensor is not None and tensor.device.type == "cpu"
    )
    work = copies(each_way)
    seconds(optimizer.step, 2), seconds(work, 1)
    rounds = [(seconds(optimizer.step, 1)[0], seconds(work, 1)[0]) for _ in range(count)]
    steps, both = (list(column) for column in zip(*rounds, strict=True))
    return {
        "elements": sum(param.numel() for param in params),
        "bytes_each_way": each_way,
        "bytes_pinned": held_bytes() - before - 2 * PIECE,
        "first_step_s": first,
        "steps_s": steps,
        "copies_s": both,
        "step_s": statistics.median(steps),
        "copy_s": statistics.median(both),
        "step_over_copies": statistics.median(steps) / statistics.median(both),
        "gb_per_s_each_way": each_way / statistics.median(steps) / 1e9,
    }


def has_the_same_bits(options: dict[str, Any], steps: int = 3) -> bool:
    """Whether states in host memory and on the card come to the same, weights included."""
    found = []
    for device in (options["state_device"], None):
        params = parameters(2 * SIDE**2, torch.bfloat16)
        own = {**options, "state_device": device}
        optimizer = FusedAdam(params, lr=1e-3, weight_decay=0.1, contract="te", **own)
        for _ in range(steps):
            optimizer.step()
        torch.cuda.synchronize()
        tensors = [tensor for state in optimizer.state.values() for tensor in state.values()]
        written = [each for each in (*params, *tensors) if each is not None]
        found.append([each.detach().cpu().view(torch.uint8) for each in written])
    return all(torch.equal(*pair) for pair in zip(*found, strict=True))


# --- beside other libraries


def _ours(params: list[torch.nn.Parameter]) -> Any:
    return FusedAdam(params, lr=1e-3, state_device="cpu", contract="torch")


def _ours_in_8_bits(params: list[torch.nn.Parameter]) -> Any:
    return FusedAdam(params, lr=1e-3, state_device="cpu", **BLOCKS)


def _torchao(params: list[torch.nn.Parameter]) -> Any:
    from torchao.optim import CPUOffloadOptimizer

    return CPUOffloadOptimizer(params, torch.optim.AdamW, lr=1e-3, fused=True)


def _hybrid(params: list[torch.nn.Parameter]) -> Any:
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

    return HybridDeviceOptimizer(
        params,
        offload_fraction=1.0,
        cpu_optimizer_cls=torch.optim.AdamW,
        gpu_optimizer_cls=torch.optim.AdamW,
        overlap_cpu_optimizer_d2h_h2d=True,
        lr=1e-3,
        fused=True,
    )


PEERS = {
    "megaopt": _ours,
    "megaopt, 8-bit moments": _ours_in_8_bits,
    "torchao CPUOffloadOptimizer": _torchao,
    "Megatron HybridDeviceOptimizer": _hybrid,
}


def beside(make: Callable[[list[torch.nn.Parameter]], Any], elements: int) -> dict[str, Any]:
    """Backward pass and step of fp32 weights, and what of it the backward pass alone takes."""
    params = parameters(elements, torch.float32)
    factors = [param.grad.clone() for param in params if param.grad is not None]
    for param in params:
        param.grad = None
    optimizer = make(params)

    def backward() -> None:
        for param, factor in zip(params, factors, strict=True):
            (param * factor).sum().backward()

    def iterate() -> None:
        backward()
        optimizer.step()
        for param in params:
            param.grad = None

    seconds(iterate, 2)
    times = seconds(iterate, 3)
    return {"iterations_s": times, "iteration_s": statistics.median(times)}


def main() -> None:
    """Measures, prints, and writes the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("record", type=Path)
    parser.add_argument("--elements", type=float, default=1e9)
    parser.add_argument("--beside", type=float, default=2.5e8, help="elements; 0 leaves peers out")
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    record: dict[str, Any] = {
        "source": describe_source(),
        "environment": environment.describe(),
        "command": f"python tools/host_state.py --elements {given.elements:g} --beside "
        f"{given.beside:g} --rounds {given.rounds}",
        "alignment": ALIGNMENT,
        "cases": {},
        "beside": {},
    }
    for name, options in CASES.items():
        found = {
            "same_bits_as_on_the_card": has_the_same_bits(options),
            **measured(options, int(given.elements), given.rounds),
        }
        record["cases"][name] = found
        step, over = found["step_s"] * 1e3, found["step_over_copies"]
        rate, first = found["gb_per_s_each_way"], found["first_step_s"]
        print(
            f"{name}: {step:.1f} ms, {over:.3f} of copies, {rate:.1f} GB/s each way, first step "
            f"{first:.1f} s, same bits {found['same_bits_as_on_the_card']}",
            flush=True,
        )
        given.record.write_text(json.dumps(record, indent=1) + "\n")
    for name, make in PEERS.items() if given.beside else ():
        try:
            record["beside"][name] = beside(make, int(given.beside))
        except Exception as error:  # not installed, or it does not work here: the record says so
            record["beside"][name] = {"why_not": f"{type(error).__name__}: {error}"[:300]}
        print(name, record["beside"][name], flush=True)
        given.record.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
