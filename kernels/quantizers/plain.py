"""Weights without scales: nothing of fp8 is here."""

from __future__ import annotations

from megaopt.kernels.optional_triton import helper, tl
from megaopt.kernels.quantizers.base import Store
from megaopt.kernels.step.blocks import store_block
from megaopt.kernels.step.draws import weight_bits


@helper
def put(
    weight_ptr, param, scale, amax_bits, words, offsets, mask, FORMATS: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    if FORMATS.weight.draws:
        code = FORMATS.weight.encode(param, 1.0, weight_bits(words))
    else:
        code = FORMATS.weight.encode(param, 1.0)
    store_block(weight_ptr, offsets, code, mask, MASKED)
    return amax_bits


PLAIN = Store("plain", put=put)
