"""GaLore's rule: project the gradient, take Adam's step there, project back, update.

A projection follows the gradients, by subspace iteration or by an SVD. Gradients that say nothing
about a subspace (zeros, infinities, NaN) leave it as it is. Subspace iteration decides that where
the gradient is, and the host does not wait for it. Where a gradient has fewer independent rows or
columns than the rank, as those of a GPT have, subspace iteration takes what there is, and keeps its
own directions beside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, reduce
from typing import Any

import torch

from megaopt.kernels.chunks.draws import words_reference
from megaopt.kernels.galore.products import IEEE, parts_product, product
from megaopt.kernels.place import Place
from megaopt.kernels.rules.base import draw_numbers
from megaopt.kernels.rules.galore import GALORE_APPLY, GALORE_DIRECTION
from megaopt.kernels.rules.matrix import (
    ALONE,
    CAPTURED_ENERGY,
    PROJECTION,
    ROWS,
    WHOLE,
    MatrixRule,
    Parts,
    Shape,
    Transform,
    Work,
)

RIGHT, LEFT = "right", "left"
SLAB = 1024
"""Terms of a projected gradient's sum that are added up by themselves.

With slabs the tiles of one matrix keep a GPU at work: one of 4096 x 4096 has 64 tiles of 64 rows,
and 4 slabs each. Slabs depend on the terms alone, which no sharding of rows changes.
"""


@dataclass(frozen=True)
class LowRank:
    """The settings that all matrices of a batch share.

    A gradient [m, n] is projected to [m, rank] on the right, by a projection [rank, n] of
    orthonormal rows; on the left to [rank, n], by one [m, rank] of orthonormal columns.
    """

    side: str
    """RIGHT or LEFT."""
    rank: int
    precision: str = IEEE
    """The precision of the two products, one of products.PRECISIONS."""
    refresh: str = "subspace"
    """The way in which projections are made: "subspace" or "svd"."""
    stagger: bool = True
    """Parameters are refreshed one after another, by their numbers."""

    def low_shape(self, shape: Shape) -> tuple[int, int]:
        """The shape of the projected gradient of a matrix, and of its moments."""
        rows, columns = shape
        return (rows, self.rank) if self.side == RIGHT else (self.rank, columns)

    def projection_shape(self, shape: Shape) -> tuple[int, int]:
        """The shape of the projection of a matrix."""
        rows, columns = shape
        return (self.rank, columns) if self.side == RIGHT else (rows, self.rank)

    def state_shapes(self, shape: Shape) -> dict[str, tuple[int, ...]]:
        """The projection, and how much of the gradient's square it captured when it was made."""
        return {PROJECTION: self.projection_shape(shape), CAPTURED_ENERGY: ()}


def saves(rank: int, shape: Shape) -> bool:
    """Checks that projection and projected gradient together are smaller than the gradient."""
    rows, columns = shape
    return rank * (rows + columns) < rows * columns


def projected(
    grad: torch.Tensor, projection: torch.Tensor, side: str, precision: str = IEEE
) -> torch.Tensor:
    """Projects a gradient [m, n]: to [m, rank] on the right, to [rank, n] on the left.

    In other precisions than "ieee" it adds up each SLAB of terms, then these sums in their order.
    """
    left, right = (grad, projection.mT) if side == RIGHT else (projection.mT, grad)
    if precision == IEEE:
        return product(left, right)
    # [m, SLAB] @ [SLAB, rank], or [rank, SLAB] @ [SLAB, n]; the launches' order of sums
    pairs = zip(torch.split(left, SLAB, 1), torch.split(right, SLAB), strict=True)
    return reduce(torch.add, (product(*pair, precision) for pair in pairs))


def projected_back(
    low: torch.Tensor, projection: torch.Tensor, side: str, precision: str = IEEE
) -> torch.Tensor:
    """Returns the matrix [m, n] that a projected one stands for."""
    if side == RIGHT:
        return product(low, projection, precision)
    return product(projection, low, precision)


def _project(grad: torch.Tensor, work: Work) -> torch.Tensor:
    return projected(grad, work.kept[PROJECTION], work.how.side, work.how.precision)


