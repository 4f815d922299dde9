"""The parameters and gradients of a case.

Hard numbers from a seed, the same on every machine: made of integers, bit by bit.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import megaopt
from megaopt.lab.golden.cases import GoldenCase
from megaopt.recording.inputs import mixed

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
"""The bits of an fp32 mantissa that each dtype has room for: a conversion rounds nothing."""

COARSE_TOP = 0x41600000
"""14, the first number of a coarse row: a power of two times 448."""

LATE = 11
"""The step at which parameters of the kind "late" get their first gradient that is not zero."""

WITHOUT_GRAD = (4, 5, 12)
"""Steps at which every third parameter has no gradient."""

NONFINITE = (5, 8)
"""Steps at which gradients have NaNs and infinities; weights have them from the start."""


@dataclass(frozen=True)
class ParameterSpec:
    """One parameter. Those of the first group stand before those of the second."""

    shape: tuple[int, ...]
    group: int
    kind: str = "hard"
    """ "hard", "coarse", "normal": see `_drawn`; "still": gradients are zeros of both
    signs; "late": so are the weights, and the gradients until step LATE; "tiny": still, and weights
    are subnormal, so that their scales overflow; "normal": no zeros, nothing subnormal."""
    offset: int = 0
    """Elements from an aligned address, of weight and gradient."""
    transposed: bool = False
    """Columns lie together in memory, not rows."""
    float8: bool = False
    """Kept in fp8 where the case has a recipe."""


# sizes around a block of 512 and a program's 2,048
PLAIN = (
    ParameterSpec((0,), 0),
    ParameterSpec((1,), 0),
    ParameterSpec((7,), 0),
    ParameterSpec((511,), 0),
    ParameterSpec((513,), 0, offset=1),
    ParameterSpec((5003,), 0),
    ParameterSpec((48,), 0, "late"),
    ParameterSpec((512,), 1),
    ParameterSpec((2049,), 1, offset=3),
    ParameterSpec((33, 65), 1, transposed=True),
    ParameterSpec((513,), 1, "still"),
    ParameterSpec((40, 17), 1, "coarse"),
)
# tiles of 128 x 128, whole and cut, and blocks cut by a few columns
MATRICES = (
    ParameterSpec((130, 140), 0, float8=True),
    ParameterSpec((5, 96), 0, float8=True),
    ParameterSpec((513,), 0, offset=1),
    ParameterSpec((2, 48), 0, "late", float8=True),
    ParameterSpec((1, 33), 1, float8=True),
    ParameterSpec((7,), 1),
    ParameterSpec((24, 64), 1, "tiny", float8=True),
    ParameterSpec((16, 160), 1, "coarse", float8=True),
)
# of 4,096 elements and more, whose moments may be in blocks: rows of whole blocks, of whole blocks
# of 64 or 32 alone, and of none
LARGE = (
    ParameterSpec((40, 104), 0),
    ParameterSpec((7,), 0),
    ParameterSpec((33, 128), 0, offset=1),
    ParameterSpec((36, 128), 0, "late"),
    ParameterSpec((65, 64), 1, "coarse"),
    ParameterSpec((47, 128), 1, transposed=True),
    ParameterSpec((2, 2176), 1, "still"),
)
# tall and wide, and one that no rank makes smaller; projected gradients of 4,096 elements and more
PROJECTED = (
    ParameterSpec((70, 40), 0, "normal"),
    ParameterSpec((513,), 0, offset=1),
    ParameterSpec((13, 131), 0, "normal", offset=1),
    ParameterSpec((5, 7), 0),
    ParameterSpec((40, 90), 1, "normal", transposed=True),
    ParameterSpec((1400, 16), 1, "normal"),
    ParameterSpec((7,), 1),
)


# the last keeps projected moments in blocks, in rows of several
PROJECTED_IN_BLOCKS = (*PROJECTED[:5], ParameterSpec((8, 2048), 1, "normal"), PROJECTED[-1])
# wide, tall, a batch, a column, and one whose momentum may be in blocks
OF_MUON = (
    ParameterSpec((24, 70), 0),
    ParameterSpec((513,), 0, offset=1),
    ParameterSpec((3, 8, 12), 0),
    ParameterSpec((17, 1), 0, "late"),
    ParameterSpec((70, 24), 1, offset=1),
    ParameterSpec((33, 128), 1, transposed=True),
    ParameterSpec((9, 7), 1, "still"),
)


def specs_of(case: GoldenCase) -> tuple[ParameterSpec, ...]:
    """Returns the specs of a case's parameters."""
    if case.is_projected:
        return PROJECTED_IN_BLOCKS if case.has_blocks else PROJECTED
    if case.kind.optimizer == "FusedMuon":
        return OF_MUON
    if case.has_blocks:
        return LARGE
    return PLAIN if case.recipe is None else MATRICES


def parameters(case: GoldenCase, device: torch.device) -> list[Tensor]:
    """The parameters of a case, with their first values."""
    params: list[Tensor] = []
    for index, spec in enumerate(specs_of(case)):
        bits, drawn = _drawn(spec, case.weight, (0, index))
        if spec.kind == "late":
            bits = bits & SIGN
        elif spec.kind == "tiny" and case.weight != torch.float16:
            bits = bits & (SIGN | SUBNORMAL)
        else:
            nan = case.has("nan") or case.has("nonfinite")
            infinite = case.has("infinite") or case.has("nonfinite")
            bits = _with_nonfinite(bits, drawn, nan, infinite)
        values = _tensor_of(bits, case.weight).reshape(spec.shape)
        param: Tensor = nn.Parameter(placed(values, spec, device))
        if case.recipe is not None and spec.float8:
            layer = nn.Linear(spec.shape[1], spec.shape[0], bias=False, device="meta")
            layer.weight = param
            param = megaopt.to_float8(layer, case.recipe, filter=lambda *_: True).weight
        params.append(param)
    return params


