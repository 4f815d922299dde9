"""The formats of every buffer. Dispatch, documentation and tests are derived from these tables."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from megaopt.kernels.formats.base import Format, FormatTable, scale_shape
from megaopt.kernels.formats.bfloat16 import BFLOAT16, BFLOAT16_STOCHASTIC
from megaopt.kernels.formats.block4 import BLOCKS_OF_4_BITS
from megaopt.kernels.formats.block8 import BLOCKS
from megaopt.kernels.formats.block_int8 import LINEAR_BLOCKS
from megaopt.kernels.formats.float8 import FLOAT8_E4M3, SCALED_FLOAT8_E4M3
from megaopt.kernels.formats.float8_drawn import FLOAT8_E4M3_STOCHASTIC, PAIRS
from megaopt.kernels.formats.float16 import FLOAT16, FLOAT16_STOCHASTIC, SCALED_FLOAT16
from megaopt.kernels.formats.float32 import FLOAT32
from megaopt.kernels.formats.kahan import (
    KAHAN_BFLOAT16,
    KAHAN_BFLOAT16_STOCHASTIC,
    KAHAN_FLOAT16,
    KAHAN_FLOAT16_STOCHASTIC,
)
from megaopt.kernels.formats.remainder8 import REMAINDER8, REMAINDER8_STOCHASTIC
from megaopt.kernels.formats.remainder16 import REMAINDER16
from megaopt.kernels.optional_triton import tl

NONE = replace(FLOAT32, name="none", dtype=None, element=tl.int8)
"""No buffer."""

GRADS = FormatTable(FLOAT32, BFLOAT16, FLOAT16)
WEIGHTS = FormatTable(FLOAT32, BFLOAT16, FLOAT16)
STOCHASTIC_WEIGHTS = FormatTable(BFLOAT16_STOCHASTIC, FLOAT16_STOCHASTIC)
"""The formats of weights without a master that are rounded stochastically."""
STOCHASTIC_FLOAT8 = FormatTable(FLOAT8_E4M3_STOCHASTIC)
"""The same for codes with scales."""
MASTERS = FormatTable(
    FLOAT32,
    SCALED_FLOAT16,
    REMAINDER16,
    NONE,
    REMAINDER8,
    REMAINDER8_STOCHASTIC,
    KAHAN_BFLOAT16,
    KAHAN_BFLOAT16_STOCHASTIC,
    KAHAN_FLOAT16,
    KAHAN_FLOAT16_STOCHASTIC,
)
MOMENTS = FormatTable(
    FLOAT32,
    BFLOAT16,
    SCALED_FLOAT16,
    SCALED_FLOAT8_E4M3,
    BFLOAT16_STOCHASTIC,
    *BLOCKS,
    *LINEAR_BLOCKS,
    *BLOCKS_OF_4_BITS,
)

BESIDE: dict[torch.dtype, dict[Any, Format]] = {
    torch.float16: {"kahan": KAHAN_FLOAT16, "kahan_stochastic": KAHAN_FLOAT16_STOCHASTIC},
    **PAIRS,
}
"""The format that takes a named master's place beside weights, or codes, of a dtype."""


__all__ = [
    "BESIDE",
    "FLOAT8_E4M3",
    "GRADS",
    "MASTERS",
    "MOMENTS",
    "NONE",
    "STOCHASTIC_FLOAT8",
    "STOCHASTIC_WEIGHTS",
    "WEIGHTS",
    "Format",
    "FormatTable",
    "scale_shape",
]
