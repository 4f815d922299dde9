"""AdamW on a page: all that FusedAdam does from gradient to weight, in plain torch, bit for bit.

Under the default contract, "ieee" (docs/numbers.md), for bf16 weights with fp32 masters:

    grad       = grad * min(1, clip_norm / (norm of all gradients + 1e-6))
    exp_avg    = beta1 * exp_avg + (1 - beta1) * grad
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * grad^2
    update     = exp_avg / (1 - beta1^step) / (sqrt(exp_avg_sq / (1 - beta2^step)) + eps)
    master     = master - lr * (update + weight_decay * master)
    param      = master, rounded to bf16

Numbers are fp32, and each operation is rounded once, to nearest, ties to even. torch does so on a
CPU but for its square root. Python's numbers are fp64: torch rounds one to fp32, once, where it
meets an fp32 tensor. The library does the same in one launch on a GPU.

    python examples/adam_on_a_page.py
"""

from collections.abc import Sequence

import torch

State = dict[str, torch.Tensor]


def begin(param: torch.Tensor) -> State:
    """Returns the state of a weight before its first step."""
    # moments are zeros, and the master is the weight's value
    master = param.detach().float().clone()
    return {
        "exp_avg": torch.zeros_like(master),
        "exp_avg_sq": torch.zeros_like(master),
        "master": master,
    }


@torch.no_grad()
def step(
    params: Sequence[torch.Tensor],
    states: Sequence[State],
    number: int,
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    clip_norm: float | None = None,
) -> None:
    """Steps weights by their gradients; number: that of the step, counted from 1."""
    # clipping: one factor for all gradients, 1 where their norm is small enough
    coefficient = torch.tensor(1.0)
    if clip_norm is not None:
        whole_norm = norm([param.grad for param in params if param.grad is not None])
        coefficient = (torch.tensor(clip_norm) / (whole_norm + 1e-6)).clamp(max=1.0)

    # bias corrections: reciprocals in fp64, so that an element takes products and no division
    beta1, beta2 = betas
    correction1, correction2 = (1.0 / (1.0 - power(beta, number)) for beta in betas)

    for param, state in zip(params, states, strict=True):
        if param.grad is None:
            continue

        # the gradient, exact in fp32, and its running means
        grad = param.grad.float() * coefficient
        exp_avg = beta1 * state["exp_avg"] + (1.0 - beta1) * grad
        exp_avg_sq = beta2 * state["exp_avg_sq"] + (1.0 - beta2) * (grad * grad)

        # Adam's direction: one root and one division an element
        update = (exp_avg * correction1) / (root(exp_avg_sq * correction2) + eps)

        # the master takes decay and update together, and the weight is its rounded copy
        master = state["master"] - lr * (update + weight_decay * state["master"])
        state.update(exp_avg=exp_avg, exp_avg_sq=exp_avg_sq, master=master)
        param.copy_(master)


def root(value: torch.Tensor) -> torch.Tensor:
    """Returns the correctly rounded fp32 root: torch's may be off by a last place on a CPU."""
    return value.double().sqrt().float()


def power(base: float, exponent: int) -> float:
    """Returns a power by fp64 products in one order: pow differs from one system to another."""
    if exponent == 0:
        return 1.0
    half = power(base, exponent // 2)
    return half * half * base if exponent % 2 else half * half


def norm(grads: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the norm, fp32, by sums of whole numbers: the same in any order."""
    square = torch.cat([grad.double().square().flatten() for grad in grads])  # exact
    if not square.isfinite().all():
        return square.sum().float()

    # squares are cut into whole multiples of a unit, and of one 2^50 times as small
    unit = 2.0 ** (int(torch.frexp(square.max()).exponent) // 50 * 50)
    upper = torch.round(square / unit)
    lower = torch.round((square - upper * unit) / (unit * 2.0**-50))
    upper_sum, lower_sum = (float(sum(part.long().tolist())) for part in (upper, lower))
    total = (upper_sum * 2.0**50 + lower_sum) * (unit * 2.0**-50)
    return torch.tensor(total, dtype=torch.float64).sqrt().float()


if __name__ == "__main__":
    from megaopt import FusedAdam

    weights = [torch.randn(64, 48).bfloat16(), torch.randn(48).bfloat16()]
    copies, states = [weight.clone() for weight in weights], [begin(weight) for weight in weights]
    optimizer = FusedAdam(weights, lr=1e-2, weight_decay=0.1, dtype=torch.float32)
    for number in range(1, 11):
        for weight, copy in zip(weights, copies, strict=True):
            weight.grad = copy.grad = torch.randn(weight.shape).bfloat16()
        optimizer.step(clip_norm=1.0)
        step(copies, states, number, lr=1e-2, weight_decay=0.1, clip_norm=1.0)
    print("10 steps have FusedAdam's bits:", all(map(torch.equal, weights, copies)))
