"""The measurements of a process of the bench: a step over the ranks, or on one card alone."""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import Parameter

from megaopt.commands.bench import report
from megaopt.commands.bench.measure import Record, finish, launches, scratch_and_time
from megaopt.commands.bench.sets import Shape
from megaopt.commands.ranks import llama
from megaopt.commands.ranks.subjects import ENTRIES, LLAMA

WARM_UP = 4
CHECKED = 3
"""Steps before the weights are compared, each by other gradients; they warm up, too."""
BACKENDS = {"cuda": "cpu:gloo,cuda:nccl", "cpu": "gloo"}


@dataclass(frozen=True)
class ProcessPlace:
    """The place of a process among those of its job."""

    rank: int
    ranks: int
    device: str
    """ "cuda", or "cpu" in tests."""
    meeting: str
    """The file by which the ranks meet."""


@dataclass(frozen=True)
class Question:
    """The question that all ranks are asked: what to measure."""

    subject: str
    """One of ENTRIES; empty: the speeds of memory and link."""
    tensors: str = ""
    """The set's name."""
    shapes: tuple[Shape, ...] = ()
    repetitions: int = 10
    size: llama.Size = llama.USUAL
    speed_bytes: int = 2**30


def answered(place: ProcessPlace, question: Question) -> Record:
    """Measures; the ranks meet at the first question."""
    device, mesh = _met(place)
    if not question.subject:
        figures = _speeds(device, question.speed_bytes)
    elif question.tensors == LLAMA:
        parts = llama.parts_of(question.subject, question.size, device, mesh, place.rank)
        figures = _measured(*parts, device, question.repetitions) | {"row_ms": None}
    else:
        figures = _steps(device, mesh, question)
    report.free_memory()  # for the next case's processes
    return figures


@cache
def _met(place: ProcessPlace) -> tuple[torch.device, DeviceMesh | None]:
    """The device, and the mesh of all ranks; None on one alone, whose weights are whole."""
    device = torch.device(f"cuda:{place.rank}" if place.device == "cuda" else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    if place.ranks == 1:
        return device, None
    backend, meeting = BACKENDS[place.device], f"file://{place.meeting}"
    dist.init_process_group(backend, meeting, world_size=place.ranks, rank=place.rank)
    return device, init_device_mesh(place.device, (place.ranks,))


# --- a step by random gradients


def _steps(device: torch.device, mesh: DeviceMesh | None, question: Question) -> Record:
    """The figures of a step, and digests of the whole weights after CHECKED steps."""
    parameters = _parameters(question.shapes, device, mesh)
    subject = ENTRIES[question.subject].subject
    more = {"distributed_mesh": mesh} if subject.package == "dion" and mesh is not None else {}
    optimizer = subject.optimizer(parameters, **more)
    for step in range(CHECKED):
        for index, param in enumerate(parameters):
            whole = _drawn(question.shapes[index], (step + 1) * 100_000 + index, device)
            param.grad = _part(whole, param)
        optimizer.step()
    digests = [_digest(param) for param in parameters]
    figures = _measured(lambda: None, optimizer.step, device, question.repetitions)
    figures["row_ms"] = _in_a_row(optimizer.step, device, question.repetitions)
    return figures | {"digests": digests}


def _parameters(
    shapes: tuple[Shape, ...], device: torch.device, mesh: DeviceMesh | None
) -> list[Parameter]:
    """Weights of one module, sharded where there is a mesh: the same whole ones on all ranks."""
    module = nn.Module()
    values = (0.02 * _drawn(shape, index, device) for index, shape in enumerate(shapes))
    module.weights = nn.ParameterList(map(Parameter, values))
    if mesh is not None:
        fully_shard(module, mesh=mesh)
    return list(module.parameters())


def _drawn(shape: Shape, seed: int, device: torch.device) -> Tensor:
    chance = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=chance, device=device, dtype=torch.bfloat16)


def _part(whole: Tensor, param: Parameter) -> Tensor:
    """Returns this rank's part of a whole tensor; nothing is sent."""
    if not isinstance(param, DTensor):
        return whole
    return distribute_tensor(whole, param.device_mesh, param.placements, src_data_rank=None)


def _digest(param: Parameter) -> str:
    """SHA-256 of the whole weight, which all ranks gather."""
    whole = param.full_tensor() if isinstance(param, DTensor) else param
    codes = whole.detach().cpu().contiguous().view(torch.uint8).numpy()
    return hashlib.sha256(codes.data).hexdigest()


# --- times, memory, launches


def _measured(
    before: Callable[[], object], step: Callable[[], object], device: torch.device, repetitions: int
) -> Record:
    """Medians of steps, each begun by all ranks together.

    Returns:
        iteration_ms, of what goes before and the step; step_ms, until the device is done; host_ms,
        until the step returns; memory_bytes, the most allocated in a step above what is held
        before it; kernels, nccl: launches of a step and those of NCCL among them. The last three
        are None on a CPU.
    """
    rows = [_timed(before, step, device) for _ in range(WARM_UP + repetitions)]
    medians = map(statistics.median, zip(*rows[WARM_UP:], strict=True))
    times: Record = dict(zip(("iteration_ms", "step_ms", "host_ms"), medians, strict=True))
    if device.type != "cuda":
        return times | dict.fromkeys(("memory_bytes", "kernels", "nccl"))
    before()
    memory, _ = scratch_and_time(step)
    before()
    kernels, _ = launches(step)
    nccl = sum(count for name, count in kernels.items() if "nccl" in name.lower())
    return times | {"memory_bytes": memory, "kernels": sum(kernels.values()), "nccl": nccl}


def _timed(
    before: Callable[[], object], step: Callable[[], object], device: torch.device
) -> tuple[float, float, float]:
    _meet()
    marks = [_mark(device)]
    before()
    marks.append(_mark(device))
    start = time.perf_counter()
    step()
    host = 1e3 * (time.perf_counter() - start)
    marks.append(_mark(device))
    finish()
    return _between(marks[0], marks[2]), _between(marks[1], marks[2]), host


def _meet() -> None:
    """Waits until all ranks are here, with nothing left to do on any device."""
    finish()
    if dist.is_initialized():
        dist.barrier()
        finish()


def _in_a_row(step: Callable[[], object], device: torch.device, repetitions: int) -> float:
    """Milliseconds of a step behind others: the host begins it while the device is at work."""
    _meet()
    first = _mark(device)
    for _ in range(repetitions):
        step()
    last = _mark(device)
    finish()
    return _between(first, last) / repetitions


def _mark(device: torch.device) -> Any:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _between(first: Any, last: Any) -> float:
    return float(1e3 * (last - first) if isinstance(first, float) else first.elapsed_time(last))


# --- what the hardware does


def _speeds(device: torch.device, size: int) -> Record:
    """Speeds: memory, bytes a second of a copy, read and written; link, those that a rank sends.

    link is of an exchange of all with all, and None on one card.
    """
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    size -= size % ranks
    source = torch.empty(size, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)

    def seconds(work: Callable[[], object]) -> float:
        return float(1e-3 * _measured(lambda: None, work, device, WARM_UP)["step_ms"])

    memory = 2 * size / seconds(lambda: target.copy_(source))
    if ranks == 1:
        return {"memory": memory, "link": None}
    link = (size - size // ranks) / seconds(lambda: dist.all_to_all_single(target, source))
    return {"memory": memory, "link": link}
