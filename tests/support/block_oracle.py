"""An independent oracle of 8 and 4 bits in blocks: the codes' numbers in a table, all in fp64.

Nothing of megaopt is used here, and no bit pattern but that of a code. A block with the largest
finite magnitude amax has the scale s, a byte from 1 to 253, such that 2**(s - 127) < amax <=
2**(s - 126). Its values are divided by 2**(s - 127), and are then at most 2, at s = 253 less
than 4. A code is 3 bits of mantissa below 4 (e4m3, signed) or 5 (e5m3) of exponent, the lowest
of which has subnormals; the largest code is NaN, and what is not finite becomes it.

Of 4 bits (block4_oracle.py) this has what is the same: which block an element is of, and its scale;
of linear codes (block_int8_oracle.py) which block an element is of.
"""

import block4_oracle
import block_int8_oracle
import numpy as np

F32 = np.float32
SMALLEST, LARGEST = 1, 253


def is_unsigned(name):
    return "e5m3" in name


def is_linear(name):
    return "int8" in name


def block_of(name):
    return {"block64": 64, "block32": 32}.get(name.partition("_")[0], 128)


def nan_code(unsigned):
    return 255 if unsigned else 127


def unit(unsigned):
    """The smallest number beside 0."""
    return 2.0 ** (-32 if unsigned else -16)


def numbers(unsigned):
    """What each code stands for, and the one behind the last; fp64."""
    exponent, mantissa = np.divmod(np.arange(nan_code(unsigned) + 2), 8)
    normal = np.ldexp(8.0 + mantissa, exponent - 1)
    return np.where(exponent == 0, mantissa, normal) * unit(unsigned)


def scales(amax):
    """Of blocks, from their largest finite magnitudes."""
    mantissa, exponent = np.frexp(np.asarray(amax, np.float64))
    above = np.where(mantissa == 0.5, exponent - 1, exponent)  # amax <= 2**above
    above = np.where(mantissa == 0.0, -1000, above)
    return np.clip(above + 126, SMALLEST, LARGEST).astype(np.uint8)


def block_scales(value, name, lead):
    """The scales of the blocks that `value` lies in, from `lead` elements behind a first one on."""
    block = block_of(name)
    scales_of = block_int8_oracle.scales if is_linear(name) else scales
    magnitude = np.abs(np.where(np.isfinite(value), value, F32(0)))
    count = -(-(lead + len(value)) // block) if len(value) else 0
    padded = np.zeros(count * block, F32)
    padded[lead : lead + len(value)] = magnitude
    return scales_of(padded.reshape(count, block).max(1) if count else padded)


def each(scale, block, lead, count):
    """A block's scale for each element, int64."""
    return np.repeat(scale.astype(np.int64), block)[lead : lead + count]


def place_of(magnitude, scale, unsigned):
    """The code below each, and how far it is from there to the next one, in 2**-20."""
    grain = unit(unsigned) * 2.0**-20  # fp32's own, of what is smaller than 8 units
    scaled = np.rint(np.ldexp(magnitude.astype(np.float64), 127 - scale) / grain) * grain
    table = numbers(unsigned)
    below = np.searchsorted(table, scaled, side="right") - 1
    fraction = (scaled - table[below]) / (table[below + 1] - table[below]) * 2**20
    assert (fraction == np.floor(fraction)).all(), "24 bits are 4 and 20"
    return below, fraction.astype(np.int64)


def encode_each(value, scale, unsigned, bits=None):
    """The codes, uint8, of elements under their blocks' scales; bits: 16 random ones of each."""
    finite = np.isfinite(value)
    below, fraction = place_of(np.abs(np.where(finite, value, F32(0))), scale, unsigned)
    if bits is None:
        up = (fraction > 2**19) | ((fraction == 2**19) & (below % 2 == 1))
    else:
        up = fraction + 16 * bits + 8 >= 2**20
    code = np.where(finite, np.minimum(below + up, nan_code(unsigned)), nan_code(unsigned))
    if unsigned:
        is_zero = (value == 0) & ~np.signbit(value)
        return np.where(is_zero, code, np.maximum(code, 1)).astype(np.uint8)
    with np.errstate(invalid="ignore"):
        return np.where(value < 0, code + 128, code).astype(np.uint8)


def encode(name, value, lead=0, bits=None):
    """Codes and scales of consecutive elements by a format's name."""
    found = block_scales(value, name, lead)
    own = each(found, block_of(name), lead, len(value))
    bits = None if name.endswith("_nearest") else bits
    if block_of(name) == 32:
        return block4_oracle.pack(block4_oracle.encode_each(value, own, name, bits)), found
    if is_linear(name):
        return block_int8_oracle.encode_each(value, own, bits), found
    return encode_each(value, own, is_unsigned(name), bits), found


def decode_each(code, scale, unsigned):
    """The values, fp32: rounded once where they are subnormal."""
    magnitude = code.astype(np.int64) if unsigned else code.astype(np.int64) % 128
    exact = np.ldexp(numbers(unsigned)[magnitude], scale.astype(np.int64) - 127)
    exact = np.where(~np.asarray(unsigned) & (code >= 128), -exact, exact)
    with np.errstate(over="ignore"):
        value = exact.astype(F32)
    nan = np.uint32(0x7FC00000).view(F32)
    return np.where(magnitude == nan_code(unsigned), nan, value).astype(F32)


def decode(name, code, scale, lead=0):
    """The values of consecutive elements by a format's name."""
    if block_of(name) == 32:
        code = block4_oracle.unpack(code)
        return block4_oracle.decode_each(code, each(scale, 32, lead, len(code)), name)
    own = each(scale, block_of(name), lead, len(code))
    if is_linear(name):
        return block_int8_oracle.decode_each(code, own)
    return decode_each(code, own, is_unsigned(name))
