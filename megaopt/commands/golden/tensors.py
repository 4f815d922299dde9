"""The parameters and gradients of a case."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn

import megaopt
from megaopt.commands.golden.case import Case
from megaopt.commands.golden.numbers import (
    INFINITY,
    NAN,
    SIGN,
    SUBNORMAL,
    Patterns,
    Words,
    coarse,
    normal,
    patterns,
    tensor_of,
    with_some,
    words,
)
from megaopt.float8 import Float8Recipe

LATE = 11
"""The step at which parameters of the kind "late" get their first gradient that is not zero."""

WITHOUT_GRAD = (4, 5, 12)
"""Steps at which every third parameter has no gradient."""

NONFINITE = (5, 8)
"""Steps at which gradients have NaNs and infinities; weights have them from the start."""


@dataclass(frozen=True)
class Spec:
    """One parameter. Those of the first group stand before those of the second."""

    shape: tuple[int, ...]
    group: int
    kind: str = "hard"
    """ "hard": numbers.patterns; "coarse": numbers.coarse; "still": gradients are zeros of both
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
    Spec((0,), 0),
    Spec((1,), 0),
    Spec((7,), 0),
    Spec((511,), 0),
    Spec((513,), 0, offset=1),
    Spec((5003,), 0),
    Spec((48,), 0, "late"),
    Spec((512,), 1),
    Spec((2049,), 1, offset=3),
    Spec((33, 65), 1, transposed=True),
    Spec((513,), 1, "still"),
    Spec((40, 17), 1, "coarse"),
)
# tiles of 128 x 128, whole and cut, and blocks cut by a few columns
MATRICES = (
    Spec((130, 140), 0, float8=True),
    Spec((5, 96), 0, float8=True),
    Spec((513,), 0, offset=1),
    Spec((2, 48), 0, "late", float8=True),
    Spec((1, 33), 1, float8=True),
    Spec((7,), 1),
    Spec((24, 64), 1, "tiny", float8=True),
    Spec((16, 160), 1, "coarse", float8=True),
)
# of 4,096 elements and more, whose moments may be in blocks: rows of whole blocks, of whole blocks
# of 64 or 32 alone, and of none
LARGE = (
    Spec((40, 104), 0),
    Spec((7,), 0),
    Spec((33, 128), 0, offset=1),
    Spec((36, 128), 0, "late"),
    Spec((65, 64), 1, "coarse"),
    Spec((47, 128), 1, transposed=True),
    Spec((2, 2176), 1, "still"),
)
# tall and wide, and one that no rank makes smaller; projected gradients of 4,096 elements and more
PROJECTED = (
    Spec((70, 40), 0, "normal"),
    Spec((513,), 0, offset=1),
    Spec((13, 131), 0, "normal", offset=1),
    Spec((5, 7), 0),
    Spec((40, 90), 1, "normal", transposed=True),
    Spec((1400, 16), 1, "normal"),
    Spec((7,), 1),
)


# the last keeps projected moments in blocks, in rows of several
PROJECTED_IN_BLOCKS = (*PROJECTED[:5], Spec((8, 2048), 1, "normal"), PROJECTED[-1])


def specs_of(case: Case) -> tuple[Spec, ...]:
    """What parameters a case has."""
    if case.is_projected:
        return PROJECTED_IN_BLOCKS if case.has_blocks else PROJECTED
    if case.has_blocks:
        return LARGE
    return PLAIN if case.recipe is None else MATRICES


def parameters(case: Case, device: torch.device) -> list[Tensor]:
    """The parameters of a case, with their first values."""
    return [
        _parameter(_weight(case, index, spec), spec, case.recipe, device)
        for index, spec in enumerate(specs_of(case))
    ]


def copies(params: Sequence[Tensor], case: Case) -> list[Tensor]:
    """New parameters of the same bits, in memory that lies as theirs does."""
    found = []
    for param, spec in zip(params, specs_of(case), strict=True):
        if case.recipe is not None and spec.float8:
            found.append(copy.deepcopy(param))
        else:
            found.append(nn.Parameter(placed(param.detach(), spec, param.device)))
    return found


@torch.no_grad()
def select(projection: Tensor) -> None:
    """Writes a basis of unit vectors: with it products are exact, in any order of their sums.

    Of numbers that are not 0, that is: the sign of a sum of zeros depends on the order.
    """
    rows = projection if projection.shape[0] < projection.shape[1] else projection.t()
    rows.zero_()
    for index, row in enumerate(rows):
        row[(5 * index + 2) % len(row)] = -1.0 if index == 1 else 1.0


def gradient(case: Case, index: int, step: int, device: torch.device) -> Tensor | None:
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
    spec: Spec, dtype: torch.dtype, nan: bool, infinite: bool, seeds: tuple[int, ...]
) -> Tensor:
    bits, drawn = _drawn(spec, dtype, seeds)
    if spec.kind in ("still", "tiny") or (spec.kind == "late" and seeds[-1] < LATE):
        bits = bits & SIGN
    else:
        bits = _with_nonfinite(bits, drawn, nan, infinite)
    return tensor_of(bits, dtype).reshape(spec.shape)


def _weight(case: Case, index: int, spec: Spec) -> Tensor:
    bits, drawn = _drawn(spec, case.weight, (0, index))
    if spec.kind == "late":
        bits = bits & SIGN
    elif spec.kind == "tiny" and case.weight != torch.float16:
        bits = bits & (SIGN | SUBNORMAL)
    else:
        nan = case.has("nan") or case.has("nonfinite")
        infinite = case.has("infinite") or case.has("nonfinite")
        bits = _with_nonfinite(bits, drawn, nan, infinite)
    return tensor_of(bits, case.weight).reshape(spec.shape)


def _drawn(spec: Spec, dtype: torch.dtype, seeds: tuple[int, ...]) -> tuple[Patterns, Words]:
    drawn = words(math.prod(spec.shape), *seeds)
    bits = patterns(drawn, dtype)
    changed = {"coarse": coarse, "normal": normal}.get(spec.kind, _same)
    return changed(bits), drawn


def _same(bits: Patterns) -> Patterns:
    return bits


def _with_nonfinite(bits: Patterns, drawn: Words, nan: bool, infinite: bool) -> Patterns:
    """One number of 64 becomes NaN, and another infinity, where that is asked for."""
    if nan:
        bits = with_some(NAN, 0, bits, drawn)
    if infinite:
        bits = with_some(INFINITY, 1, bits, drawn)
    return bits


def placed(values: Tensor, spec: Spec, device: torch.device) -> Tensor:
    """The values in memory of their own, where and as the spec wants them to lie."""
    shape = spec.shape[::-1] if spec.transposed else spec.shape
    memory = torch.empty(spec.offset + values.numel(), dtype=values.dtype, device=device)
    found = memory[spec.offset :].view(shape)
    found = found.t() if spec.transposed else found
    return found.copy_(values)


def _parameter(
    values: Tensor, spec: Spec, recipe: Float8Recipe | None, device: torch.device
) -> Tensor:
    weight = nn.Parameter(placed(values, spec, device))
    if recipe is None or not spec.float8:
        return weight
    rows, columns = spec.shape
    layer = nn.Linear(columns, rows, bias=False, device="meta")
    layer.weight = weight
    return megaopt.to_float8(layer, recipe, filter=lambda *_: True).weight
