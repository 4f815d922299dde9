"""Whole tensors to fp8 codes and scales, and back: the twin of kernels that write fp8 weights."""

from __future__ import annotations

from typing import NamedTuple

import torch

from megaopt.kernels.float8.recipe import Float8Recipe
from megaopt.kernels.formats import WEIGHTS
from megaopt.kernels.quantizers.scale import amax_reference, multiplied


class Quantized(NamedTuple):
    """A tensor in fp8. Scales have the recipe's `scale_shape`."""

    codes: torch.Tensor
    """The recipe's dtype, the values' shape."""
    scale: torch.Tensor
    """fp32: what the values were multiplied by."""
    scale_inv: torch.Tensor
    """fp32: what codes are multiplied by; for mxfp8 the E8M0 code, uint8."""
    amax: torch.Tensor
    """fp32: the largest magnitude, NaNs passed over."""


def quantize_reference(
    values: torch.Tensor,
    recipe: Float8Recipe,
    dtype: torch.dtype = torch.bfloat16,
    scale: torch.Tensor | None = None,
) -> Quantized:
    """Encodes values, as the recipe says.

    Args:
        values: any floating dtype and, but for blocks, any shape; read as fp32.
        recipe: with `direct` the values are taken as they are, else they are rounded to `dtype`
            first; amaxes are of what is then encoded.
        dtype: the weight's own, before it was fp8.
        scale: fp32, one element: for delayed scaling, and only for it, the scale there is.

    Returns:
        Codes, scales, their inverses and amaxes.

    Raises:
        ValueError: `scale` is missing, or not allowed; values of other than two dimensions and a
            recipe with blocks.
    """
    keeps_scale = recipe.quantizer.keeps_scale
    if keeps_scale != (scale is not None):
        raise ValueError(
            f"scale={scale!r} is not allowed with scaling={recipe.scaling!r}: "
            + ("the current one" if keeps_scale else "None, it is found from the values")
        )
    values = values.float() if recipe.direct else values.to(dtype).float()
    amax = amax_reference(values, recipe)
    scale, scale_inv = recipe.quantizer.scales_reference(amax, recipe, scale)
    codes = recipe.format.encode_reference(multiplied(values, scale, recipe.block))
    return Quantized(codes, scale, scale_inv, amax)


def dequantize_reference(
    codes: torch.Tensor,
    scale_inv: torch.Tensor,
    recipe: Float8Recipe,
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """Code * scale_inv, rounded to fp32, then to `dtype`; the shape of `codes`."""
    values = recipe.format.decode_reference(codes)
    product = multiplied(values, recipe.quantizer.value_reference(scale_inv), recipe.block)
    # a product's NaN has a sign and payload that depend on the processor, and so has a cast's
    # (a masked fill: torch.where would copy the number from the host, which no graph captures)
    bits = product.view(torch.int32).masked_fill(product.isnan(), 0x7FC00000)
    product = bits.view(torch.float32)
    if dtype not in WEIGHTS:
        return product.to(dtype).contiguous()
    rounded: torch.Tensor = WEIGHTS[dtype].encode_reference(product)
    return rounded.contiguous()