def _project_back(low: torch.Tensor, work: Work) -> torch.Tensor:
    return projected_back(low, work.kept[PROJECTION], work.how.side, work.how.precision)


# --- whose turn it is


def turns_of(
    works: Sequence[Work],
    groups: Sequence[Mapping[str, Any]],
    counts: Sequence[int | None] | None,
) -> list[int]:
    """Returns the places of projections whose turn it is, and of those that were never made.

    The host waits to know while one is not there. counts: for each matrix the steps that it has
    taken; None where it is nobody's turn, or not its.
    """
    look_up(works)
    indices = []
    for index, work in enumerate(works):
        count = None if counts is None else counts[index]
        is_due = not work.is_made
        if count is not None and not is_due:
            # its turn in the step that comes after so many of its group
            gap = groups[index]["update_proj_gap"]
            is_due = count % gap == (work.place.number % gap if work.how.stagger else 0)
        if is_due:
            indices.append(index)
    return indices


def renew(
    works: Sequence[Work],
    grad: Callable[[int], torch.Tensor],
    groups: Sequence[Mapping[str, Any]],
    skip: Callable[[int], torch.Tensor] | None = None,
) -> None:
    """Makes projections: first ones of gradients that are finite and not 0, if the step is taken.

    Other gradients leave zeros. The host waits to know while one is not there.

    skip: gives one number for a matrix, anything but 0 where its step is left out; None: none is.
    """
    # all ranks ask for the same matrices, as all have the same `is_made`
    missing = [index for index, work in enumerate(works) if not work.is_made]
    # whether a gradient makes a first projection: bools on the device, the same on all ranks
    says = [
        says_something(grad(index), works[index].parts, None if skip is None else skip(index))
        for index in missing
    ]
    able = torch.stack(says).tolist() if says else []  # the host waits here
    unable = {index for index, is_able in zip(missing, able, strict=True) if not is_able}
    due = [index for index in range(len(works)) if index not in unable]
    error: Exception | None = None
    while due:
        # parameters that follow each other have makers that do: all ranks are at work at once
        ranks = works[due[0]].parts.ranks
        turn, due = due[:ranks], due[ranks:]
        # every rank gives its part of each gradient; only the maker gets the whole one
        for index in turn:
            work, seed = works[index], groups[index]["seed"]
            whole = work.parts.joined(grad(index))
            if work.parts.is_maker:
                try:
                    _make(work, whole, seed)
                except Exception as problem:  # the others wait for what this rank hands out
                    error = error or problem
            del whole  # before the next one comes
        # then makers hand out what they made, in the same order on all ranks
        for work in (works[index] for index in turn):
            for tensor in work.kept.values():
                work.parts.hand_out(tensor)
            if not work.is_made:  # a maker that failed has handed out zeros
                work.is_made = True if work.parts is ALONE else None
    # raised at last, when no rank waits for this one any more
    if error is not None:
        raise error
    look_up(works)


def look_up(works: Sequence[Work]) -> None:
    """Notes which projections a gradient has made: the others are zeros. The host waits, once."""
    unknown = [work for work in works if work.is_made is None]
    if unknown:
        # one copy to the host for all matrices
        flags = torch.stack([work.kept[PROJECTION].any() for work in unknown]).tolist()
        for work, flag in zip(unknown, flags, strict=True):
            work.is_made = flag


def _make(work: Work, grad: torch.Tensor, seed: int) -> None:
    """Makes a projection of the whole gradient."""
    how, state_projection, energy = work.how, work.kept[PROJECTION], work.kept[CAPTURED_ENERGY]
    # where products need not be ieee, bf16 gradients stay bf16; others go on in fp32 or fp64
    stays = grad.dtype == torch.bfloat16 and how.precision != IEEE
    grad = scaled(grad if stays else grad.to(_wide(grad)))
    # fp64, of shape (); shared by the projection and its energy
    whole = square(grad)
    before = state_projection if work.is_made else None
    projection = refreshed(grad, how, before, how.refresh == "svd", seed, whole)
    captured = captured_energy(grad, how, projection, whole)
    state_projection.copy_(projection)
    # a gradient that says nothing leaves it as it is, as it does the projection
    energy.copy_(torch.where(captured.isnan(), energy, captured))


