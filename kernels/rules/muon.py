"""The elementwise rules of Muon's step: the momentum's direction, and the update by a matrix.

Between them a matrix is made orthogonal (megaopt.kernels.muon): docs/numbers.md lists the
operations of all three.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from megaopt.kernels.optional_triton import helper, tl
from megaopt.kernels.rules.base import Moment, Rule, round_row, round_to_fp32
from megaopt.kernels.rules.loading import number

MOMENTUM: tl.constexpr = tl.constexpr(0)
NESTEROV: tl.constexpr = tl.constexpr(1)
WEIGHT_DECAY: tl.constexpr = tl.constexpr(2)

Moments = tuple[torch.Tensor, ...]
Scalars = tuple[float, ...]


def hyper(group: Mapping[str, Any]) -> tuple[float, ...]:
    """momentum, nesterov (0 or 1), weight_decay."""
    return tuple(float(group[name]) for name in ("momentum", "nesterov", "weight_decay"))


def scalars(group: Mapping[str, Any]) -> Scalars:
    """One row of fp32 numbers for a parameter group, computed in fp64 and rounded once.

    lr as it is on a device, in units of the parameter; weight_decay per unit of lr. Without
    nesterov the direction is the buffer: once the buffer, and 0 times the gradient.
    """
    momentum, nesterov, weight_decay = hyper(group)
    lr = round_to_fp32(float(group["lr"]))
    # Nesterov mixes buffer and gradient; without, the buffer counts once
    mixed = momentum if nesterov else 1.0
    decay_factor = 1.0 - lr * weight_decay
    return round_row((momentum, 1.0 - momentum, mixed, 1.0 - mixed, decay_factor, lr))


@helper
def prepare(hyper_ptr, lr, step):
    one = tl.full((), 1.0, tl.float64)
    # fp64, each number rounded to fp32 once
    momentum = number(hyper_ptr, MOMENTUM)
    mixed = tl.where(number(hyper_ptr, NESTEROV) != 0, momentum, one)
    decay_factor = one - lr.to(tl.float64) * number(hyper_ptr, WEIGHT_DECAY)
    return (
        momentum.to(tl.float32),
        (one - momentum).to(tl.float32),
        mixed.to(tl.float32),
        (one - mixed).to(tl.float32),
        decay_factor.to(tl.float32),
        lr,
    )


@helper
def direction(param, moments, grad, scalars):
    momentum, rest, mixed, grad_share, _, _ = scalars
    # the new momentum, then the direction: a transform makes a matrix of these orthogonal
    buffer = momentum * moments[0] + rest * grad
    return mixed * buffer + grad_share * grad, (buffer,)


@helper
def apply(param, moments, grad, scalars):
    _, _, _, _, decay_factor, lr = scalars
    return decay_factor * param - lr * grad, ()


def direction_reference(
    param: torch.Tensor, moments: Moments, grad: torch.Tensor, scalars: Scalars
) -> tuple[torch.Tensor, Moments]:
    """The direction of a gradient and its momentum; fp32 or fp64."""
    momentum, rest, mixed, grad_share = scalars[:4]
    buffer = moments[0] * momentum + grad * rest
    return buffer * mixed + grad * grad_share, (buffer,)


def apply_reference(
    param: torch.Tensor, moments: Moments, grad: torch.Tensor, scalars: Scalars
) -> tuple[torch.Tensor, Moments]:
    """The weight after its decay and an update, `grad`; fp32 or fp64."""
    decay_factor, lr = scalars[4:6]
    return param * decay_factor - grad * lr, ()


@helper
def keep(param, moments, grad, scalars):
    return param, ()


def keep_reference(
    param: torch.Tensor, moments: Moments, grad: torch.Tensor, scalars: Scalars
) -> tuple[torch.Tensor, Moments]:
    """The parameter as it is: fp8 codes are made of it."""
    return param, ()


def peer_scalars(group: Mapping[str, Any]) -> Scalars:
    """momentum, nesterov, weight_decay and lr, fp64."""
    return (*hyper(group), float(group["lr"]))


@helper
def peer_prepare(hyper_ptr, lr, step):
    return (
        number(hyper_ptr, MOMENTUM).to(tl.float32),
        number(hyper_ptr, NESTEROV).to(tl.float32),
        number(hyper_ptr, WEIGHT_DECAY).to(tl.float32),
        lr,
    )


def not_elementwise(*_: Any) -> Any:
    """Raises TypeError."""
    raise TypeError("contracts 'torch' and 'eo' step whole matrices: kernels.muon.peers.PeerSteps")


BUFFER = (Moment("momentum_buffer"),)
_ROW = (scalars, 6, hyper, prepare)

MUON_DIRECTION = Rule(
    *("muon_direction", "ieee", BUFFER, *_ROW, direction, direction_reference),
    reads_param=False,
    hyper_length=3,
)
MUON_APPLY = Rule("muon_apply", "ieee", (), *_ROW, apply, apply_reference, hyper_length=3)
_PEER = (peer_scalars, 4, hyper, peer_prepare, not_elementwise, not_elementwise)
PEER_DIRECTION = Rule("muon_peer_direction", "torch", BUFFER, *_PEER, hyper_length=3)
PEER_APPLY = Rule("muon_peer_apply", "torch", (), *_PEER, hyper_length=3)
"""The rules that make the row of contracts "torch" and "eo", of kernels.muon.peers' steps."""
