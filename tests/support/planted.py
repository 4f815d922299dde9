"""Torch calls that fail, one after the other, where a step takes memory."""

from runs import copied, params_of

from megaopt.float8 import Float8Weight


def everything(optimizer):
    """Weights, states, counts and gradients, copied."""
    params = params_of(optimizer)
    weights = [p.tensors() if isinstance(p, Float8Weight) else p.detach() for p in params]
    states = [dict(optimizer.state[p]) if p in optimizer.state else None for p in params]
    counts = [group["step"] for group in optimizer.param_groups]
    return copied([weights, states, counts, [param.grad for param in params]])
