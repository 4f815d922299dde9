"""TransformerEngine's recipes of fp8 weights, by name, and casts of whole tensors by them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from megaopt.kernels.formats import WEIGHTS
from megaopt.kernels.formats.base import Format, scale_shape
from megaopt.kernels.formats.float8 import FLOAT8_E4M3
from megaopt.kernels.quantizers import QUANTIZERS, Quantizer
from megaopt.kernels.quantizers.scale import amax_reference, multiplied
from megaopt.kernels.rules.base import round_to_fp32

FLOAT8 = {form.dtype: form for form in (FLOAT8_E4M3,)}
"""The formats of codes, by dtype."""

ALGORITHMS = ("max", "most_recent")
OPTIONS = ("power_of_two_scales", "margin", "amax_history_len", "amax_compute_algo", "amax_epsilon")
"""The options that not every scaling looks at."""


@dataclass(frozen=True)
class Float8Recipe:
    """A recipe of fp8 codes and scales for weights; ValueError says what an option must be."""

    scaling: str
    """"delayed": a scale per tensor, from the amaxes of earlier steps. "current": per tensor, from
    the values' own amax. "block_128x128": per block, from its amax. "mxfp8": per 32 in a row, a
    power of two that is kept as its exponent (E8M0)."""
    dtype: torch.dtype = torch.float8_e4m3fn
    """Says which dtype codes have: torch.float8_e4m3fn, as all TransformerEngine's recipes have."""
    margin: int = 0
    """delayed: the scale is 2**margin times smaller than it could be."""
    amax_history_len: int = 1024
    """delayed: how many steps' amaxes are kept."""
    amax_compute_algo: str = "max"
    """delayed: the scale is found from the "max" of the history, or from its "most_recent"."""
    power_of_two_scales: bool | None = None
    """current and blocks: scales are rounded down to powers of two. None: for blocks they are."""
    amax_epsilon: float = 0.0
    """current and blocks: the least amax, in the values' unit."""
    direct: bool = False
    """fp32 values are encoded, and their amax found, with no rounding to the weight's dtype first,
    as TransformerEngine's fused optimizer does, and not as bf16 weights that are cast."""

    def __post_init__(self) -> None:
        for name, choices in (
            ("scaling", tuple(QUANTIZERS)),
            ("dtype", tuple(FLOAT8)),
            ("amax_compute_algo", ALGORITHMS),
            ("power_of_two_scales", (None, True, False)),
            ("direct", (True, False)),
        ):
            value = getattr(self, name)
            if value not in choices:
                allowed = ", ".join(map(str, choices))
                raise ValueError(f"{name} must be one of {allowed}, got {value!r}")
        for name in ("margin", "amax_history_len"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise ValueError(f"{name} must be a whole number, got {value!r}")
        if self.amax_history_len < 1:
            raise ValueError(f"amax_history_len must be at least 1, got {self.amax_history_len}")
        if abs(self.margin) > 100:  # code_max / 2**margin is a normal number of fp32
            raise ValueError(f"margin must be from -100 to 100, got {self.margin}")
        epsilon = self.amax_epsilon
        if not isinstance(epsilon, (int, float)) or not 0 <= epsilon <= torch.finfo().max:
            raise ValueError(f"amax_epsilon must be finite and at least 0, got {epsilon!r}")
        if torch.tensor(epsilon, dtype=torch.float32, device="cpu").item() != epsilon:
            raise ValueError(f"amax_epsilon must be a number of fp32, got {epsilon!r}")
        object.__setattr__(self, "amax_epsilon", float(epsilon))  # kernels take it as a constant

        # what the scaling would not look at
        if not self.quantizer.scale_dtype.is_floating_point and self.power_of_two_scales is False:
            raise ValueError(
                f"power_of_two_scales must be True or None with scaling={self.scaling!r}, whose "
                "scales are E8M0, got False"
            )
        for name in (name for name in OPTIONS if name not in self.quantizer.options):
            value, default = getattr(self, name), type(self).__dataclass_fields__[name].default
            # False is what None has become here: dataclasses.replace passes it
            if value != default and value is not False:
                message = f"{name} must be left at {default!r} with scaling={self.scaling!r}"
                raise ValueError(f"{message}, got {value!r}")
        if self.power_of_two_scales is None:
            object.__setattr__(self, "power_of_two_scales", self.block is not None)

    @property
    def quantizer(self) -> Quantizer:
        """The quantizer that `scaling` names."""
        return QUANTIZERS[self.scaling]

    @property
    def block(self) -> tuple[int, int] | None:
        """Rows and columns that share a scale; None: the whole tensor."""
        quantizer = self.quantizer
        return (quantizer.rows, quantizer.columns) if quantizer.columns else None

    @property
    def format(self) -> Format:
        """The format by which a scaled value becomes a code, and a code a value."""
        return FLOAT8[self.dtype]

    @property
    def code_max(self) -> float:
        """The number a scale takes the amax to: the dtype's largest, 2**margin times smaller."""
        return math.ldexp(torch.finfo(self.dtype).max, -self.margin)

    @property
    def code_max_inverse(self) -> float:
        """Its reciprocal, rounded to fp32."""
        return round_to_fp32(1 / self.code_max)

    def scale_shape(self, shape: torch.Size) -> tuple[int, ...]:
        """The shape of scales for a weight: (1,), or rows and columns of blocks of a matrix."""
        if self.block is not None and len(shape) != 2:
            raise ValueError(
                f"shape must have two dimensions with scaling={self.scaling!r}, got {tuple(shape)}"
            )
        return scale_shape(self.block, shape)


RECIPES = {scaling: Float8Recipe(scaling) for scaling in QUANTIZERS}
"""The recipes with TransformerEngine's defaults, by name."""


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
    """Encodes values of any floating dtype, read as fp32, as the recipe says.

    Without `direct` they are rounded to `dtype`, the weight's own, first; amaxes are of what is
    then encoded. scale: fp32, one element, the scale there is: for delayed scaling, and only for
    it. Raises ValueError where it is missing, or given with another scaling, and for values of
    other than two dimensions with blocks.
    """
    keeps_scale = recipe.quantizer.keeps_scale
    if keeps_scale != (scale is not None):
        raise ValueError(
            f"scale must be {'the current one' if keeps_scale else 'None'} with "
            f"scaling={recipe.scaling!r}, got {scale!r}"
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
