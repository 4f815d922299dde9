"""Megatron-Core's parameters: global names, parts of tensor-parallel ranks, shards of optimizers.

It is never imported here: before somebody else has, nothing is Megatron's.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from megaopt.kernels.place import Place
from megaopt.kernels.shards import PLAIN
from megaopt.recording.pieces import ShardRange, cut

VOCABULARY = ("word_embeddings.weight", "output_layer.weight")
"""Ends of the names of parameters with a row for each token."""


def _parallel_state() -> Any:
    return sys.modules.get("megatron.core.parallel_state")


def layout() -> dict[str, int]:
    """Returns the sizes of Megatron's parallel groups."""
    state, sizes = _parallel_state(), {}
    if state is None or not state.model_parallel_is_initialized():
        return {}
    for name in ("tensor_model", "pipeline_model", "expert_model", "context", "data"):
        sizes[name] = int(getattr(state, f"get_{name}_parallel_world_size")())
    return sizes


def global_name(model: torch.nn.Module, name: str) -> str:
    """Returns a parameter's or module's name, with numbers of layers and experts over all ranks."""
    if _parallel_state() is None:
        return name
    parts, above, module = name.split("."), [model], model
    for place, part in enumerate(parts):
        module = getattr(module, part, None)  # type: ignore[assignment]  # a parameter at the end
        if part.isdigit() and module is not None and parts[place - 1] == "local_experts":
            # numbers of this rank's experts, from the nearest module around that has them
            indices = [getattr(outer, "local_expert_indices", None) for outer in above]
            numbers = next(numbers for numbers in reversed(indices) if numbers is not None)
            parts[place] = str(int(numbers[int(part)]))
        elif part.isdigit() and module is not None:
            parts[place] = str(int(getattr(module, "layer_number", int(part) + 1)) - 1)
        above.append(module)
    return ".".join(parts)


def part_of(
    param: torch.Tensor, name: str, vocabulary: int | None
) -> tuple[tuple[int, ...], tuple[ShardRange, ...] | None] | None:
    """Returns the whole shape of a tensor-parallel parameter, and this rank's pieces of it.

    It is None for a parameter that is not Megatron's.
    """
    state = _parallel_state()
    if state is None or not hasattr(param, "tensor_model_parallel"):
        return None
    shape, (world, rank) = list(param.shape), _ranks(state, param)
    dim = param.partition_dim if param.tensor_model_parallel else -1  # type: ignore[attr-defined]
    parts = param.partition_stride if dim >= 0 else 1  # type: ignore[attr-defined]
    if dim < 0 or world == 1:
        dim, world, rank, parts = 0, 1, 0, 1
    if dim > 0 and parts > 1:
        return tuple(shape), None
    if not getattr(param, "allreduce", True) and "local_experts" not in name:
        # all experts of a rank, one behind another
        ranks, whole = state.get_expert_model_parallel_world_size(), list(param.shape)
        whole[param.partition_dim] *= ranks  # type: ignore[attr-defined]
        first = state.get_expert_model_parallel_rank() * param.numel()
        experts = ShardRange(0, param.numel(), Place(0, first))
        return tuple(whole), (experts,) if world == 1 else None
    shape[dim] *= world
    inner, size = math.prod(shape[dim + 1 :]), param.shape[dim] // parts if shape else 1
    runs = (size * inner, math.prod(shape[dim:])) if dim else ()
    pieces = tuple(
        ShardRange(
            begin=part * size * inner,
            numel=param.numel() // parts,
            place=Place(0, (part * world + rank) * size * inner, *runs),
        )
        for part in range(parts)
    )
    if vocabulary is not None and name.endswith(VOCABULARY):
        shape[0] = vocabulary
        numels = [min(p.numel, max(0, vocabulary * inner - p.place.first)) for p in pieces]
        pieces = cut(pieces, 0, numels[0])
    return tuple(shape), pieces


def _ranks(state: Any, param: torch.Tensor) -> tuple[int, int]:
    """Returns the size of the group that shares a parameter, and the rank in it."""
    kind = "" if getattr(param, "allreduce", True) else "expert_"
    names = [f"get_{kind}tensor_{model}parallel" for model in ("model_", "")]
    world = next(getattr(state, f"{n}_world_size") for n in names if hasattr(state, n + "_rank"))
    rank = next(getattr(state, f"{n}_rank") for n in names if hasattr(state, n + "_rank"))
    return world(), rank()


class Shard(NamedTuple):
    """The part of a model's parameter that an optimizer's parameter is."""

    weight: torch.Tensor
    """The model's parameter."""
    begin: int
    """The first of its elements, flat."""
    end: int
    is_master: bool
    """A copy in another dtype; else it shares the parameter's memory."""


def shard_of(param: torch.Tensor, weights: Iterable[torch.Tensor]) -> Shard | None:
    """Returns the part of a model's parameter that an optimizer's stands for; None: of none."""
    for weight in weights if _parallel_state() is not None else ():
        if getattr(weight, "main_param", None) is param:
            if not getattr(weight, "main_param_sharded", False):
                return Shard(weight, 0, weight.numel(), is_master=True)
            # Megatron's distributed optimizer, which calls the step of the recorded one, knows
            frame: Any = sys._getframe()
            while frame is not None:
                ranges = getattr(frame.f_locals.get("self"), "_get_model_param_range_map", None)
                if ranges is not None:
                    span = ranges(weight)["param"]
                    return Shard(weight, span.start, span.end, is_master=True)
                frame = frame.f_back
            raise RuntimeError(
                "the step of Megatron's optimizer must be called by its DistributedOptimizer where "
                "it is recorded, got a call by something else"
            )
        if weight.dtype == param.dtype and param.numel() and type(weight) in PLAIN:
            begin, rest = divmod(param.data_ptr() - weight.data_ptr(), weight.element_size())
            if not rest and begin >= 0 and begin + param.numel() <= weight.numel():
                return Shard(weight, begin, begin + param.numel(), is_master=False)
    return None
