"""What a rank owns of weights, masters and moments: what is recorded, and their bytes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from megaopt.commands.regression.megatron.optimizer import distributed_optimizers
from megaopt.commands.regression.parts import Part, part

# Megatron's names for the tensors of a parameter, ours for the same
KINDS = {"param": "master", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}


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


def parts(chunk: Any, optimizer: Any, suffix: str) -> Iterator[Part]:
    """The shards of this rank after a step, in the model's order.

    The tensors are those that Megatron would save, a state in another format being decoded to fp32.
    suffix tells names apart from those of ranks with other parts of the model.
    """
    for name, parameter in chunk.module.named_parameters():
        for each in distributed_optimizers(optimizer):
            if parameter in each.model_param_group_index_map:
                place = each._get_model_param_range_map(parameter)["param"]
                state = each._get_main_param_and_optimizer_states(parameter)
                tensors = {"weight": memory_of(parameter)[place.start : place.end]}
                tensors |= {KINDS[key]: state[key].detach().view(-1) for key in KINDS}
                tensors["master"] = as_master(tensors["weight"], tensors["master"])
                for quantity, tensor in tensors.items():
                    yield part(name + suffix, quantity, tensor, parameter.shape, place.start)


def state_bytes(optimizer: Any) -> int:
    """Bytes of this rank's masters and moments as they are stored, and of their scales."""
    tensors: dict[int, torch.Tensor] = {}
    for each in distributed_optimizers(optimizer):
        mains = (p for group in each.shard_fp32_from_float16_groups for p in group)
        states = (t for state in each.optimizer.state.values() for t in state.values())
        for tensor in (*mains, *states):
            if isinstance(tensor, torch.Tensor) and tensor.numel() > 0:
                # masters may be in both places
                tensors[tensor.data_ptr()] = tensor
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
