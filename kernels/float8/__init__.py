"""fp8 weights: recipes, and how whole tensors become codes."""

from megaopt.kernels.float8.quantize import Quantized, dequantize_reference, quantize_reference
from megaopt.kernels.float8.recipe import RECIPES, Float8Recipe

__all__ = [
    "RECIPES",
    "Float8Recipe",
    "Quantized",
    "dequantize_reference",
    "quantize_reference",
]
