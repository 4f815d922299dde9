"""The formats of every buffer. Dispatch, documentation and tests are derived from these tables."""

from __future__ import annotations

import torch

from megaopt.kernels.formats.base import Format
from megaopt.kernels.formats.bfloat16 import BFLOAT16
from megaopt.kernels.formats.float8 import FLOAT8_E4M3, FLOAT8_E5M2, SCALED_FLOAT8_E4M3
from megaopt.kernels.formats.float16 import FLOAT16, SCALED_FLOAT16
from megaopt.kernels.formats.float32 import FLOAT32, decode, decode_reference, encode
from megaopt.kernels.formats.float32 import encode_reference as _encode_reference
from megaopt.kernels.formats.remainder16 import REMAINDER16
from megaopt.kernels.optional_triton import tl

NONE = Format("none", None, tl.int8, decode, encode, decode_reference, _encode_reference)
"""No buffer."""

GRADS = {f.dtype: f for f in (FLOAT32, BFLOAT16, FLOAT16)}
WEIGHTS = {f.dtype: f for f in (FLOAT32, BFLOAT16, FLOAT16)}
MASTERS = {f.dtype: f for f in (FLOAT32, SCALED_FLOAT16, REMAINDER16, NONE)}
MOMENTS = {f.dtype: f for f in (FLOAT32, BFLOAT16, SCALED_FLOAT16, SCALED_FLOAT8_E4M3)}


def names(table: dict[torch.dtype | None, Format]) -> str:
    """What a table allows, for an error message: the dtypes, in the table's order."""
    return ", ".join(str(dtype) for dtype in table)


__all__ = [
    "FLOAT8_E4M3",
    "FLOAT8_E5M2",
    "GRADS",
    "MASTERS",
    "MOMENTS",
    "NONE",
    "WEIGHTS",
    "Format",
    "names",
]