def copies(params: Sequence[Tensor], case: GoldenCase) -> list[Tensor]:
    """New parameters of the same bits, in memory that lies as theirs does."""
    duplicates = []
    for param, spec in zip(params, specs_of(case), strict=True):
        if case.recipe is not None and spec.float8:
            duplicates.append(copy.deepcopy(param))
        else:
            duplicates.append(nn.Parameter(placed(param.detach(), spec, param.device)))
    return duplicates


@torch.no_grad()
def select(projection: Tensor) -> None:
    """Writes a basis of unit vectors: with it products are exact, in any order of their sums.

    Of numbers that are not 0, that is: the sign of a sum of zeros depends on the order.
    """
    rows = projection if projection.shape[0] < projection.shape[1] else projection.t()
    rows.zero_()
    for index, row in enumerate(rows):
        row[(5 * index + 2) % len(row)] = -1.0 if index == 1 else 1.0


@torch.no_grad()
def project(projection: Tensor, index: int) -> None:
    """Writes any numbers, those of a parameter's number."""
    spec = ParameterSpec(tuple(projection.shape), 0, "normal")
    bits, _ = _drawn(spec, torch.float32, (2, index))
    projection.copy_(_tensor_of(bits, torch.float32).reshape(spec.shape))


def gradient(case: GoldenCase, index: int, step: int, device: torch.device) -> Tensor | None:
    """The gradient of a parameter at a step, counted from 1; None where it has none."""
    if step in WITHOUT_GRAD and index % 3 == step % 3:
        return None
    spec = specs_of(case)[index]
    some = step in NONFINITE
    nan = some and (case.has("nan") or case.has("nonfinite") or case.has("skip"))
    infinite = some and (case.has("infinite") or case.has("nonfinite") or case.has("skip"))
    return placed(_grad(spec, case.grad, nan, infinite, (1, index, step)), spec, device)


@cache  # many cases have the same, some 8 MB in all
def _grad(
    spec: ParameterSpec, dtype: torch.dtype, nan: bool, infinite: bool, seeds: tuple[int, ...]
) -> Tensor:
    bits, drawn = _drawn(spec, dtype, seeds)
    if spec.kind in ("still", "tiny") or (spec.kind == "late" and seeds[-1] < LATE):
        bits = bits & SIGN
    else:
        bits = _with_nonfinite(bits, drawn, nan, infinite)
    return _tensor_of(bits, dtype).reshape(spec.shape)


def _with_nonfinite(bits: Patterns, drawn: Words, nan: bool, infinite: bool) -> Patterns:
    """One number of 64 becomes NaN, and another infinity, where that is asked for."""
    for kind, pattern, is_there in ((0, NAN, nan), (1, INFINITY, infinite)):
        if is_there:  # of its own sign
            bits = numpy.where(_field(drawn, 48, 6) == kind, (bits & SIGN) | pattern, bits)
    return bits


def placed(values: Tensor, spec: ParameterSpec, device: torch.device) -> Tensor:
    """The values in memory of their own, where and as the spec wants them to lie."""
    shape = spec.shape[::-1] if spec.transposed else spec.shape
    memory = torch.empty(spec.offset + values.numel(), dtype=values.dtype, device=device)
    view = memory[spec.offset :].view(shape)
    view = view.t() if spec.transposed else view
    return view.copy_(values)


# --- numbers


def _words(count: int, *seeds: int) -> Words:
    """Returns 64-bit words of splitmix64; other seeds, or another order of them, give others."""

    def scrambled(words: Words) -> Words:
        # products and sums are modulo 2**64
        return mixed(torch.from_numpy(words.view(numpy.int64))).numpy().view(numpy.uint64)

    start = numpy.zeros(1, dtype=numpy.uint64)
    for seed in seeds:
        start = scrambled(start + numpy.uint64(seed + 1))
    places = numpy.arange(1, count + 1, dtype=numpy.uint64)
    return scrambled(start + places * numpy.uint64(0x9E3779B97F4A7C15))


def _field(drawn: Words, start: int, width: int) -> Patterns:
    mask = numpy.uint64((1 << width) - 1)
    values: Patterns = ((drawn >> numpy.uint64(start)) & mask).astype(numpy.int64)
    return values


def _drawn(
    spec: ParameterSpec, dtype: torch.dtype, seeds: tuple[int, ...]
) -> tuple[Patterns, Words]:
    """The fp32 patterns of numbers that `dtype` holds exactly, and the words they are made of.

    Of 32, one is a zero and one is subnormal (in fp16 by its exponent anyway), of either sign.
    """
    drawn = _words(math.prod(spec.shape), *seeds)
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
    bits = (_field(drawn, 63, 1) << 31) | magnitude
    if spec.kind == "coarse":
        # at most 8 significant bits, below 14, their first: scales by 448 are powers of two, and
        # products with a scale, and sums, are often halfway between two codes
        bits = bits & 0xFFFF0000
        top = ((bits >> 23) & 0xFF) == LOWEST_BINADE + BINADES - 1 + 127
        bits = numpy.where(top, bits & ~(1 << 22), bits)
        bits[:1] = COARSE_TOP
    elif spec.kind == "normal":
        # zeros and subnormal numbers become numbers in [1, 2), with their bits
        bits = numpy.where(bits & INFINITY, bits, bits | ONE)
    return bits, drawn


def _tensor_of(bits: Patterns, dtype: torch.dtype) -> torch.Tensor:
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
