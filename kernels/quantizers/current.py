"""Current scaling: a scale per tensor from its own amax, which the step finds for the cast."""

from __future__ import annotations

import torch

from megaopt.kernels.chunks.store import Left, Quantizer, Recipe, Store
from megaopt.kernels.optional_triton import helper, tl
from megaopt.kernels.quantizers.cast import noted, raise_amax
from megaopt.kernels.quantizers.scale import (
    reciprocal,
    reciprocal_reference,
    scale_from_amax,
    scale_from_amax_reference,
)

OPTIONS = ("power_of_two_scales", "amax_epsilon")


@helper
def put(pointers, block, param, scale, amax_bits, words, FORMATS: tl.constexpr):
    _value, amax_bits = noted(param, amax_bits, block.mask, FORMATS)
    return amax_bits


@helper
def scale_of_amax(column, amax_bits, FORMATS: tl.constexpr):
    amax = amax_bits.to(tl.float32, bitcast=True)
    scale = scale_from_amax(
        amax, FORMATS.cast.recipe.code_max, FORMATS.cast.recipe.amax_epsilon, 1.0,
        FORMATS.cast.recipe.power_of_two_scales,
    )  # fmt: skip
    return scale, reciprocal(scale)


def scales_of_amax_reference(
    amax: torch.Tensor, recipe: Recipe, scale: None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The scale and its inverse, fp32, of amax's shape."""
    new_scale = scale_from_amax_reference(
        amax, recipe.code_max, recipe.amax_epsilon, 1.0, bool(recipe.power_of_two_scales)
    )
    return new_scale, reciprocal_reference(new_scale)


STORE = Store("current", Left.CODES, put=put, finish=raise_amax)
CURRENT = Quantizer("current", OPTIONS, STORE, scale_of_amax, scales_of_amax_reference)
