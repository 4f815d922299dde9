"""The weights, masters and moments that a rank owns: those recorded, and their bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from megaopt.kernels.shards import local_of
from megaopt.lab.regression.megatron.optimizer import leaves
from megaopt.lab.regression.parts import Part, part
from megaopt.state.owned import owned_of

# Megatron's names for the tensors of a parameter, ours for the same
KINDS = {"param": "master", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
MOMENTS = ("momentum_buffer", "exp_avg", "exp_avg_sq")
PROJECTED = ("projection", "captured_energy")


def memory_of(parameter: torch.Tensor) -> torch.Tensor:
    """The elements of a weight as they lie: of a TransformerEngine fp8 tensor, its codes."""
    for name in ("_data", "_rowwise_data"):
        codes = getattr(parameter, name, None)
        if isinstance(codes, torch.Tensor) and codes.dtype == torch.uint8:
            return codes.view(-1)
    return parameter.detach().view(-1)


def as_master(weight: torch.Tensor, stored: torch.Tensor) -> torch.Tensor:
    """The fp32 masters of bf16 weights: as stored, or put together from TransformerEngine's int16.

    Its remainder is the lower half of the bits, and the weight one more than the upper half where
    the remainder, as a signed number, is negative.
    """
    if stored.dtype != torch.int16:
        return stored
    upper = weight.view(torch.int16).to(torch.int32) << 16
    return (upper + stored.to(torch.int32)).view(torch.float32)


def parts(chunk: Any, optimizer: Any, suffix: str, of_experts: str) -> Iterator[Part]:
    """Gives the weights that this rank steps, and their states after a step, in the model's order.

    The tensors are those that Megatron would save, a state in another format being decoded to fp32.
    The suffixes tell names apart from those of ranks with other parts of the model, or experts.
    """
    held: dict[torch.Tensor, Tensors] = {}
    for leaf in leaves(optimizer):
        if hasattr(leaf, "model_param_group_index_map"):  # shards, of a DistributedOptimizer
            held |= {param: shard_of(param, leaf) for param in leaf.model_param_group_index_map}
            continue
        # of whole weights masters, moments, and GaLore's projection
        params = chunk.module.parameters()
        models = {id(getattr(param, "main_param", param)): param for param in params}
        for main in (main for group in leaf.optimizer.param_groups for main in group["params"]):
            state = leaf.optimizer.state[main]
            state = {name: state[name] for name in (*MOMENTS, *PROJECTED) if name in state}
            local = {n: local_of(t).detach() for n, t in {"master": main, **state}.items()}
            held[models[id(main)]] = {n: (t.view(-1), t.shape, 0) for n, t in local.items()}
    for name, parameter in chunk.module.named_parameters():
        if parameter in held:
            stored, shape, start = held[parameter]["master"]
            weight = memory_of(parameter)[start : start + stored.numel()]
            tensors = {"weight": (weight, shape, start), **held[parameter]}
            tensors["master"] = as_master(weight, stored), shape, start
            called = name + (of_experts if ".experts." in name else suffix)
            for quantity, tensor in tensors.items():
                yield part(called, quantity, *tensor)


Tensors = dict[str, tuple[torch.Tensor, Sequence[int], int]]
"""Flat fp32 tensors, each with the whole one's shape, and its own first element in that."""


def shard_of(parameter: torch.Tensor, optimizer: Any) -> Tensors:
    """Master and moments of a shard; those of GaLore's matrices as they are kept, not saved."""
    start = optimizer._get_model_param_range_map(parameter)["param"].start
    saved = optimizer._get_main_param_and_optimizer_states(parameter)
    tensors: Tensors = {
        KINDS[key]: (saved[key].detach().view(-1), parameter.shape, start) for key in KINDS
    }
    fused: Any = getattr(optimizer, "fused", None)
    view: Any = None if fused is None else owned_of(fused).view(optimizer.shards[parameter])
    if view is None or not view.kept:
        return tensors
    state, low = fused.state[view.param], view.matrix.low_shape(view.whole_shape)
    moments = {name: (state[name], low, view.first_of(name)) for name in MOMENTS if name in state}
    projected = {name: (state[name].view(-1), shape, 0) for name, shape in view.kept.items()}
    return {**tensors, **moments, **projected}


def state_bytes(optimizer: Any) -> int:
    """Bytes of this rank's masters and moments as they are stored, and of their scales."""
    tensors: dict[int, torch.Tensor] = {}
    names = ("shard_fp32_from_float16_groups", "fp32_from_float16_groups")
    for leaf in leaves(optimizer):
        groups = [group for name in names for group in getattr(leaf, name, ())]
        mains = (p for group in groups for p in group)
        states = (t for state in leaf.optimizer.state.values() for t in state.values())
        for tensor in map(local_of, (*mains, *states)):
            if isinstance(tensor, torch.Tensor) and tensor.numel() > 0:
                # masters may be in both places
                tensors[tensor.data_ptr()] = tensor
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
