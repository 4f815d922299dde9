"""fp8 codes of a part of a weight: what a rank that owns some of its elements does (the twin)."""

from __future__ import annotations

import torch

from megaopt.kernels.float8.quantize import amax_reference, multiplied, scales_reference
from megaopt.kernels.float8.recipe import Float8Recipe


def embedded(values: torch.Tensor, rows: int, columns: int, start: int) -> torch.Tensor:
    """Values in their place in the whole weight, which is 0 elsewhere: (rows, columns), fp32."""
    whole = values.new_zeros(rows * columns)
    whole[start : start + values.numel()] = values.flatten()
    return whole.view(rows, columns)


def shard_amax_reference(
    values: torch.Tensor, recipe: Float8Recipe, rows: int, columns: int, start: int
) -> torch.Tensor:
    """The part's amaxes, for every block of the weight: fp32, the recipe's `scale_shape`.

    Args:
        values: fp32, rounded as the recipe says; any shape, the part's elements in order.
        recipe: of the weight.
        rows: of the whole weight.
        columns: of the whole weight.
        start: the part's first element.
    """
    if recipe.block is None:
        return amax_reference(values, recipe)
    return amax_reference(embedded(values, rows, columns, start), recipe)


def shard_codes_reference(
    values: torch.Tensor,
    recipe: Float8Recipe,
    rows: int,
    columns: int,
    start: int,
    amax: torch.Tensor,
    scale: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The part's codes, in the values' shape, and the whole weight's scale_inv.

    Args:
        values: as for shard_amax_reference.
        recipe: likewise.
        rows: likewise.
        columns: likewise.
        start: likewise.
        amax: of the whole weight, fp32, the recipe's `scale_shape`.
        scale: of delayed scaling, fp32, one element; else None.
    """
    scale, scale_inv = scales_reference(amax, recipe, scale)
    if recipe.block is None:
        product = multiplied(values, scale, None)
    else:
        whole = multiplied(embedded(values, rows, columns, start), scale, recipe.block)
        product = whole.flatten()[start : start + values.numel()].view(values.shape)
    return recipe.format.encode_reference(product), scale_inv
