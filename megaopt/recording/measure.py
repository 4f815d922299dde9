"""Distances of sampled elements of two runs: relative norms, and units in the last place."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any, NamedTuple

import numpy

Array = numpy.ndarray[Any, Any]
FLOATS = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes of floats; other floats are of one byte."""


def as_numbers(bits: Array, dtype: str) -> Array:
    """Returns sampled elements in fp64.

    Args:
        bits: unsigned integers, of which those of the dtype's width count.
        dtype: as torch prints it, without "torch."; codes of an unknown one count as numbers.
    """
    with numpy.errstate(invalid="ignore"):  # of a NaN that signals
        if dtype == "bfloat16":
            return (bits.astype("<u4") << 16).view(numpy.float32).astype(numpy.float64)
        if size := FLOATS.get(dtype):
            return bits.astype(f"<u{size}").view(f"<f{size}").astype(numpy.float64)
        if dtype == "float8_e5m2":
            return (bits.astype("<u2") << 8).view(numpy.float16).astype(numpy.float64)
        if dtype == "float8_e4m3fn":
            # 3 mantissa bits below an exponent of bias 7: those of an fp16 of bias 15, 2**8 times
            code = bits.astype("<u2")
            halves = ((code & 0x80) << 8 | (code & 0x7F) << 7).view(numpy.float16)
            return numpy.where(code & 0x7F == 0x7F, numpy.nan, halves.astype(numpy.float64) * 256)
        return bits.astype(numpy.float64)


def _places(bits: Array, dtype: str) -> Array:
    """Returns places on the number line in units in the last place; +-0 is 0.

    They are Python's integers for elements of 8 bytes: their differences do not fit into 64 bits.
    """
    codes = bits.astype(object if bits.itemsize == 8 else numpy.int64)
    if not dtype.startswith(("float", "bfloat")):
        return codes
    sign = 1 << (8 * FLOATS.get(dtype, 1) - 1)
    return numpy.where(codes >= sign, sign - codes, codes)


def farthest(bits: Array, other_bits: Array, dtype: str) -> tuple[float, int]:
    """Returns the largest difference of elements at the same places, and in last places.

    The first is infinite where one of two is no finite number.
    """
    with numpy.errstate(all="ignore"):
        apart = abs(as_numbers(other_bits, dtype) - as_numbers(bits, dtype))
    apart[~numpy.isfinite(apart)] = math.inf
    return float(apart.max()), int(abs(_places(bits, dtype) - _places(other_bits, dtype)).max())


class Distance(NamedTuple):
    """The distance of elements of one run from another's, which adds over tensors."""

    difference: float
    """Sum of the squares of the differences."""
    norm: float
    """Sum of the squares of the first run's."""
    ulps: Counter[int]
    """Counts of elements, by their difference of 0 units in the last place (0), 1 (1), 2-3 (2), 4-7
    (3) ..."""
    largest: int
    """Units in the last place."""

    @property
    def relative(self) -> float:
        """The norm of the difference over the norm; 0 where nothing differs."""
        if self.difference == 0:
            return 0.0
        return math.sqrt(self.difference / self.norm) if self.norm else math.inf

    def plus(self, addend: Distance) -> Distance:
        """Returns the distance of both tensors together."""
        difference, norm = self.difference + addend.difference, self.norm + addend.norm
        largest = max(self.largest, addend.largest)
        return Distance(difference, norm, self.ulps + addend.ulps, largest)


NEAR = Distance(0.0, 0.0, Counter(), 0)
"""The distance of nothing."""


def distance(bits: Array, other_bits: Array, dtype: str, other_dtype: str) -> Distance:
    """Measures elements at the same places; those of two dtypes without units in the last place.

    Elements of the same bits lie 0 apart, whatever they are; others that are no finite numbers lie
    infinitely far apart.
    """
    with numpy.errstate(all="ignore"):
        numbers, other_numbers = as_numbers(bits, dtype), as_numbers(other_bits, other_dtype)
        apart = numpy.where(numbers == other_numbers, 0.0, other_numbers - numbers)
        if dtype == other_dtype:
            apart[bits == other_bits] = 0.0
        apart[~numpy.isfinite(apart)] = math.inf
        finite = numbers[numpy.isfinite(numbers)]
        squares = float(numpy.square(apart).sum()), float(numpy.square(finite).sum())
    if dtype != other_dtype:
        return Distance(*squares, Counter(), 0)
    steps = abs(_places(bits, dtype) - _places(other_bits, dtype)).tolist()
    return Distance(*squares, Counter(map(int.bit_length, steps)), max(steps, default=0))
