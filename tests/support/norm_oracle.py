"""The norm of docs/numbers.md in whole numbers and fractions of Python: all elements one block."""

import math
from fractions import Fraction

import numpy as np
import torch

WIDTH = 50


def unit(index):
    return Fraction(2) ** (WIDTH * index)


def squares(values):
    return [Fraction(value) ** 2 for value in values.double().tolist() if value]


def oracle_counts(values):
    """(top bin, its total, the next one's) by the definition, all elements being one block."""
    found = squares(values)
    if not found:
        return None
    top = next(j for j in range(5, -9, -1) if max(found) > unit(j) / 2)
    upper = [round(x / unit(top)) for x in found]
    lower = [round((x - q * unit(top)) / unit(top - 1)) for x, q in zip(found, upper, strict=True)]
    return top, sum(upper), sum(lower)


def oracle_norm(counts):
    """The norm, fp32, in the written order of fp64 operations."""
    if counts is None:
        return torch.tensor(0.0)
    top, *sums = counts
    high_low = [[float(limb) for limb in divmod(value, 2**26)] for value in sums]
    leading, trailing = (high * 2.0**26 + low for high, low in high_low)
    square = (leading * 2.0**50 + trailing) * 2.0 ** (WIDTH * (top - 1))
    with np.errstate(over="ignore"):
        return torch.tensor(np.float32(math.sqrt(square)))