GALORE = MatrixRule(
    "galore",
    Transform(_project, renew, turns_of),
    GALORE_DIRECTION,
    Transform(_project_back),
    GALORE_APPLY,
    LowRank.low_shape,
    LowRank.state_shapes,
    ROWS,
)
GALORE_WHOLE = replace(GALORE, name="galore_whole", meets=WHOLE)
"""GALORE for matrices whose products add up over ranks."""

# --- a projection

FIRST_PASSES = 3
"""Passes over a first gradient: one from the sketch, and two power iterations."""
PASSES = 2
"""Passes over a gradient at later refreshes.

What 128 directions that knew another matrix capture of a 1024 x 512 one, of an SVD's energy: 0.928
with 1 pass, 0.981 with 2, 0.992 with 3, where 300 singular values fall tenfold; where 200 fall a
hundredfold 0.998, 0.9996 and 0.9998.
"""
UNIT = 2.0**-24
"""Half of the last place of an fp32 number in [1, 2)."""
FAR = 2.0**-8
"""The distance from 1 that the Gram matrix of Cholesky's columns may have, by its norm.

It is off by some 2**-53 times the square of the longest combination over the shortest, which the
shift keeps below 2**22: 2**-9. Of 100,000 refreshes of random gradients, spectra of 12 decades and
single numbers among them, the farthest was at 2**-11.
"""
BESIDE = 2.0**-52
"""The factor of random numbers that are added to the directions with which a refresh begins.

So a refresh also finds a gradient whose columns are others than those that these directions have:
what is left in a projection of columns that are 0 comes to 0 itself within a few refreshes. Other
numbers are too large to be moved by it. A direction that a gradient lacks is turned by about
BESIDE / shift, in units of its norm's square: below UNIT / 64.
"""


