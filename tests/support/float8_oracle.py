"""An independent oracle of fp8 weights: numpy and ml_dtypes, block by block, fp64 rounded once.

Reciprocals by way of fp64 are exact. 1 / x of fp32 x is rounded to fp64, with a relative error of
at most 2**-53, then to fp32. That differs from one rounding only if the fp64 number is a middle m
between two fp32 numbers while 1 / x is not. m has at most 25 bits and x 24 (a subnormal result has
fewer), so that m * x is a multiple of 2**-50 near 1: it is 1, and then 1 / x = m, or it differs
from 1 by 2**-50 or more, which is not within 2**-53. Quotients of fp32 numbers: Figueroa 1995, as
in oracle.py.
"""

import numpy as np
from oracle import F32, divide, multiply

MAX = 448.0
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
