"""GaLore on a page: all that GaLoreAdamW does from gradient to matrix, in plain torch, bit for bit.

With precision="ieee", kernel="torch", refresh="svd" and stagger=False, under the default contract
(docs/numbers.md), for one bf16 matrix with an fp32 master and at least as many rows as columns:

    projection = the first rank right singular vectors of grad, anew each update_proj_gap steps
    low        = grad @ projection^T                              [rows, rank]
    exp_avg    = beta1 * exp_avg + (1 - beta1) * low
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * low^2
    update     = (exp_avg / (sqrt(exp_avg_sq) + eps)) @ projection    [rows, columns]
    master     = master - lr * scale * sqrt(1 - beta2^step) / (1 - beta1^step) * update
    master     = master - lr * weight_decay * master
    param      = master, rounded to bf16

A wide matrix is projected on the other side, by left singular vectors. Numbers are fp32, and each
operation is rounded once, to nearest, ties to even; the two products and the SVD are torch's.
Python's numbers, fp64, are rounded to fp32 where they meet a tensor. The library's default,
refresh="subspace", follows the gradients without an SVD.

    python examples/galore_on_a_page.py
"""

import torch

State = dict[str, torch.Tensor]


def begin(param: torch.Tensor, rank: int) -> State:
    """Returns the state of a matrix before its first step."""
    # moments are of the projected gradient; the projection is zeros until a gradient makes it
    rows, columns = param.shape
    is_wide = rows < columns
    return {
        "exp_avg": torch.zeros(rank, columns) if is_wide else torch.zeros(rows, rank),
        "exp_avg_sq": torch.zeros(rank, columns) if is_wide else torch.zeros(rows, rank),
        "projection": torch.zeros(rows, rank) if is_wide else torch.zeros(rank, columns),
        "master": param.detach().float().clone(),
    }


@torch.no_grad()
def step(
    param: torch.Tensor,
    grad: torch.Tensor,
    state: State,
    number: int,
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-6,
    weight_decay: float = 0.0,
    update_proj_gap: int = 200,
    scale: float = 1.0,
) -> None:
    """Steps a matrix by its gradient; number: that of the step, counted from 1."""
    # the projection: where its turn is, or where there is none yet
    grad, is_wide = grad.float(), param.shape[0] < param.shape[1]
    if (number - 1) % update_proj_gap == 0 or not state["projection"].any():
        refresh(state["projection"], grad, is_wide)
    projection = state["projection"]

    # the projected gradient and its running means
    low = projection.mT @ grad if is_wide else grad @ projection.mT
    beta1, beta2 = betas
    exp_avg = beta1 * state["exp_avg"] + (1.0 - beta1) * low
    exp_avg_sq = beta2 * state["exp_avg_sq"] + (1.0 - beta2) * (low * low)

    # Adam's direction, projected back; torch's fp32 root may be off by a last place on a CPU
    normed = exp_avg / (exp_avg_sq.double().sqrt().float() + eps)
    update = projection @ normed if is_wide else normed @ projection

    # the size of the step, in fp64 of lr in fp32: it has both bias corrections
    lr = torch.tensor(lr, dtype=torch.float32).item()
    root = torch.tensor(1.0 - power(beta2, number), dtype=torch.float64).sqrt().item()
    step_size = lr * scale * root / (1.0 - power(beta1, number))

    # the master takes the update, then its decay, and the weight is its rounded copy
    master = state["master"] - step_size * update
    master = master - lr * weight_decay * master
    state.update(exp_avg=exp_avg, exp_avg_sq=exp_avg_sq, master=master)
    param.copy_(master)


def refresh(projection: torch.Tensor, grad: torch.Tensor, is_wide: bool) -> None:
    """Makes a projection, in place, of a gradient that is finite and not 0."""
    # times the power of two that brings its largest number to [0.5, 1): no loss scale shows
    largest = grad.abs().max()
    if 0 < largest < torch.inf:
        factor = (torch.frexp(largest).mantissa / largest).clamp(2.0**-125, 2.0**125)
        left, _, right = torch.linalg.svd(grad * factor, full_matrices=False)
        rank = min(projection.shape)
        projection.copy_(left[:, :rank] if is_wide else right[:rank])


def power(base: float, exponent: int) -> float:
    """Returns a power by fp64 products in one order: pow differs from one system to another."""
    if exponent == 0:
        return 1.0
    half = power(base, exponent // 2)
    return half * half * base if exponent % 2 else half * half


if __name__ == "__main__":
    from megaopt import GaLoreAdamW

    weight, numbers = torch.randn(64, 48).bfloat16(), {"lr": 1e-2, "weight_decay": 0.1}
    copy, state = weight.clone(), begin(weight, rank=8)
    choices = {"kernel": "torch", "refresh": "svd", "stagger": False, "dtype": torch.float32}
    optimizer = GaLoreAdamW([weight], rank=8, update_proj_gap=4, **numbers, **choices)
    for number in range(1, 11):
        weight.grad = torch.randn(weight.shape).bfloat16()
        optimizer.step()
        step(copy, weight.grad, state, number, update_proj_gap=4, **numbers)
    print("10 steps have GaLoreAdamW's bits:", torch.equal(weight, copy))