def refreshed(
    grad: torch.Tensor,
    low_rank: LowRank,
    start: torch.Tensor | None,
    by_svd: bool,
    seed: int,
    whole: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns a new projection of a gradient [m, n]; fp32, of fp64 gradients fp64.

    start: the projection so far; None: there is none. whole: the square of the gradient, where it
    is known.
    """
    passes = PASSES
    # a first projection starts from random directions, with one pass more
    if start is None:
        passes = FIRST_PASSES
        start = sketched(low_rank, grad.shape, seed, grad.device).to(_wide(grad))
    if by_svd:
        return singular(grad, low_rank, start)
    return iterated(grad, low_rank, start, passes, whole, seed)


def scaled(grad: torch.Tensor) -> torch.Tensor:
    """Returns a gradient times the power of two that brings its amax to [0.5, 1).

    The power is from 2**-125 to 2**125. So no loss scale shows, and no square overflows. fp16 has
    not all these powers.
    """
    amax = _amax(grad)
    power = (torch.frexp(amax).mantissa / amax).nan_to_num(1.0).clamp(2.0**-125, 2.0**125)
    factor = power.to(grad.dtype)
    # reads 16 bytes at a time, as a tensor's product with a number on the device does not: 4096 x
    # 11008 in bf16 took that 103 us, with an fp32 factor 159
    scaled_grad: torch.Tensor = torch._foreach_mul([grad], factor)[0]
    return scaled_grad


def _wide(grad: torch.Tensor) -> torch.dtype:
    """Returns the dtype of a gradient's sums."""
    return torch.promote_types(grad.dtype, torch.float32)


def sketched(low_rank: LowRank, shape: torch.Size, seed: int, device: torch.device) -> torch.Tensor:
    """Returns a projection to begin with, fp32: an orthonormal basis of random numbers.

    It depends on seed and shape alone, not on the order of parameters.
    """
    wide = shape[1] if low_rank.side == RIGHT else shape[0]
    basis = _random_basis(wide, low_rank.rank, seed, device)
    return (basis.mT if low_rank.side == RIGHT else basis).contiguous()


@lru_cache(maxsize=1)
def _random_basis(wide: int, rank: int, seed: int, device: torch.device) -> torch.Tensor:
    """fp32 [wide, rank]. A model has many matrices of one dimension, which all begin with it."""
    # Householder's QR, as a few numbers may be nearly dependent
    numbers = _random_numbers(wide, rank, seed, device).mT.double()
    basis: torch.Tensor = torch.linalg.qr(numbers)[0].float()
    return basis


@lru_cache(maxsize=4)
def _random_numbers(wide: int, rank: int, seed: int, device: torch.device) -> torch.Tensor:
    """fp32 [rank, wide], from -1 to 1."""
    numbers = draw_numbers({"seed": seed, "step": 0})  # steps, which draw too, count from 1
    # 32-bit words, to fp32 numbers from -1 to 1
    words = words_reference(Place(0), wide * rank, numbers, device)
    return ((words - 2**31).float() * 2.0**-31).view(wide, rank).mT.contiguous()


def singular(grad: torch.Tensor, low_rank: LowRank, start: torch.Tensor) -> torch.Tensor:
    """galore_torch's projection: the first singular vectors of a gradient, by an SVD in fp32.

    The host waits for it. start: what stays for a gradient that is zero, or not finite.
    """
    if not bool(says_something(grad)):
        return start.clone()
    # left [m, k] and right [k, n], k the smaller dimension
    left, _, right = torch.linalg.svd(grad.float(), full_matrices=False)
    rank = low_rank.rank
    vectors: torch.Tensor = right[:rank] if low_rank.side == RIGHT else left[:, :rank]
    return vectors.to(start.dtype, copy=True).contiguous()  # not a view that keeps all of it


def iterated(
    grad: torch.Tensor,
    low_rank: LowRank,
    start: torch.Tensor,
    passes: int = PASSES,
    whole: torch.Tensor | None = None,
    seed: int = 0,
) -> torch.Tensor:
    """Returns a projection after passes of subspace iteration.

    It is `start` where the gradient says nothing. A pass projects the gradient, multiplies it by
    what it found, adds a little of the projection, and makes that orthonormal: an iteration of G^T
    G + shift. The shift is what rounding alone may be, and what a gradient has less of than that
    stays as it was. The columns go on with their signs, as the moments do. grad: as `scaled` gives
    it. whole, seed: as `refreshed` has them.
    """
    right = low_rank.side == RIGHT
    # as on the right: matrix [m, n], basis [rank, n]
    matrix, basis = (grad, start) if right else (grad.mT, start.mT)
    whole = square(grad) if whole is None else whole
    # fp64 [rank, n]: each pass adds it, times the shift, to what it found
    exact, are_bases = basis.double(), []
    # fp32 [rank, n], a little of which opens directions that the basis lacks
    numbers = _random_numbers(basis.shape[1], low_rank.rank, seed, grad.device)
    basis = torch.add(basis, numbers, alpha=BESIDE)
    for left in reversed(range(passes)):
        # [rank, m], then [rank, n]: the basis times G^T G
        image = parts_product(basis, matrix.mT)
        iterate = parts_product(image, matrix)
        # shift: as much as rounding may have changed a row of `iterate`
        longest, norm = torch.linalg.vector_norm(image, dim=1).amax(), whole.sqrt()
        shift = longest * norm * _error(matrix.shape[0])
        # the last pass alone needs a basis to fp32's precision
        make = _cholesky_qr if left else orthonormal
        exact, is_basis = make(shift * exact + iterate)
        basis = exact.to(start.dtype)
        are_bases.append(is_basis)
    # decided on the device: every pass had a basis, and the gradient is finite and not 0
    says = reduce(torch.Tensor.logical_and, are_bases, _is_some(norm))
    return torch.where(says, basis if right else basis.mT, start).contiguous()


def says_something(
    grad: torch.Tensor, parts: Parts = ALONE, skip: torch.Tensor | None = None
) -> torch.Tensor:
    """Checks that a gradient is finite and not 0: a bool of shape (), the same for all parts.

    skip: anything but 0 says that the gradient is not to be used; of one element, on its device.
    """
    amax = _amax(grad)
    if skip is not None:
        amax = torch.where(skip.reshape(()) != 0, torch.inf, amax)
    return _is_some(parts.largest(amax))


def _is_some(amax: torch.Tensor) -> torch.Tensor:
    return (amax > 0) & (amax < math.inf)  # a NaN is neither


def _amax(matrix: torch.Tensor) -> torch.Tensor:
    if not matrix.numel():
        return torch.zeros((), dtype=_wide(matrix), device=matrix.device)
    amax: torch.Tensor = torch.linalg.vector_norm(matrix, math.inf)  # reads it once
    return amax.to(_wide(matrix))


def square(matrix: torch.Tensor, dim: int = 1) -> torch.Tensor:
    """Returns the sum of squares, fp64: norms along a dimension are fp32, their squares' sum fp64.

    The matrix is one that `scaled` gives, so that no square is too large or too small. In fp64
    alone it took nine times as long, 272 us for a bf16 one of 4096 x 11008 on an H200. dim: one of
    which each part has all, so that the number of parts shows in the last sum alone.
    """
    # fp32 norms of rows or columns, their squares added up in fp64
    norms = torch.linalg.vector_norm(matrix, dim=dim, dtype=_wide(matrix))
    whole: torch.Tensor = torch.linalg.vector_norm(norms, dtype=torch.float64)
    return whole.square()


def _error(rows: int) -> float:
    """Returns the length that a row of image @ matrix may have by rounding alone.

    The unit is the product of two norms, of the matrix and of the image's longest row. A sum of k
    products, each sum rounded to fp32, is off by UNIT times a partial sum at each of k places;
    errors of random signs add up to sqrt(k) of that. Partial sums are at most the norm of the
    matrix's column times that of the image's row (Cauchy-Schwarz), and all columns of the matrix
    together have the matrix's norm. 4: so many times the mean error is not met by chance. Tensor
    cores cut a sum off, at each 16th place, by UNIT of it in the mean: errors of one sign, which
    come to k / 16. rows: k.
    """
    return UNIT * max(4.0 * math.sqrt(rows), rows / 16)


def orthonormal(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns an orthonormal basis of what rows span, fp64 [rank, n], and whether there is one.

    It takes Cholesky's QR, and one step of Newton's for what that leaves; the longest combination
    of the rows is at most 4e6 times the shortest. The diagonal of its triangle is positive, so that
    a basis that is one already stays as it is, signs included.
    """
    first, is_definite = _cholesky_qr(rows)
    # [rank, rank], how far the Gram matrix is from the unit matrix
    over = first @ first.mT
    over.diagonal().sub_(1)
    # (1 + x)^(-1/2) to x^2: what is left out is about 5 / 16 x^3, UNIT / 3 where x is FAR
    factor = torch.addmm(over, over, over, beta=-1 / 2, alpha=3 / 8)
    # Newton's step is good for a small distance only
    is_near = torch.linalg.vector_norm(over) <= FAR
    return torch.addmm(first, factor, first), is_definite & is_near


def _cholesky_qr(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns rows of about one length that are about orthogonal, and whether there are such."""
    lower, info = torch.linalg.cholesky_ex(rows @ rows.mT)
    basis = torch.linalg.solve_triangular(lower, rows, upper=False)
    return basis, info == 0


def captured_energy(
    grad: torch.Tensor,
    low_rank: LowRank,
    projection: torch.Tensor,
    whole: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns the part of a gradient's square that the projection keeps, fp32 from 0 to 1.

    It is NaN where the gradient says nothing. grad: as `scaled` gives it.
    """
    # [rank, n] @ [n, m] on the right, [rank, m] @ [m, n] on the left
    basis, matrix = (projection, grad.mT) if low_rank.side == RIGHT else (projection.mT, grad)
    energy = square(parts_product(basis, matrix), 0)
    return (energy / (square(grad) if whole is None else whole)).clamp(max=1.0).float()
