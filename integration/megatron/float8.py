"""fp8 parameters of TransformerEngine under Megatron's distributed optimizer (fp8_param_gather).

A rank steps its part of each as a Float8Shard, whose codes are gathered as bytes. Scales are of
whole weights, found by the ranks together, so every rank has a shard of every fp8 weight: an empty
one where Megatron gives it none. Of MXFP8 parameters the step knows the fp32 main shards alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

import megaopt.integration.transformer_engine_weights  # noqa: F401  fp8 tensors become known
from megaopt.float8.foreign import foreign_weight
from megaopt.float8.shard import Float8Shard


def weights_of(optimizer: Any) -> Iterator[tuple[int, Any]]:
    """The fp8 parameters in the buffers of a distributed optimizer, numbered alike on all ranks.

    Without MXFP8: Megatron gathers those as bf16, and casts them itself.
    """
    params = [param for buffer in optimizer.buffers for param in buffer.params]
    return ((i, param) for i, param in enumerate(params) if is_fp8(param) and not is_mxfp8(param))


def is_fp8(param: torch.Tensor) -> bool:
    """Returns whether a parameter is one of TransformerEngine's fp8 tensors."""
    return foreign_weight(param) is not None


def is_mxfp8(param: torch.Tensor) -> bool:
    """Returns whether it is one whose scales are powers of two, of 32 elements each."""
    weight = foreign_weight(param)
    return weight is not None and weight.recipe.quantizer.scale_dtype == torch.uint8


def own_shards(optimizer: Any) -> dict[torch.Tensor, Float8Shard]:
    """This rank's parts of fp8 parameters, by parameter."""
    # order: the weight's number, alike on all ranks, by which they meet for scales
    group, shards = optimizer.data_parallel_group, {}
    for index, param in weights_of(optimizer):
        if param in optimizer.model_param_gbuf_map:
            part = optimizer._get_model_param_range_map(param)["param"]
            shards[param] = Float8Shard(param, part.start, part.end, group, order=index)
    return shards


def absent_shards(optimizer: Any) -> list[Float8Shard]:
    """Empty shards of the fp8 parameters of which this rank has nothing, with empty gradients."""
    # with an empty gradient: the step takes part in the scales of every weight
    group, shards = optimizer.data_parallel_group, []
    for index, param in weights_of(optimizer):
        if param not in optimizer.model_param_gbuf_map:
            shard: Any = Float8Shard(param, 0, 0, group, order=index)
            shard.decoupled_grad = param.main_grad.new_empty(0)
            shards.append(shard)
    return shards
