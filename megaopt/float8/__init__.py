"""Weights that live in fp8: codes and scales in the place of a bf16 copy.

    model = megaopt.to_float8(model, "block_128x128")

makes the weights of linear layers `Float8Weight` parameters. A forward pass multiplies with the
numbers that the codes stand for, so that the losses are those of bf16 weights that are cast to fp8
and back at every use.
"""

from megaopt.float8.convert import to_float8
from megaopt.float8.linear import scaled_matmul
from megaopt.float8.weight import Float8Weight, update_scales
from megaopt.kernels.float8 import RECIPES, Float8Recipe

__all__ = [
    "RECIPES",
    "Float8Recipe",
    "Float8Weight",
    "scaled_matmul",
    "to_float8",
    "update_scales",
]
