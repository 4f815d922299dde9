"""An independent oracle of 4 bits in blocks: the codes' numbers in a table, all in fp64.

A block's values are divided by 2**(s - 127), s its scale (block_oracle.py), and are then at most 2.
e4m0 has 0 and powers of two up to 2, and 15 is NaN. e3m0 has 0 and 1.5 times powers of two up to
1.5; what is more is 1.5, and beyond 2 (of fp32's largest numbers alone) NaN, code 8. Between two
numbers a value goes up in proportion to its place there; of e3m0 that place is the one of its
product by the fp32 number next to 2 / 3, rounded to fp32.
"""

import numpy as np

F32 = np.float32
TWO_THIRDS = float(F32(2) / F32(3))


def is_unsigned(name):
    return "e4m0" in name


def numbers(name):
    """What the magnitudes stand for, and the one behind the last; fp64."""
    count, top = (15, 2.0) if is_unsigned(name) else (8, 1.5)
    own = np.ldexp(top, np.arange(count + 1) - (count - 1))
    own[0] = 0.0
    return own


def place_of(magnitude, scale, name):
    """The code below each, and how far it is from there to the next one, in 2**-23."""
    scaled = np.ldexp(magnitude.astype(np.float64), 127 - scale)
    table = numbers(name)
    if not is_unsigned(name):
        scaled, table = scaled * TWO_THIRDS, table / 1.5
    grain = table[1] * 2.0**-23  # fp32's own, of what is smaller than 2 units
    near = np.ldexp(scaled, -20).astype(F32).astype(np.float64) * 2.0**20
    scaled = np.where(scaled < 2 * table[1], np.rint(scaled / grain) * grain, near)
    below = np.minimum(np.searchsorted(table, scaled, side="right"), len(table) - 1) - 1
    fraction = (scaled - table[below]) / (table[below + 1] - table[below]) * 2**23
    assert (fraction == np.floor(fraction)).all(), "24 bits are 1 and 23"
    return below, fraction.astype(np.int64)


def encode_each(value, scale, name, bits=None):
    """A code each, uint8, of elements under their blocks' scales; bits: 16 random ones of each."""
    finite = np.isfinite(value)
    magnitude = np.abs(np.where(finite, value, F32(0)))
    below, fraction = place_of(magnitude, scale, name)
    if bits is None:
        up = (fraction > 2**22) | ((fraction == 2**22) & (below % 2 == 1))
    else:
        up = fraction + 128 * bits + 64 >= 2**23
    if is_unsigned(name):
        code = np.where(finite, np.minimum(below + up, 15), 15)
        is_zero = (value == 0) & ~np.signbit(value)
        return np.where(is_zero, code, np.maximum(code, 1)).astype(np.uint8)
    code = np.minimum(below + up, 7)
    with np.errstate(invalid="ignore"):
        code = np.where((value < 0) & (code > 0), code + 8, code)
    beyond = np.ldexp(magnitude.astype(np.float64), 127 - scale) > 2
    return np.where(finite & ~beyond, code, 8).astype(np.uint8)


def decode_each(code, scale, name):
    """The values, fp32."""
    magnitude = code if is_unsigned(name) else code % 8
    exact = np.ldexp(numbers(name)[magnitude], scale.astype(np.int64) - 127)
    exact = exact if is_unsigned(name) else np.where(code > 8, -exact, exact)
    with np.errstate(over="ignore"):
        value = exact.astype(F32)
    nan = np.uint32(0x7FC00000).view(F32)
    return np.where(code == (15 if is_unsigned(name) else 8), nan, value).astype(F32)


def pack(code):
    """Two codes a byte."""
    return (code[::2] + 16 * code[1::2]).astype(np.uint8)


def unpack(stored):
    return np.stack(np.divmod(stored, 16)[::-1], 1).reshape(-1)
