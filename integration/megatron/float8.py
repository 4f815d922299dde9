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
