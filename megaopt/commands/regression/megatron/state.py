"""What a rank owns of weights, masters and moments: their fingerprints and their bytes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megaopt.commands.bits import in_digits
from megaopt.commands.regression.megatron.fingerprint import fingerprint
from megaopt.commands.regression.megatron.model import megatron
from megaopt.commands.regression.megatron.optimizer import distributed_optimizers

# Megatron's names for the tensors of a parameter, ours for the same
KINDS = {"param": "master_param", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}


class OwnShards(NamedTuple):
    """A rank's shards of one parameter."""

    name: str
    """Name of the parameter in the model."""
    start: int
    """Place of the shards' first element in the parameter."""
    tensors: dict[str, torch.Tensor]
    """One-dimensional tensors by kind: "weight", and those of KINDS."""


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


def own_shards(chunk: Any, optimizer: Any) -> Iterator[OwnShards]:
    """The shards of this rank after a step, in the model's order.

    The tensors are those that Megatron would save, a state in another format being decoded to fp32.
    """
    for name, parameter in chunk.module.named_parameters():
        for each in distributed_optimizers(optimizer):
            if parameter in each.model_param_group_index_map:
                place = each._get_model_param_range_map(parameter)["param"]
                state = each._get_main_param_and_optimizer_states(parameter)
                tensors = {"weight": memory_of(parameter)[place.start : place.end]}
                tensors |= {KINDS[key]: state[key].detach().view(-1) for key in KINDS}
                tensors["master_param"] = as_master(tensors["weight"], tensors["master_param"])
                yield OwnShards(name, place.start, tensors)


def fingerprints(chunk: Any, optimizer: Any) -> dict[str, str]:
    """The fingerprint of every weight, master and moment, by "name kind".

    For all ranks to call together after a step; the same on all data-parallel ranks.
    """
    kinds = ("weight", *KINDS.values())
    names = [name for name, _ in chunk.module.named_parameters()]
    row = {name: number for number, name in enumerate(names)}
    device = next(chunk.module.parameters()).device
    sums = torch.zeros((len(names), len(kinds)), dtype=torch.int64, device=device)
    for shards in own_shards(chunk, optimizer):
        own = [shards.tensors[kind].to(device) for kind in kinds]  # states may be on the host
        sums[row[shards.name]] += fingerprint(own, shards.start)
    dist.all_reduce(sums, group=megatron("parallel_state").get_data_parallel_group())
    return {
        f"{name} {kind}": in_digits(number, 64)
        for name, numbers in zip(names, sums.tolist(), strict=True)
        for kind, number in zip(kinds, numbers, strict=True)
    }


def flip_master_bit(chunk: Any, optimizer: Any) -> None:
    """Flips the lowest mantissa bit of one element in the middle of this rank's first master."""
    for shards in own_shards(chunk, optimizer):
        bits = shards.tensors["master_param"].view(torch.int32)
        if bits.numel() > 0:
            bits[bits.numel() // 2] ^= 1
            return
    raise RuntimeError("this rank owns no element of a master")


def owned_elements(chunk: Any, optimizer: Any) -> int:
    """Elements of parameters that this rank steps."""
    return sum(shards.tensors["weight"].numel() for shards in own_shards(chunk, optimizer))


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
