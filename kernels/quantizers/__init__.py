"""The ways weights become fp8 codes and scales: a file and a row of the table for each scaling."""

from __future__ import annotations

from megaopt.kernels.chunks.store import Left, Quantizer, Store
from megaopt.kernels.quantizers.blocks import BLOCK_128X128
from megaopt.kernels.quantizers.current import CURRENT
from megaopt.kernels.quantizers.delayed import DELAYED
from megaopt.kernels.quantizers.mxfp8 import MXFP8

QUANTIZERS = {quantizer.name: quantizer for quantizer in (DELAYED, CURRENT, BLOCK_128X128, MXFP8)}
"""The quantizers by name, which is Float8Recipe's `scaling`."""

__all__ = ["QUANTIZERS", "Left", "Quantizer", "Store"]
