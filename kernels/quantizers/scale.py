"""The scales of fp8 weights, from amaxes: as TransformerEngine 2.20 finds them.

A weight is stored as the code of value * scale and read as code * scale_inv. The functions work
element by element, on one amax or on many. Those of torch are captured in CUDA graphs, so that none
takes a number from the host's memory, as torch.where with a number does.
"""

from __future__ import annotations

import torch

from megaopt.kernels.chunks.store import Recipe
from megaopt.kernels.optional_triton import helper, tl

# fp32 patterns
INFINITY: tl.constexpr = tl.constexpr(0x7F800000)
NAN: tl.constexpr = tl.constexpr(0x7FC00000)
LARGEST: tl.constexpr = tl.constexpr(0x7F7FFFFF)
# 2**-127, which is subnormal: its one bit stands in the mantissa.
TWO_TO_MINUS_127: tl.constexpr = tl.constexpr(0x00400000)
# E8M0, the scale of an MXFP8 block: 2**(code - 127); 0xFF is the NaN.
E8M0_LARGEST: tl.constexpr = tl.constexpr(0xFE)
E8M0_NAN: tl.constexpr = tl.constexpr(0xFF)

FP32_MAX = torch.finfo(torch.float32).max


@helper
def magnitude_bits(value):
    """The fp32 pattern of a magnitude, for the largest of many: as integers they order alike.

    A NaN is passed over, as fmaxf does: it is 0. An infinity counts.
    """
    bits = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.where(bits <= INFINITY, bits, 0)


def magnitude_reference(value: torch.Tensor) -> torch.Tensor:
    """The magnitudes, of which amax is the largest; that of a NaN is 0."""
    return value.abs().masked_fill(value.isnan(), 0.0)


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


