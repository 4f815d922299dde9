"""An independent oracle of 8 and 4 bits in blocks: the codes' numbers in a table, all in fp64.

Nothing of megaopt is used here, and no bit pattern but that of a code. A block with the largest
finite magnitude amax has a scale s, a byte from 1 to 253: the least such that amax <= 2**(s - 126),
and of linear codes the largest such that amax > 127/128 * 2**(s - 127), or 1. Its values are
divided by 2**(s - 127), and are then at most 2, at s = 253 less than 4.
"""

from typing import Any, NamedTuple

import numpy as np

F32 = np.float32
NAN = np.uint32(0x7FC00000).view(F32)
TWO_THIRDS = float(F32(2) / F32(3))


class Codes(NamedTuple):
    """What codes of a kind stand for."""

    numbers: Any
    """Of magnitudes from 0 on, up to 4 or to the one behind the last; fp64."""
    bits: int
    """Of an fp32 mantissa so many lie between two neighbours, however small these are."""
    top: int
    """Numbers do not round to more."""
    nan: int
    """What is not finite becomes it; or all that rounds to it."""
    sign: int = 0
    """Is added below 0. Where it is the NaN too there is no -0."""


def small_floats(count, smallest):
    """Three bits of mantissa, and exponents of which the lowest has subnormals."""
    exponent, mantissa = np.divmod(np.arange(count), 8)
    return np.where(exponent == 0, mantissa, np.ldexp(8.0 + mantissa, exponent - 1)) * smallest


def powers(count, top):
    """0, and powers of two times `top`, which is the last but one."""
    return np.where(np.arange(count) > 0, np.ldexp(top, np.arange(count) - (count - 2)), 0.0)


KINDS = {
    "e4m3": Codes(small_floats(129, 2.0**-16), 20, 127, 127, 128),
    "e5m3": Codes(small_floats(257, 2.0**-32), 20, 255, 255),
    "e4m0": Codes(powers(16, 2.0), 23, 15, 15),
    "e3m0": Codes(powers(9, 1.5), 23, 7, 8, 8),
    "int8": Codes(np.arange(257) / 64, 17, 128, 128, 128),
}


def kind_of(name):
    return next(kind for kind in KINDS if kind in name)


def block_of(name):
    return {"block64": 64, "block32": 32}.get(name.partition("_")[0], 128)


def numbers(name):
    """What each code from 0 on stands for by a format's name, and the one behind the last."""
    return KINDS[kind_of(name)].numbers


def scales(amax, linear=False):
    """Of blocks, from their largest finite magnitudes."""
    mantissa, exponent = np.frexp(np.asarray(amax, np.float64))  # of 0 both are 0
    least, above = (126, 127 / 128) if linear else (125, 0.5)
    scale = exponent + least + (mantissa > above)
    return np.clip(np.where(mantissa == 0, 1, scale), 1, 253).astype(np.uint8)


def block_scales(value, name, lead):
    """The scales of the blocks that `value` lies in, from `lead` elements behind a first one on."""
    block = block_of(name)
    magnitude = np.abs(np.where(np.isfinite(value), value, F32(0)))
    count = -(-(lead + len(value)) // block) if len(value) else 0
    padded = np.zeros(count * block, F32)
    padded[lead : lead + len(value)] = magnitude
    return scales(padded.reshape(count, block).max(1) if count else padded, "int8" in name)


def each(scale, block, lead, count):
    """A block's scale for each element, int64."""
    return np.repeat(scale.astype(np.int64), block)[lead : lead + count]


def encode_each(value, scale, name, bits=None):
    """A code each, uint8, of elements under their blocks' scales.

    bits: 16 random ones of each; a value goes up in proportion to its place between two codes.
    """
    kind, finite = kind_of(name), np.isfinite(value)
    table, places, top, nan, sign = KINDS[kind]
    scaled = np.ldexp(np.abs(np.where(finite, value, F32(0))).astype(np.float64), 127 - scale)
    is_nan = ~finite
    if kind == "e3m0":  # by the product with fp32's 2 / 3, which is rounded to fp32
        is_nan, scaled, table = is_nan | (scaled > 2), scaled * TWO_THIRDS, table / 1.5
        near = np.ldexp(scaled, -20).astype(F32).astype(np.float64) * 2.0**20
        scaled = np.where(scaled < 2 * table[1], scaled, near)
    grain = table[1] * 2.0**-places  # fp32's own, of what is smaller than the first few numbers
    scaled = np.rint(scaled / grain) * grain
    below = np.minimum(np.searchsorted(table, scaled, side="right"), len(table) - 1) - 1
    place = (scaled - table[below]) / (table[below + 1] - table[below]) * 2**places
    assert (place == np.floor(place)).all(), "fp32 has 24 bits"
    if bits is None:
        middle = 2 ** (places - 1)
        up = (place > middle) | ((place == middle) & (below % 2 == 1))
    else:
        up = place + 2.0 ** (places - 16) * (bits + 0.5) >= 2**places
    code = np.where(is_nan, nan, np.minimum(below + up, top))
    if not sign:
        is_zero = (value == 0) & ~np.signbit(value)
        return np.where(is_zero, code, np.maximum(code, 1)).astype(np.uint8)
    with np.errstate(invalid="ignore"):
        negative = (value < 0) & (code < sign) & ((code > 0) | (nan != sign))
    return np.where(negative, code + sign, code).astype(np.uint8)


def encode(name, value, lead=0, bits=None):
    """Codes and scales of consecutive elements by a format's name."""
    found = block_scales(value, name, lead)
    own = each(found, block_of(name), lead, len(value))
    code = encode_each(value, own, name, None if name.endswith("_nearest") else bits)
    return (pack(code) if block_of(name) == 32 else code), found


def decode(name, code, scale, lead=0):
    """The values of consecutive elements, fp32: rounded once where they are subnormal."""
    code = unpack(code) if block_of(name) == 32 else code
    table, _, _, nan, sign = KINDS[kind_of(name)]
    magnitude = code.astype(np.int64) % (sign or 256)
    own = each(scale, block_of(name), lead, len(code))
    exact = np.ldexp(table[magnitude], own - 127)
    with np.errstate(over="ignore"):
        value = np.where((code >= sign) & (sign > 0), -exact, exact).astype(F32)
    return np.where((code if nan == sign else magnitude) == nan, NAN, value).astype(F32)


def pack(code):
    """Two codes a byte."""
    return (code[::2] + 16 * code[1::2]).astype(np.uint8)


def unpack(stored):
    return np.stack(np.divmod(stored, 16)[::-1], 1).reshape(-1)
