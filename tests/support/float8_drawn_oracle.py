"""fp8 codes that are drawn, and pairs of code and remainder, from tables of their numbers.

All numbers of e4m3 stand in one list, in order, in fp64: a code, and a pair, is a place in it.
Nothing of megaopt is used here.
"""

import numpy as np

EXPONENT_BITS = 4
LARGEST = 0x7E
NAN = 0x7F


def numbers(mantissa_bits):
    """Those from 0 on, of as many bits of mantissa."""
    bias = 2 ** (EXPONENT_BITS - 1) - 1
    places = np.arange(2 ** (EXPONENT_BITS + mantissa_bits), dtype=np.int64)
    exponent, mantissa = np.divmod(places, 2**mantissa_bits)
    whole = np.where(exponent > 0, 2.0**mantissa_bits, 0.0) + mantissa
    return np.ldexp(whole, np.maximum(exponent, 1) - bias - mantissa_bits)


def place_of(magnitude, mantissa_bits, last, drawn):
    """The place of a number above or below; drawn(share, place): whether it is the one above.

    share: how far the magnitude lies between the two, in parts of fp32's last place: below the
    smallest normal number fp32 has more than are kept, and is rounded to these.
    """
    table = numbers(mantissa_bits)[: last + 2]
    low = np.minimum(np.searchsorted(table, magnitude, side="right") - 1, last)
    step = table[low + 1] - table[low]
    parts = 2.0 ** (23 - mantissa_bits)
    with np.errstate(over="ignore", invalid="ignore"):
        share = np.rint((magnitude - table[low]) / step * parts)
    up = (share >= parts) | drawn(share, low)
    return np.minimum(low + up, last)


def with_sign(code, value):
    code = code | np.where(np.signbit(value), 0x80, 0)
    return np.where(np.isnan(value), NAN, code).astype(np.uint8)


def encode(value, bits):
    """Codes, uint8; value: fp32; bits: 16 random ones of each."""
    mantissa = 7 - EXPONENT_BITS
    magnitude = np.abs(np.where(np.isnan(value), 0, value).astype(np.float64))
    parts = 2.0 ** (23 - mantissa)
    random = (bits.astype(np.float64) + 0.5) / 2**16 * parts
    code = place_of(magnitude, mantissa, LARGEST, lambda share, _: share + random >= parts)
    return with_sign(code, value)


def encode_pair(value, bits):
    """Codes, uint8, and remainders, int8; bits: None to nearest, ties to even."""
    mantissa = 15 - EXPONENT_BITS
    magnitude = np.abs(np.where(np.isnan(value), 0, value).astype(np.float64))
    dropped = 23 - mantissa
    parts = 2.0**dropped

    def drawn(share, place):
        if bits is None:
            return (share > parts / 2) | ((share == parts / 2) & (place % 2 == 1))
        return share + (bits >> (16 - dropped)) >= parts

    wide = place_of(magnitude, mantissa, LARGEST * 256, drawn)
    code = (wide + 128) // 256
    rest = np.where(np.isnan(value), 0, wide - code * 256)
    return with_sign(code, value), rest.astype(np.int8)


def decode_pair(code, rest):
    """fp64 of pairs whose codes are numbers; beyond the codes' numbers the last of these."""
    wide = np.clip((code & 0x7F).astype(np.int64) * 256 + rest, 0, LARGEST * 256)
    magnitude = numbers(15 - EXPONENT_BITS)[wide]
    return np.where(code >= 0x80, -magnitude, magnitude)
