"""An independent oracle of fp8 weights: numpy and ml_dtypes, block by block, fp64 rounded once.

Reciprocals by way of fp64 are exact. 1 / x of fp32 x is rounded to fp64, with a relative error of
at most 2**-53, then to fp32. That differs from one rounding only if the fp64 number is a middle m
between two fp32 numbers while 1 / x is not. m has at most 25 bits and x 24 (a subnormal result has
fewer), so that m * x is a multiple of 2**-50 near 1: it is 1, and then 1 / x = m, or it differs
from 1 by 2**-50 or more, which is not within 2**-53. Quotients of fp32 numbers: Figueroa 1995, as
in oracle.py.
"""

import ml_dtypes
import numpy as np
from oracle import F32, divide, float8_codes, multiply

MAX = 448.0
CODES = ml_dtypes.float8_e4m3fn
BLOCKS = {"block_128x128": (128, 128), "mxfp8": (1, 32)}


def scale_of(amax, code_max, epsilon=0.0, power_of_two=False, otherwise=1.0):
    """One number."""
    amax = max(F32(amax), F32(epsilon)) if not np.isnan(amax) else amax
    if amax == 0 or not np.isfinite(amax):
        return F32(otherwise)
    with np.errstate(over="ignore"):
        scale = divide(F32(code_max), F32(amax))
    if np.isinf(scale):
        scale = np.finfo(F32).max
    if power_of_two:
        scale = np.ldexp(1.0, np.frexp(np.float64(scale))[1] - 1)
    return F32(scale)


def e8m0_of(amax, code_max):
    quotient = float(multiply(F32(amax), F32(1.0 / code_max)))
    if np.isnan(quotient):
        return 0xFF
    if np.isinf(quotient):
        return 0xFE
    for code in range(0xFF):  # the least power of two that is not smaller
        if quotient <= 2.0 ** (code - 127):
            return code
    return 0xFE


def amax_of(values):
    known = np.abs(values[~np.isnan(values)])
    return F32(known.max()) if known.size else F32(0)


def rounded(values, dtype):
    with np.errstate(over="ignore", invalid="ignore"):
        return values.astype(dtype).astype(F32)


def quantize(values, scaling, *, dtype=None, scale=None, epsilon=0.0, power_of_two=False):
    """Codes (uint8), scales, their inverses, amaxes; values are rounded to `dtype` first."""
    values = values if dtype is None else rounded(values, dtype)
    rows, columns = values.shape
    tall, wide = BLOCKS.get(scaling, (max(rows, 1), max(columns, 1)))
    grid = (-(-rows // tall), -(-columns // wide)) if scaling in BLOCKS else (1, 1)
    codes = np.zeros(values.shape, np.uint8)
    scales, amaxes = np.zeros(grid, F32), np.zeros(grid, F32)
    inverses = np.zeros(grid, np.uint8 if scaling == "mxfp8" else F32)
    for i, j in np.ndindex(*grid):
        place = np.s_[i * tall : (i + 1) * tall, j * wide : (j + 1) * wide]
        amaxes[i, j] = amax_of(values[place])
        if scaling == "mxfp8":
            inverses[i, j] = e8m0_of(amaxes[i, j], MAX)
            scales[i, j] = F32(2.0 ** (127 - int(inverses[i, j])))
        else:
            found = scale_of(amaxes[i, j], MAX, epsilon, power_of_two)
            scales[i, j] = found if scale is None else scale
            inverses[i, j] = divide(F32(1), scales[i, j])
        codes[place] = float8_codes(multiply(values[place], scales[i, j]), CODES)
    if scaling not in BLOCKS:
        scales, inverses, amaxes = (array.reshape(1) for array in (scales, inverses, amaxes))
    return codes, scales, inverses, amaxes


def dequantize(codes, inverses, scaling):
    """fp32, not yet rounded to the weight's dtype; NaNs are one."""
    values = codes.view(CODES).astype(F32)
    if scaling == "mxfp8":
        inverses = (2.0 ** (inverses.astype(np.float64) - 127)).astype(F32)
    out = np.zeros(codes.shape, F32)
    tall, wide = BLOCKS.get(scaling, codes.shape)
    for i, j in np.ndindex(*codes.shape):
        inverse = inverses[i // tall, j // wide] if scaling in BLOCKS else inverses[0]
        out[i, j] = multiply(values[i, j], inverse)
    return out