def amax_reference(values: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """The largest magnitude of a tensor or of each block, fp32; passes over NaN, not infinity."""
    shape = recipe.scale_shape(values.shape)
    if values.numel() == 0:
        return values.new_zeros(shape)
    magnitudes = magnitude_reference(values)
    if recipe.block is None:
        return magnitudes.amax().reshape(shape)
    return in_blocks(magnitudes, recipe.block).amax((1, 3))


@helper
def scale_from_amax(amax, code_max, epsilon, otherwise, POWER_OF_TWO: tl.constexpr):
    """code_max / amax in fp32; `otherwise` where amax is 0, infinity or NaN."""
    # amax at least epsilon; zeros, infinities and NaN have no scale of their own
    amax = tl.where(amax < epsilon, epsilon, amax)  # a NaN stays
    bits = amax.to(tl.int32, bitcast=True)
    usable = (bits > 0) & (bits < INFINITY)
    # rounded once; an overflow becomes the largest number
    quotient = tl.math.div_rn(tl.full((), code_max, tl.float32), tl.where(usable, amax, 1.0))
    bits = tl.minimum(quotient.to(tl.int32, bitcast=True), LARGEST)
    if POWER_OF_TWO:
        bits = bits & INFINITY  # the exponent alone
    return tl.where(usable, bits.to(tl.float32, bitcast=True), otherwise)


def scale_from_amax_reference(
    amax: torch.Tensor,
    code_max: float,
    epsilon: float = 0.0,
    otherwise: torch.Tensor | float = 1.0,
    power_of_two: bool = False,
) -> torch.Tensor:
    """Returns the fp32 factor of values before they are encoded: code_max / amax, rounded once.

    An overflow becomes fp32's largest number. An amax below `epsilon`, a number of fp32, counts as
    that. `otherwise` is the scale where amax is 0, infinity or NaN: with delayed scaling the one
    there is. power_of_two rounds the scale down.
    """
    # a Python number divided by a tensor is a product with the reciprocal in torch, rounded twice
    amax = torch.where(amax < epsilon, torch.full_like(amax, epsilon), amax)
    usable = (amax > 0) & amax.isfinite()
    quotient = torch.full_like(amax, code_max) / amax.masked_fill(~usable, 1.0)
    quotient = quotient.clamp(max=FP32_MAX)
    if power_of_two:
        quotient = (quotient.view(torch.int32) & int(INFINITY)).view(torch.float32)
    if not isinstance(otherwise, torch.Tensor):
        otherwise = torch.full_like(quotient, otherwise)
    return torch.where(usable, quotient, otherwise)


@helper
def reciprocal(scale):
    return tl.math.div_rn(tl.full((), 1.0, tl.float32), scale)


def reciprocal_reference(scale: torch.Tensor) -> torch.Tensor:
    """scale_inv of a scale: 1 / scale, rounded once; a subnormal result too."""
    return torch.ones_like(scale) / scale


@helper
def e8m0_from_amax(amax, code_max_inverse):
    """The E8M0 code, int32, of amax * code_max_inverse, rounded up to a power of two."""
    # int32, the fp32 pattern of what is rounded up
    bits = (amax * code_max_inverse).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    exponent = bits >> 23
    # what is exactly a power of two stays; of the subnormal numbers 2**-127, and 0 for below it
    exact = ((bits & 0x7FFFFF) == 0) | (bits <= TWO_TO_MINUS_127)
    code = tl.where(exact, exponent, tl.minimum(exponent + 1, E8M0_LARGEST))
    code = tl.where(bits == INFINITY, E8M0_LARGEST, code)
    return tl.where(bits > INFINITY, E8M0_NAN, code)


def e8m0_from_amax_reference(amax: torch.Tensor, code_max: float) -> torch.Tensor:
    """The E8M0 scale of MXFP8 blocks, uint8, as TransformerEngine rounds it: up.

    The exponent of amax * (1 / code_max), both rounded to fp32: 0 (2**-127) for 0 and what is
    below, 0xFE for infinity, 0xFF for NaN.
    """
    inverse = torch.full((), 1.0 / code_max, dtype=torch.float32, device=amax.device)
    quotient = amax * inverse
    mantissa, exponent = torch.frexp(quotient)  # quotient = mantissa * 2**exponent, half to one
    up = torch.where(mantissa == 0.5, exponent - 1, exponent)
    # then what the formula does not give: 0, infinity, NaN
    code = (up + 127).clamp(0, 0xFE)
    code = code.masked_fill(quotient == 0, 0).masked_fill(quotient == torch.inf, 0xFE)
    return code.masked_fill(quotient.isnan(), 0xFF).to(torch.uint8)


@helper
def e8m0_multiplier(code):
    """2**(127 - code), exact, of an int32 code: what an MXFP8 block is multiplied by."""
    bits = tl.where(code == E8M0_LARGEST, TWO_TO_MINUS_127, (E8M0_LARGEST - code) << 23)
    return tl.where(code == E8M0_NAN, NAN, bits).to(tl.float32, bitcast=True)


def e8m0_multiplier_reference(code: torch.Tensor) -> torch.Tensor:
    """2**(127 - code), fp32, exact, of a uint8 code; NaN for 0xFF."""
    return _powers(254 - code.to(torch.int32), code == 0xFF)


def _powers(exponent: torch.Tensor, nan: torch.Tensor) -> torch.Tensor:
    """2**(exponent - 127) of int32 from 0 to 254; NaN where `nan`."""
    bits = (exponent.clamp(min=0) << 23).masked_fill(exponent == 0, int(TWO_TO_MINUS_127))
    return bits.view(torch.float32).masked_fill(nan, torch.nan)


@helper
def e8m0_value(code):
    """2**(code - 127), exact, of an int32 code: what an MXFP8 block's codes are multiplied by."""
    bits = tl.where(code == 0, TWO_TO_MINUS_127, code << 23)
    return tl.where(code == E8M0_NAN, NAN, bits).to(tl.float32, bitcast=True)


def e8m0_value_reference(code: torch.Tensor) -> torch.Tensor:
    """2**(code - 127), fp32, exact, of a uint8 code; NaN for 0xFF."""
    return _powers(code.to(torch.int32), code == 0xFF)
