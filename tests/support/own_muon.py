"""Muon (Jordan et al. 2024) as a user writes it: a matrix rule in one file outside the package.

Of a matrix the momentum is made orthogonal by five steps of Newton and Schulz, on the whole matrix:
ranks that hold its shards bring them together. Other parameters take plain Nesterov steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from megaopt.kernels.galore.products import product
from megaopt.kernels.optional_triton import helper, tl
from megaopt.kernels.rules import Rule
from megaopt.kernels.rules.base import Moment, round_row
from megaopt.kernels.rules.loading import number
from megaopt.kernels.rules.matrix import SAME, WHOLE, MatrixRule, Transform
from megaopt.optimizer import FusedOptimizer
from megaopt.options.checks import DECAY, NOT_NEGATIVE
from megaopt.options.options import Numbers, Options

FACTORS = (3.4445, -4.775, 2.0315)
STEPS = 5


# --- the row that all three elementwise rules read


def hyper(group):
    return float(group["momentum"]), float(group["weight_decay"])


def scalars(group):
    momentum, weight_decay = hyper(group)
    lr = float(group["lr"])
    return round_row((momentum, 1.0 - momentum, lr, lr * weight_decay))


@helper
def prepare(hyper_ptr, lr, step):
    one = tl.full((), 1.0, tl.float64)
    momentum = number(hyper_ptr, 0)
    decay = (lr.to(tl.float64) * number(hyper_ptr, 1)).to(tl.float32)
    return momentum.to(tl.float32), (one - momentum).to(tl.float32), lr, decay


# --- elementwise: kernel and twin


@helper
def direction(param, moments, grad, scalars):
    momentum, rest, _, _ = scalars
    buffer = momentum * moments[0] + rest * grad
    return momentum * buffer + rest * grad, (buffer,)


def direction_reference(param, moments, grad, scalars):
    momentum, rest = scalars[:2]
    buffer = moments[0] * momentum + grad * rest
    return buffer * momentum + grad * rest, (buffer,)


@helper
def apply(param, moments, grad, scalars):
    _, _, lr, decay = scalars
    param = param - decay * param
    return param - lr * grad, ()


def apply_reference(param, moments, grad, scalars):
    lr, decay = scalars[2:4]
    param = param - param * decay
    return param - grad * lr, ()


@helper
def plain(param, moments, grad, scalars):
    found, after = direction(param, moments, grad, scalars)
    param, _ = apply(param, (), found, scalars)
    return param, after


def plain_reference(param, moments, grad, scalars):
    found, after = direction_reference(param, moments, grad, scalars)
    return apply_reference(param, (), found, scalars)[0], after


BUFFER = (Moment("momentum_buffer"),)
ROW = (scalars, 4, hyper, prepare)
DIRECTION = Rule(
    "muon_direction", "ieee", BUFFER, *ROW, direction, direction_reference, reads_param=False
)
APPLY = Rule("muon_apply", "ieee", (), *ROW, apply, apply_reference)
PLAIN = Rule("muon_plain", "ieee", BUFFER, *ROW, plain, plain_reference)


# --- of whole matrices


def orthogonal(matrix, work):
    """About the nearest matrix of orthonormal rows or columns, longer the taller it is."""
    rows, columns = matrix.shape
    found = matrix / (torch.linalg.vector_norm(matrix) + 1e-7)
    found = found.mT.contiguous() if rows > columns else found
    one, third, fifth = FACTORS
    for _ in range(STEPS):
        gram = product(found, found.mT)
        found = one * found + product(third * gram + fifth * product(gram, gram), found)
    found = found.mT if rows > columns else found
    return found * math.sqrt(max(1.0, rows / columns))


MUON = MatrixRule("muon", SAME, DIRECTION, Transform(orthogonal), APPLY, meets=WHOLE)


# --- the optimizer


@dataclass(frozen=True, kw_only=True)
class MuonOptions(Options):
    NUMBERS: ClassVar[Numbers] = Numbers(
        {"lr": NOT_NEGATIVE, "momentum": DECAY, "weight_decay": NOT_NEGATIVE}
    )
    MATRIX: ClassVar[MatrixRule] = MUON
    momentum_buffer_dtype: torch.dtype | str = torch.float32


class Muon(FusedOptimizer):
    def __init__(
        self, params, lr=0.02, momentum=0.95, weight_decay=0.1, master_weights=None, **options
    ):
        numbers = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(params, numbers, MuonOptions(**options), master_weights)

    @property
    def rule(self):
        return PLAIN
