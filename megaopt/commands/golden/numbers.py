"""Hard numbers from a seed, the same on every machine: made of integers, bit by bit."""

from __future__ import annotations

import numpy
import torch
from numpy.typing import NDArray

Words = NDArray[numpy.uint64]
Patterns = NDArray[numpy.int64]
"""The bits of fp32 numbers."""

SIGN, INFINITY, NAN = 0x80000000, 0x7F800000, 0x7FC00000
ONE = 0x3F800000
SUBNORMAL = 0x007F0000
"""The bits of an fp32 mantissa that bf16 has too."""

LOWEST_BINADE, BINADES = -24, 28
"""Magnitudes are from 2**-24 up to 2**4: of all three dtypes numbers, the lowest ten binades of
fp16 subnormal."""

LOWEST_NORMAL_OF_FP16 = -14
KEPT_BITS = {torch.float32: 23, torch.bfloat16: 7, torch.float16: 10}
"""How many bits of an fp32 mantissa each dtype has room for: a conversion rounds nothing."""

COARSE_TOP = 0x41600000
"""14, the first number of a coarse row: a power of two times 448."""


def _mixed(words: Words) -> Words:
    """The last part of the splitmix64 generator; products and sums are modulo 2**64."""
    words = (words ^ (words >> numpy.uint64(30))) * numpy.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> numpy.uint64(27))) * numpy.uint64(0x94D049BB133111EB)
    mixed: Words = words ^ (words >> numpy.uint64(31))
    return mixed


def words(count: int, *seeds: int) -> Words:
    """So many 64-bit words of splitmix64; other seeds, or another order of them, give others."""
    start = numpy.zeros(1, dtype=numpy.uint64)
    for seed in seeds:
        start = _mixed(start + numpy.uint64(seed + 1))
    places = numpy.arange(1, count + 1, dtype=numpy.uint64)
    return _mixed(start + places * numpy.uint64(0x9E3779B97F4A7C15))


def _field(drawn: Words, start: int, width: int) -> Patterns:
    mask = numpy.uint64((1 << width) - 1)
    found: Patterns = ((drawn >> numpy.uint64(start)) & mask).astype(numpy.int64)
    return found


def patterns(drawn: Words, dtype: torch.dtype) -> Patterns:
    """fp32 patterns, one a word, of numbers that `dtype` holds exactly.

    Of 32, one is a zero and one is subnormal (in fp16 by its exponent anyway), of either sign.
    """
    exponent = LOWEST_BINADE + _field(drawn, 23, 16) % BINADES
    dropped = numpy.full_like(exponent, 23 - KEPT_BITS[dtype])
    if dtype == torch.float16:
        dropped += numpy.maximum(LOWEST_NORMAL_OF_FP16 - exponent, 0)
    mantissa = (_field(drawn, 0, 23) >> dropped) << dropped
    kind = _field(drawn, 40, 5)
    magnitude = ((exponent + 127) << 23) | mantissa
    if dtype != torch.float16:
        magnitude = numpy.where(kind == 1, mantissa, magnitude)
    magnitude = numpy.where(kind == 0, 0, magnitude)
    return (_field(drawn, 63, 1) << 31) | magnitude


def coarse(bits: Patterns) -> Patterns:
    """Numbers of at most 8 significant bits below 14, their first: scales by 448 are powers of two.

    So that products with a scale, and sums, are often halfway between two codes.
    """
    bits = bits & 0xFFFF0000
    top = ((bits >> 23) & 0xFF) == LOWEST_BINADE + BINADES - 1 + 127
    bits = numpy.where(top, bits & ~(1 << 22), bits)
    bits[:1] = COARSE_TOP
    return bits


def normal(bits: Patterns) -> Patterns:
    """Zeros and subnormal numbers become numbers in [1, 2), with their bits."""
    return numpy.where(bits & INFINITY, bits, bits | ONE)


def with_some(pattern: int, kind: int, bits: Patterns, drawn: Words) -> Patterns:
    """One number of 64 becomes a pattern, of its own sign; others by another kind, below 64."""
    return numpy.where(_field(drawn, 48, 6) == kind, (bits & SIGN) | pattern, bits)


def tensor_of(bits: Patterns, dtype: torch.dtype) -> torch.Tensor:
    """Numbers, on the CPU, of fp32 patterns that the dtype holds exactly; NaNs keep their sign."""
    if dtype == torch.bfloat16:
        return torch.from_numpy((bits >> 16).astype(numpy.uint16).view(numpy.int16)).view(dtype)
    values = bits.astype(numpy.uint32).view(numpy.float32)
    if dtype == torch.float16:
        # processors convert a NaN differently
        is_nan = numpy.isnan(values)
        codes = numpy.where(is_nan, 0, values).astype(numpy.float16).view(numpy.uint16)
        codes = numpy.where(is_nan, (bits >> 16) & 0x8000 | 0x7E00, codes)
        return torch.from_numpy(codes.astype(numpy.uint16).view(numpy.float16))
    return torch.from_numpy(values)
