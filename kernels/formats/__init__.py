"""The formats of every buffer. Dispatch, documentation and tests are derived from these tables."""

from __future__ import annotations

from megaopt.kernels.formats.base import Format, FormatTable, scale_shape
from megaopt.kernels.formats.bfloat16 import BFLOAT16
from megaopt.kernels.formats.float8 import FLOAT8_E4M3, FLOAT8_E5M2, SCALED_FLOAT8_E4M3
from megaopt.kernels.formats.float16 import FLOAT16, SCALED_FLOAT16
from megaopt.kernels.formats.float32 import FLOAT32, decode, decode_reference, encode
from megaopt.kernels.formats.float32 import encode_reference as _encode_reference
from megaopt.kernels.formats.remainder16 import REMAINDER16
from megaopt.kernels.optional_triton import tl

NONE = Format("none", None, tl.int8, decode, encode, decode_reference, _encode_reference)
"""No buffer."""

GRADS = FormatTable(FLOAT32, BFLOAT16, FLOAT16)
WEIGHTS = FormatTable(FLOAT32, BFLOAT16, FLOAT16)
MASTERS = FormatTable(FLOAT32, SCALED_FLOAT16, REMAINDER16, NONE)
MOMENTS = FormatTable(FLOAT32, BFLOAT16, SCALED_FLOAT16, SCALED_FLOAT8_E4M3)


__all__ = [
    "FLOAT8_E4M3",
    "FLOAT8_E5M2",
    "GRADS",
    "MASTERS",
    "MOMENTS",
    "NONE",
    "WEIGHTS",
    "Format",
    "FormatTable",
    "scale_shape",
]
