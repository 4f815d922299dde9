"""Whole tensors to fp8 codes and scales, and back: the twin of kernels that write fp8 weights."""

from __future__ import annotations

from typing import NamedTuple

import torch

from megaopt.kernels.float8.recipe import Float8Recipe
from megaopt.kernels.float8.scale import (
    e8m0_from_amax_reference,
    e8m0_multiplier_reference,
    e8m0_value_reference,
    magnitude_reference,
    reciprocal_reference,
    scale_from_amax_reference,
)
from megaopt.kernels.formats import WEIGHTS


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


def in_blocks(tensor: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """(block rows, rows in one, block columns, columns in one); edge blocks are filled with 0."""
    (rows, columns), (block_rows, block_columns) = tensor.shape, block
    fill = (0, -columns % block_columns, 0, -rows % block_rows)
    if any(fill):
        tensor = torch.nn.functional.pad(tensor, fill)
    rows, columns = -(-rows // block_rows), -(-columns // block_columns)
    return tensor.reshape(rows, block_rows, columns, block_columns)


def multiplied(
    values: torch.Tensor, scale: torch.Tensor, block: tuple[int, int] | None
) -> torch.Tensor:
    """Each fp32 value times its block's scale, rounded once."""
    if block is None:
        return values * scale.reshape(())
    product = in_blocks(values, block) * scale[:, None, :, None]
    whole = product.flatten(2, 3).flatten(0, 1)
    return whole[: values.shape[0], : values.shape[1]]


def amax_reference(values: torch.Tensor, recipe: Float8Recipe) -> torch.Tensor:
    """The largest magnitude of a tensor or of each block, NaNs passed over, infinities not.

    Args:
        values: fp32; two dimensions for a recipe with blocks.
        recipe: its `scale_shape` is the result's shape.

    Returns:
        fp32; 0 where there are no values.
    """
    shape = recipe.scale_shape(values.shape)
    if values.numel() == 0:
        return values.new_zeros(shape)
    magnitudes = magnitude_reference(values)
    if recipe.block is None:
        return magnitudes.amax().reshape(shape)
    return in_blocks(magnitudes, recipe.block).amax((1, 3))


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
    delayed = recipe.scaling == "delayed"
    if delayed != (scale is not None):
        raise ValueError(
            f"scale={scale!r} is not allowed with scaling={recipe.scaling!r}: "
            + ("the current one" if delayed else "None, it is found from the values")
        )
    values = values.float() if recipe.direct else values.to(dtype).float()
    amax = amax_reference(values, recipe)
    scale, scale_inv = scales_reference(amax, recipe, scale)
    codes = recipe.format.encode_reference(multiplied(values, scale, recipe.block))
    return Quantized(codes, scale, scale_inv, amax)


def scales_reference(
    amax: torch.Tensor, recipe: Float8Recipe, scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The scale and its inverse, from amaxes or, delayed, as it is."""
    if recipe.scaling == "mxfp8":
        code = e8m0_from_amax_reference(amax, recipe.code_max)
        return e8m0_multiplier_reference(code), code
    if scale is None:
        scale = scale_from_amax_reference(
            amax, recipe.code_max, recipe.amax_epsilon, 1.0, bool(recipe.power_of_two_scales)
        )
    else:
        scale = scale.reshape(1).clone()
    return scale, reciprocal_reference(scale)


def dequantize_reference(
    codes: torch.Tensor,
    scale_inv: torch.Tensor,
    recipe: Float8Recipe,
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """Code * scale_inv, rounded to fp32, then to `dtype`; the shape of `codes`."""
    if recipe.scaling == "mxfp8":
        scale_inv = e8m0_value_reference(scale_inv)
    values = recipe.format.decode_reference(codes)
    product = multiplied(values, scale_inv, recipe.block)
    # a product's NaN has a sign and payload that depend on the processor, and so has a cast's
    # (a masked fill: torch.where would copy the number from the host, which no graph captures)
    bits = product.view(torch.int32).masked_fill(product.isnan(), 0x7FC00000)
    product = bits.view(torch.float32)
    if dtype not in WEIGHTS:
        return product.to(dtype).contiguous()
    rounded: torch.Tensor = WEIGHTS[dtype].encode_reference(product)
    return rounded.contiguous()
