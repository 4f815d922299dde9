"""The measurements of a process of the bench: a step over the ranks, or on one card alone."""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import Parameter

from megaopt.lab.bench.measure import (
    Copy,
    Record,
    finish,
    free_memory,
    launches,
    nothing,
    scratch_and_time,
    time_steps,
)
from megaopt.lab.bench.sets import Shape
from megaopt.lab.ranks.subjects import ENTRIES, LLAMA

WARM_UP = 4
CHECKED = 3
"""Steps before the weights are compared, each by other gradients; they warm up, too."""
BACKENDS = {"cuda": "cpu:gloo,cuda:nccl", "cpu": "gloo"}
CLIP = 1.0
"""The norm to which gradients of a Llama are clipped."""


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
class Size:
    """The sizes of a Llama of 0.43e9 parameters, and of a rank's batch."""

    layers: int = 12
    width: int = 1536
    vocabulary: int = 32000
    tokens: int = 512
    batch: int = 2


@dataclass(frozen=True)
class Question:
    """The question that all ranks are asked: what to measure."""

    subject: str
    """One of ENTRIES; empty: the speeds of memory and link."""
    tensors: str = ""
    """The set's name."""
    shapes: tuple[Shape, ...] = ()
    repetitions: int = 10
    size: Size = Size()
    speed_bytes: int = 2**30


def answered(place: ProcessPlace, question: Question) -> Record:
    """Measures; the ranks meet at the first question."""
    device, mesh = _met(place)
    if not question.subject:
        figures = _speeds(device, question.speed_bytes)
    elif question.tensors == LLAMA:
        figures = _iterations(place.rank, device, mesh, question)
    else:
        figures = _steps(device, mesh, question)
    free_memory()  # for the next case's processes
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

    def drawn(shape: Shape, seed: int) -> Tensor:
        chance = torch.Generator(device).manual_seed(seed)
        return torch.randn(shape, generator=chance, device=device, dtype=torch.bfloat16)

    # one module's weights, sharded where there is a mesh: the same whole ones on all ranks
    module = nn.Module()
    values = (0.02 * drawn(shape, index) for index, shape in enumerate(question.shapes))
    module.weights = nn.ParameterList(map(Parameter, values))
    if mesh is not None:
        fully_shard(module, mesh=mesh)
    parameters = list(module.parameters())
    subject = ENTRIES[question.subject].subject
    more = {"distributed_mesh": mesh} if subject.package == "dion" and mesh is not None else {}
    optimizer = subject.optimizer(parameters, **more)
    for step in range(CHECKED):
        for index, param in enumerate(parameters):
            grad = drawn(question.shapes[index], (step + 1) * 100_000 + index)
            if isinstance(param, DTensor):  # this rank's part of it; nothing is sent
                place = param.device_mesh, param.placements
                grad = distribute_tensor(grad, *place, src_data_rank=None)
            param.grad = grad
        optimizer.step()
    digests = []
    for param in parameters:  # whole, which all ranks gather
        whole = param.full_tensor() if isinstance(param, DTensor) else param
        codes = whole.detach().cpu().contiguous().view(torch.uint8).numpy()
        digests.append(hashlib.sha256(codes.data).hexdigest())
    figures = _measured(nothing, optimizer.step, device, question.repetitions)

    def steps() -> None:  # in a row: the host begins one while the device is at work
        for _ in range(question.repetitions):
            optimizer.step()

    in_a_row = time_steps(steps, 1, device, prepare=_meet).step[0]
    return figures | {"row_ms": in_a_row / question.repetitions, "digests": digests}


# --- a Hugging Face Llama, sharded layer by layer


def llama_of(name: str, size: Size, device: torch.device, mesh: DeviceMesh | None) -> Any:
    """A new model in bf16, of the same weights on all ranks, whole without a mesh; its optimizer.

    Muon has the layers' matrices, AdamW all else.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    options: dict[str, Any] = {"num_attention_heads": 12, "num_key_value_heads": 4}
    options |= {"hidden_size": size.width, "intermediate_size": 3 * size.width}
    options |= {"vocab_size": size.vocabulary, "num_hidden_layers": size.layers}
    options |= {"max_position_embeddings": size.tokens, "use_cache": False}
    options["attn_implementation"] = "eager"
    torch.manual_seed(0)
    with device:
        model: Any = LlamaForCausalLM(LlamaConfig(**options)).bfloat16()
    if mesh is not None:
        for layer in (*model.model.layers, model):
            fully_shard(layer, mesh=mesh)
    params: list[Any] = list(model.parameters())
    if name == "muon":
        params = [{"params": []}, {"params": [], "use_muon": False}]
        for key, param in model.named_parameters():
            is_hidden = param.ndim == 2 and ".layers." in key
            params[0 if is_hidden else 1]["params"].append(param)
    return model, ENTRIES[name].subject.optimizer(params)


def _iterations(
    rank: int, device: torch.device, mesh: DeviceMesh | None, question: Question
) -> Record:
    """The figures of whole iterations: forward and backward pass, clipping, step."""
    size, subject = question.size, ENTRIES[question.subject].subject
    model, optimizer = llama_of(question.subject, size, device, mesh)
    chance = torch.Generator().manual_seed(rank)
    tokens = torch.randint(size.vocabulary, (size.batch, size.tokens), generator=chance).to(device)

    def passes() -> None:
        optimizer.zero_grad(set_to_none=True)
        model(input_ids=tokens, labels=tokens).loss.backward()

    def step() -> None:
        if subject.is_ours:
            optimizer.step(clip_norm=CLIP)
        else:
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()

    return _measured(passes, step, device, question.repetitions) | {"row_ms": None}


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
    times = time_steps(step, WARM_UP + repetitions, device, prepare=_meet, before=before)
    iterations = [sum(pair) for pair in zip(times.before, times.step, strict=True)]
    named = (("iteration_ms", iterations), ("step_ms", times.step), ("host_ms", times.host))
    figures: Record = {name: statistics.median(values[WARM_UP:]) for name, values in named}
    if device.type != "cuda":
        return figures | dict.fromkeys(("memory_bytes", "kernels", "nccl"))
    before()
    memory, _ = scratch_and_time(step)
    before()
    kernels, _ = launches(step)
    nccl = sum(count for name, count in kernels.items() if "nccl" in name.lower())
    return figures | {"memory_bytes": memory, "kernels": sum(kernels.values()), "nccl": nccl}


def _meet() -> None:
    """Waits until all ranks are here, with nothing left to do on any device."""
    finish()
    if dist.is_initialized():
        dist.barrier()


def _speeds(device: torch.device, size: int) -> Record:
    """Speeds: memory, bytes a second of a copy, read and written; link, those that a rank sends.

    link is of an exchange of all with all, and None on one card.
    """
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    copy = Copy(device, size - size % (4 * ranks))

    def milliseconds(work: Callable[[], object]) -> float:
        return float(_measured(nothing, work, device, WARM_UP)["step_ms"])

    memory = 1e3 * copy.bytes / milliseconds(copy)
    if ranks == 1:
        return {"memory": memory, "link": None}
    sent = copy.bytes // 2 * (ranks - 1) // ranks
    exchange = partial(dist.all_to_all_single, copy.target, copy.source)
    return {"memory": memory, "link": 1e3 * sent / milliseconds(exchange)}
