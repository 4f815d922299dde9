"""A model of a product of Hopper's tensor cores, made to be read: docs/numbers.md's "Products".

Written from that text alone, by one who knew neither twin. Numbers come and go as bit patterns;
between them are only Python's integers, which are exact: no float is used anywhere.
"""

from typing import NamedTuple

import numpy

# Of each kind: its dtype, the bits of exponent and fraction, a block's products. TF32 is read as
# the fp32 number it is.
KINDS = {
    "bfloat16": (numpy.uint16, 8, 7, 16),
    "float16": (numpy.uint16, 5, 10, 16),
    "tf32": (numpy.uint32, 8, 23, 8),
}
NAN, INFINITY, SIGN = 0x7FFFFFFF, 0x7F800000, 0x80000000


class Number(NamedTuple):
    """A finite number is integer * 2**unit, and exponent is what step 2 says.

    An infinity's integer is 1 or -1.
    """

    what: str  # "finite", "infinite" or "nan"
    integer: int = 0
    unit: int = 0
    exponent: int = 0


def decode(pattern, exponent_bits, fraction_bits):
    """The number that a bit pattern stands for.

    Step 2: a subnormal number has the smallest normal one's exponent.
    """
    fraction = pattern & ((1 << fraction_bits) - 1)
    field = (pattern >> fraction_bits) & ((1 << exponent_bits) - 1)
    sign = -1 if pattern >> (fraction_bits + exponent_bits) else 1
    if field == (1 << exponent_bits) - 1:
        return Number("nan") if fraction else Number("infinite", sign)
    size = fraction + (
        1 << fraction_bits if field > 0 else 0
    )  # with the leading 1, which is not stored
    exponent = max(field, 1) - ((1 << (exponent_bits - 1)) - 1)
    return Number("finite", sign * size, exponent - fraction_bits, exponent)


def multiply(a, b):
    """The exact product, whose exponent is the sum. Step 6: NaN, and infinity times 0, make NaN."""
    if a.what == "nan" or b.what == "nan":
        return Number("nan")
    integer = a.integer * b.integer
    if a.what == "infinite" or b.what == "infinite":
        return Number("nan") if integer == 0 else Number("infinite", 1 if integer > 0 else -1)
    return Number("finite", integer, a.unit + b.unit, a.exponent + b.exponent)


def cut(integer, unit, new_unit):
    """How many whole 2**new_unit there are in integer * 2**unit: the rest is dropped, towards 0."""
    size = abs(integer)
    size = size << (unit - new_unit) if unit >= new_unit else size >> (new_unit - unit)
    return -size if integer < 0 else size


def encode(integer, unit):
    """Step 5: the fp32 pattern of integer * 2**unit, cut towards 0."""
    if integer == 0:
        return 0
    sign = SIGN if integer < 0 else 0
    exponent = unit + integer.bit_length() - 1  # the magnitude is in [2**exponent, twice that)
    if exponent >= 128:
        return sign | INFINITY
    exponent = max(exponent, -126)
    size = cut(abs(integer), unit, exponent - 23)  # 24 bits, or fewer where it is subnormal
    if size == 0:
        return 0  # +0 of a negative sum too
    field = (
        exponent + 127 if size >= 1 << 23 else 0
    )  # 0: a subnormal number, which has no leading 1
    return sign | field << 23 | size & ((1 << 23) - 1)


def block(s, row, column):
    """The new s, as a pattern, of the pattern s and one block of factors, decoded."""
    terms = [decode(s, 8, 23)] + [multiply(a, b) for a, b in zip(row, column, strict=True)]
    if any(term.what != "finite" for term in terms):  # step 6
        signs = {term.integer for term in terms if term.what == "infinite"}
        if any(term.what == "nan" for term in terms) or len(signs) == 2:
            return NAN
        return INFINITY if signs == {1} else SIGN | INFINITY
    top = max([-133] + [term.exponent for term in terms if term.integer != 0])  # step 3
    unit = top - 25
    return encode(sum(cut(term.integer, term.unit, unit) for term in terms), unit)  # steps 4 and 5


def product(left, right, total, kind):
    """The fp32 patterns [m, n] of total + left right.

    left [m, k], right [k, n]: patterns of kind; total: of fp32.
    """
    dtype, exponent_bits, fraction_bits, length = KINDS[kind]
    (m, k), n = left.shape, right.shape[1]
    assert (left.dtype, right.dtype, total.dtype) == (dtype, dtype, numpy.uint32)
    assert (right.shape, total.shape) == ((k, n), (m, n))
    kept = 0xFFFFE000 if kind == "tf32" else 0xFFFF  # step 1
    rows = [[decode(x & kept, exponent_bits, fraction_bits) for x in row] for row in left.tolist()]
    columns = [
        [decode(x & kept, exponent_bits, fraction_bits) for x in right[:, j].tolist()]
        for j in range(n)
    ]
    result = numpy.zeros((m, n), numpy.uint32)
    for i in range(m):
        for j in range(n):
            s = int(total[i, j])
            for start in range(
                0, k, length
            ):  # a shorter last block needs no zeros: they would add nothing
                s = block(s, rows[i][start : start + length], columns[j][start : start + length])
            result[i, j] = s
    return result
