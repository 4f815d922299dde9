"""Newton and Schulz's iteration, which makes the momentum's direction orthogonal.

`iterated` makes the products of a list of matrices, for the twin here as for wave.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from megaopt.kernels.muon.orthogonal import FP16, Orthogonal
from megaopt.kernels.norm.bins import new_bins
from megaopt.kernels.norm.reference import accumulate_reference, total_reference
from megaopt.kernels.products import launch

FP16_EXPONENT = 14
"""The exponent of a direction's norm in fp16, of which no number overflows then."""


class MatrixScales(NamedTuple):
    """Factors of matrices, fp32 [matrices] each: of products, but for `power`."""

    square: torch.Tensor
    """The factor of the first Gram matrix: 1 / n^2, n the norm of the matrix that is iterated."""
    inverse: torch.Tensor
    """The factor of the first product with it: 1 / n."""
    last: torch.Tensor
    """The factor of the last product: the ratio."""
    only: torch.Tensor
    """The factor of a first product that is the last: inverse times last."""
    power: torch.Tensor
    """The power of two that scales the direction; 1 in bf16."""


def scales_reference(norm: torch.Tensor, eps: float, ratio: float, is_scaled: bool) -> MatrixScales:
    """Returns the factors of a matrix by its norm, fp32 (1,); is_scaled: to a power of two."""
    # fp32 (1,) each, as a kernel has its arguments
    least, last = (torch.full_like(norm, number) for number in (eps, ratio))
    norm = torch.where(norm < least, least, norm)  # a NaN stays one
    power = torch.ones_like(norm)
    if is_scaled:
        # the power of two that brings the norm to [2**14, 2**15), made of its exponent's bits
        exponent = FP16_EXPONENT - ((norm.view(torch.int32) >> 23) - 127)
        scaled = ((exponent + 127) << 23).view(torch.float32)
        power = torch.where(norm.isfinite(), scaled, power)

    # the matrix that is iterated is the direction times the power
    inverse = 1.0 / (norm * power)
    return MatrixScales(inverse * inverse, inverse, last, inverse * last, power)


def begun(direction: torch.Tensor, how: Orthogonal) -> tuple[torch.Tensor, MatrixScales]:
    """Makes what the iteration of a direction, fp32 [m, n], begins with, and its factors."""
    # the norm is of the numbers that are iterated: in bf16 of the rounded ones
    bins, is_scaled = new_bins(direction.device), how.precision == FP16
    numbers = direction if is_scaled else direction.to(how.dtype)
    accumulate_reference([numbers], bins)
    # with second moments the ratio comes behind these
    ratio = 1.0 if how.second_moment else how.ratio(direction.shape)
    scales = scales_reference(total_reference(bins)[0].view(1), how.eps, ratio, is_scaled)
    # in fp16 the cast follows the norm
    return ((direction * scales.power).to(how.dtype) if is_scaled else numbers), scales


# --- the iteration

Matrices = list[torch.Tensor]
SQUARES = {False: 2, True: 4}
"""The number of matrices [short, short] that an iteration needs: in standard form, in Gram's."""


class Workspace(NamedTuple):
    """The memory of an iteration: of each matrix."""

    first: Matrices
    """[m, n], in which it begins,"""
    second: Matrices
    """another one,"""
    squares: list[Matrices]
    """and lists of [short, short]."""


def iterated(
    room: Workspace, scales: MatrixScales, how: Orthogonal, is_gram: bool, make: Any = launch
) -> Matrices:
    """Makes all products of an iteration of `room.first`; returns where the result is.

    make: has the functions of kernels.products.launch, as that has, or wave.Notes, which notes
    products, or tiles.TiledProducts, which ranks make together.
    """
    steps = len(how.coefficients)
    # the steps in which Gram's form begins anew; restarts behind the last step never come
    starts = {0, *(restart for restart in how.restarts if 0 < restart < steps)}
    # factors of the products with X: the first divides by its norm, the last has the ratio, too
    count = len(starts) if is_gram else steps
    between = [None] * (count - 2)
    several = [scales.inverse, *between, scales.last]
    factors = iter([scales.only] if count == 1 else several)
    if is_gram:
        return _in_gram_form(room, scales, how, make, starts, factors)

    # in standard form A = X X^T; B = b A + c A A, X' = a X + B X in each step
    # now and target: [m, n]; gram and power: [short, short]
    now, target, (gram, power) = room
    for step, (a, b, c) in enumerate(how.coefficients):
        # A = X X^T, of the shorter side; X is divided by its norm from the first product on
        sides = [x.mT if x.shape[0] > x.shape[1] else x for x in now]
        make.symmetric_products(sides, gram, scale=None if step else scales.square)
        polynomial = gram
        # B = b A + c A A; of a cubic it is b A, whose b goes into the next product
        if c:
            make.symmetric_products(gram, power, add=gram, alpha=c, beta=b)
            polynomial = power

        # X' = a X + B X, into the other matrix
        options = {"add": now, "alpha": 1.0 if c else b, "beta": a}
        _multiply(make, polynomial, now, target, scale=next(factors), **options)
        now, target = target, now
    return now


