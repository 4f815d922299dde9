"""An independent oracle of 8 bits in blocks that are linear: numpy's fp64 and integers alone.

A block whose largest finite magnitude is amax has the largest scale s, a byte from 1 to 253, such
that amax > 127/128 * 2**(s - 127), or 1. A code is a multiple of 2**(s - 127) / 64: a magnitude up
to 127, plus 128 below 0. 128 is NaN, and what is not finite, or rounds to 128 multiples, becomes
it. Between two codes fp32 has 2**17 places, of which it takes the nearest.
"""

import numpy as np

F32 = np.float32
PLACES = 17


def scales(amax):
    """Of blocks, from their largest finite magnitudes."""
    mantissa, exponent = np.frexp(np.asarray(amax, np.float64))  # of 0 both are 0
    above = np.where(mantissa > 127 / 128, exponent, exponent - 1)
    return np.clip(np.where(mantissa == 0, 1, above + 127), 1, 253).astype(np.uint8)


def encode_each(value, scale, bits=None):
    """The codes, uint8, of elements under their blocks' scales; bits: 16 random ones of each."""
    finite = np.isfinite(value)
    magnitude = np.abs(np.where(finite, value, F32(0))).astype(np.float64)
    places = np.rint(np.ldexp(magnitude, 127 - scale + 6 + PLACES))
    below, place = np.divmod(np.minimum(places, 2.0**40).astype(np.int64), 2**PLACES)
    if bits is None:
        middle = 2 ** (PLACES - 1)
        up = (place > middle) | ((place == middle) & (below % 2 == 1))
    else:
        up = place + 2 * bits + 1 >= 2**PLACES
    code = np.where(finite, np.minimum(below + up, 128), 128)
    with np.errstate(invalid="ignore"):
        negative = (value < 0) & (code > 0) & (code < 128)
    return np.where(negative, code + 128, code).astype(np.uint8)


def decode_each(code, scale):
    """The values, fp32."""
    magnitude = np.ldexp((code % 128).astype(np.float64), scale.astype(np.int64) - 133)
    value = np.where(code > 128, -magnitude, magnitude).astype(F32)
    return np.where(code == 128, np.uint32(0x7FC00000).view(F32), value)
