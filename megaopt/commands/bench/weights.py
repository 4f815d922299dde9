"""What a parameter's weight is made of: one plain tensor, or fp8 codes and scales."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from megaopt.float8 import Float8Weight
from megaopt.kernels.quantizers import Left

__all__ = ["is_cast_afterwards", "is_float8", "weight_tensors"]


def is_float8(parameter: Parameter) -> bool:
    """Whether the weight is kept in fp8: a Float8Weight, or a tensor of TransformerEngine's."""
    return isinstance(parameter, Float8Weight) or hasattr(parameter, "_quantizer")


def is_cast_afterwards(parameter: Parameter) -> bool:
    """Whether the fp8 codes need all new values first: one scale, from the tensor's own amax."""
    if isinstance(parameter, Float8Weight):
        return parameter.recipe.quantizer.store.left is Left.CODES
    quantizer = getattr(parameter, "_quantizer", None)
    return type(quantizer).__name__ == "Float8CurrentScalingQuantizer"


def weight_tensors(parameter: Parameter) -> dict[str, Tensor]:
    """Return the tensors of a weight, as stored, "weight" first.

    Of fp8 weights "weight" is the codes, float8 of the weight's shape; beside it stand
    "weight_scale_inv" and, with delayed scaling, "weight_scale" and "weight_amax_history", of
    Float8Weight's shapes, TransformerEngine's too.
    """
    if isinstance(parameter, Float8Weight):
        tensors = parameter.tensors()
        codes = tensors.pop("data8")
        return {"weight": codes, **{f"weight_{name}": t for name, t in tensors.items()}}
    if is_float8(parameter):
        return _of_transformer_engine(parameter)
    return {"weight": parameter.detach()}


def _of_transformer_engine(parameter: Parameter) -> dict[str, Tensor]:
    """The tensors of a Float8Tensor or Float8BlockwiseQTensor in e4m3.

    `float8_parameter` of bench.peers adds the history.
    """
    weight: Any = parameter
    if hasattr(weight, "_rowwise_data"):
        # columns of scales are filled up to a multiple of 4
        columns = -(-weight.shape[-1] // 128)
        codes, scale_inv = weight._rowwise_data, weight._rowwise_scale_inv[:, :columns]
    else:
        codes, scale_inv = weight._data, weight._scale_inv
    tensors = {"weight": codes.view(torch.float8_e4m3fn), "weight_scale_inv": scale_inv}
    if (history := getattr(weight, "amax_history", None)) is not None:
        tensors["weight_scale"] = weight._quantizer.scale
        tensors["weight_amax_history"] = history.flatten()
    return tensors
