"""Weights without scales: nothing of fp8 is here."""

from __future__ import annotations

from megaopt.kernels.chunks.blocks import store_block
from megaopt.kernels.chunks.draws import weight_bits
from megaopt.kernels.optional_triton import helper, tl
from megaopt.kernels.quantizers.base import Store


@helper
def put(pointers, block, param, scale, amax_bits, words, FORMATS: tl.constexpr):
    if FORMATS.weight.draws:
        code = FORMATS.weight.encode(param, 1.0, weight_bits(words))
    else:
        code = FORMATS.weight.encode(param, 1.0)
    store_block(pointers.weight, block.offsets, code, block.mask)
    return amax_bits


PLAIN = Store("plain", put=put)
