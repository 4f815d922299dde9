"""SGD under contract ieee: plain, with momentum, Nesterov's. docs/numbers.md has the operations.

The momentum buffer starts as the first gradient, as torch.optim.SGD's does: the row of a group's
first step has 1 in the place of 1 - dampening.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from megaopt.kernels.optional_triton import helper, tl
from megaopt.kernels.rules.base import Moment, Rule, round_row
from megaopt.kernels.rules.loading import number

MOMENTUM: tl.constexpr = tl.constexpr(0)
DAMPENING: tl.constexpr = tl.constexpr(1)
WEIGHT_DECAY: tl.constexpr = tl.constexpr(2)

Scalars = tuple[float, ...]
Moments = tuple[torch.Tensor, ...]


def hyper(group: Mapping[str, Any]) -> tuple[float, ...]:
    """momentum, dampening, weight_decay."""
    return tuple(float(group[name]) for name in ("momentum", "dampening", "weight_decay"))


def scalars(group: Mapping[str, Any]) -> Scalars:
    """One row of fp32 numbers for a parameter group, computed in fp64 and rounded once.

    lr in units of the parameter per unit of the gradient. 1 - dampening is 1 at the first step.
    """
    momentum, dampening, weight_decay = hyper(group)
    grad_share = 1.0 if group["step"] == 1 else 1.0 - dampening
    return round_row((momentum, grad_share, weight_decay, float(group["lr"])))


@helper
def prepare(hyper_ptr, lr, step):
    one = tl.full((), 1.0, tl.float64)
    return (
        number(hyper_ptr, MOMENTUM).to(tl.float32),
        tl.where(step == 1, one, one - number(hyper_ptr, DAMPENING)).to(tl.float32),
        number(hyper_ptr, WEIGHT_DECAY).to(tl.float32),
        lr,
    )


@helper
def updated(
    param, moments, grad, scalars, MOMENTS: tl.constexpr, NESTEROV: tl.constexpr,
    DECOUPLED: tl.constexpr,
):  # fmt: skip
    momentum, grad_share, weight_decay, lr = scalars
    update = grad
    if not DECOUPLED:
        update = update + weight_decay * param
    after = ()
    if MOMENTS > 0:
        # as torch, a group whose momentum is 0 for a while leaves the buffer, and dampens nothing
        rests = momentum == 0
        momentum_buffer = momentum * moments[0] + grad_share * update
        with_momentum = update + momentum * momentum_buffer if NESTEROV else momentum_buffer
        update = tl.where(rests, update, with_momentum)
        after = (tl.where(rests, moments[0], momentum_buffer),)
    if DECOUPLED:
        update = update + weight_decay * param
    return param - lr * update, after


def reference(nesterov: bool, decoupled: bool) -> Callable[..., tuple[torch.Tensor, Moments]]:
    """The twin of one kind of SGD."""

    def update(
        param: torch.Tensor, moments: Moments, grad: torch.Tensor, scalars: Scalars
    ) -> tuple[torch.Tensor, Moments]:
        """One SGD update of fp32 tensors of one shape, as torch.optim.SGD has it.

        (Sutskever et al. 2013); with decoupled decay as Loshchilov & Hutter 2019, arXiv:1711.05101.
        """
        momentum, grad_share, weight_decay, lr = scalars
        # L2 decay joins the gradient before the buffer
        direction = grad if decoupled else grad + param * weight_decay
        after: Moments = ()
        if moments:
            # momentum 0 leaves the buffer, as in the kernel
            rests = torch.as_tensor(momentum == 0, device=param.device)
            momentum_buffer = moments[0] * momentum + direction * grad_share
            mixed = direction + momentum_buffer * momentum if nesterov else momentum_buffer
            direction = torch.where(rests, direction, mixed)
            after = (torch.where(rests, moments[0], momentum_buffer),)
        direction = direction + param * weight_decay if decoupled else direction
        return param - direction * lr, after

    return update


def rule(name: str, momentum: bool, nesterov: bool, decoupled: bool) -> Rule:
    """One kind of SGD."""
    MOMENTS, NESTEROV = tl.constexpr(int(momentum)), tl.constexpr(nesterov)
    DECOUPLED = tl.constexpr(decoupled)

    @helper
    def update(param, moments, grad, scalars):  # noqa: ANN202
        return updated(param, moments, grad, scalars, MOMENTS, NESTEROV, DECOUPLED)

    buffers = (Moment("momentum_buffer"),) if momentum else ()
    arguments = (scalars, 4, hyper, prepare, update, reference(nesterov, decoupled))
    return Rule(name, "ieee", buffers, *arguments, moments_use_param=not decoupled)


SGD_RULES = (
    rule("sgd", False, False, False),
    rule("sgd_momentum", True, False, False),
    rule("sgd_nesterov", True, True, False),
    rule("sgdw", False, False, True),
    rule("sgdw_momentum", True, False, True),
    rule("sgdw_nesterov", True, True, True),
)