def _in_gram_form(
    room: Workspace,
    scales: MatrixScales,
    how: Orthogonal,
    make: Any,
    starts: set[int],
    factors: Iterator[torch.Tensor | None],
) -> Matrices:
    """Makes polynomials of R = X X^T, and multiplies X by them at restarts and at the end.

    W = a I + b R + c R R is a step's; Q their product; R' = W R W. Products of these, which commute
    but for roundings, are symmetric by their lower halves.
    """
    # now and target: [m, n]; gram has R, poly W, whole Q, and spare nothing
    now, target, (gram, poly, spare, whole) = room
    steps = len(how.coefficients)
    for step, (a, b, c) in enumerate(how.coefficients):
        # where Q begins R is made of X, at a restart of X times the Q that has come together
        if step in starts:
            if step:
                _multiply(make, whole, now, target, scale=next(factors))
                now, target = target, now
            # R = X X^T, of the shorter side; X is divided by its norm when it is multiplied first
            sides = [x.mT if x.shape[0] > x.shape[1] else x for x in now]
            make.symmetric_products(sides, gram, scale=None if step else scales.square)
        # W = a I + b R + c R R
        make.symmetric_products(gram, poly, add=gram, alpha=c, beta=b, diagonal=a)
        # Q of this step: W itself where Q begins, else Q W
        if step in starts:
            factor = poly
        else:
            make.symmetric_products(whole, spare, right=poly)
            factor, spare = spare, whole
        # R' = W R W, unless the next step makes R anew or there is none
        if step + 1 < steps and step + 1 not in starts:
            make.symmetric_products(gram, spare, right=poly)
            make.symmetric_products(poly, gram, right=spare)
        # the matrix of the new Q is `whole` from here on; those left over are overwritten
        if factor is poly:
            poly, whole = whole, poly
        else:
            whole = factor

    # the last product has the ratio, and divides by the norm if it is the first, too
    _multiply(make, whole, now, target, scale=next(factors))
    return target


def _multiply(
    make: Any, squares: Matrices, matrices: Matrices, out: Matrices, **options: Any
) -> None:
    """Makes S X of symmetric matrices S; of a tall matrix X S, which is that turned."""
    pairs = [
        (x, s) if x.shape[0] > x.shape[1] else (s, x)
        for s, x in zip(squares, matrices, strict=True)
    ]
    make.products([left for left, _ in pairs], [right for _, right in pairs], out, **options)


# --- the twin


def room_of(first: Matrices, is_gram: bool) -> Workspace:
    """Makes new memory for the iteration of matrices."""
    # [short, short] of each matrix
    sizes = [min(matrix.shape) for matrix in first]
    squares = [
        [matrix.new_empty(size, size) for matrix, size in zip(first, sizes, strict=True)]
        for _ in range(SQUARES[is_gram])
    ]
    return Workspace(first, list(map(torch.empty_like, first)), squares)


def orthogonal(direction: torch.Tensor, how: Orthogonal) -> torch.Tensor:
    """Returns the update of a direction, fp32 [m, n], before any second moment: of `how.dtype`."""
    # an empty matrix has no norm and no products
    if not direction.numel():
        return direction.to(how.dtype)
    first, scales = begun(direction, how)
    is_gram = how.is_gram(direction.shape)
    return iterated(room_of([first], is_gram), scales, how, is_gram)[0]
