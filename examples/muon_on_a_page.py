"""Muon on a page: all that FusedMuon does from gradient to matrix, bit for bit.

Under the default contract, "ieee" (docs/numbers.md), for one bf16 matrix with an fp32 master:

    momentum_buffer = momentum * momentum_buffer + (1 - momentum) * grad
    direction       = momentum * momentum_buffer + (1 - momentum) * grad    (nesterov)
    X               = direction, rounded to bf16, over its norm
    X               = a X + (b A + c A A) X, with A = X X^T, ns_steps times
    update          = sqrt(max(1, rows / columns)) * X
    master          = (1 - lr * weight_decay) * master - lr * update
    param           = master, rounded to bf16

Numbers are fp32 unless they are called bf16, and each operation is rounded once, to nearest, ties
to even; Python's numbers, fp64, are rounded to fp32 where they meet a tensor. All is plain torch
but for `product`, whose sums have the order of tensor cores. Gradients are finite here; FusedMuon
has more: batches of matrices, fp16, other factors of an update, Gram's form.

    python examples/muon_on_a_page.py
"""

import torch

# left @ right, fp32, of bf16 matrices, as docs/numbers.md's "Products" specifies it: a sum takes 16
# products at a time, each cut to 25 bits behind the point of the largest
from megaopt.kernels.products.reference import product_reference as product

State = dict[str, torch.Tensor]
Triple = tuple[float, float, float]


def begin(param: torch.Tensor) -> State:
    """Returns the state of a weight before its first step."""
    master = param.detach().float().clone()
    return {"momentum_buffer": torch.zeros_like(master), "master": master}


@torch.no_grad()
def step(
    param: torch.Tensor,
    grad: torch.Tensor,
    state: State,
    *,
    lr: float,
    weight_decay: float = 0.1,
    momentum: float = 0.95,
    nesterov: bool = True,
    ns_coefficients: Triple = (3.4445, -4.775, 2.0315),
    eps: float = 1e-7,
    ns_steps: int = 5,
) -> None:
    """Steps a bf16 matrix by its gradient."""
    # the momentum, and the direction: its average with the gradient, or itself
    grad, lr = grad.float(), torch.tensor(lr, dtype=torch.float32).item()
    momentum_buffer = momentum * state["momentum_buffer"] + (1.0 - momentum) * grad
    direction = momentum_buffer
    if nesterov:
        direction = momentum * momentum_buffer + (1.0 - momentum) * grad

    # an update of a tall matrix is larger, by the root of rows / columns
    rows, columns = param.shape
    ratio = torch.tensor(max(1.0, rows / columns), dtype=torch.float64).sqrt().float()
    update = orthogonal(direction, ratio, ns_coefficients, eps, ns_steps)

    # the master takes decay and update, and the weight is its rounded copy
    master = (1.0 - lr * weight_decay) * state["master"] - lr * update.float()
    state.update(momentum_buffer=momentum_buffer, master=master)
    param.copy_(master)


def orthogonal(
    direction: torch.Tensor, ratio: torch.Tensor, coefficients: Triple, eps: float, steps: int
) -> torch.Tensor:
    """Returns ratio times about U V^T of a direction U S V^T, bf16, by Newton and Schulz."""
    # a wide X is iterated, so that X X^T is the smaller square, and X is never divided by its norm:
    # products are multiplied by `before` and `after` ahead of their rounding
    matrix, one = direction.bfloat16(), torch.tensor(1.0)
    inverse = one / norm(matrix).clamp(min=eps)
    is_tall = matrix.shape[0] > matrix.shape[1]
    matrix = matrix.mT if is_tall else matrix

    # A = X X^T, B = b A + c A A, X = a X + B X: singular values come near 1
    a, b, c = coefficients
    for index in range(steps):
        before, after = inverse if index == 0 else one, ratio if index == steps - 1 else one
        gram = (product(matrix, matrix.mT) * (before * before)).bfloat16()
        polynomial = (c * product(gram, gram) + b * gram.float()).bfloat16()
        matrix = (product(polynomial, matrix) + a * matrix.float()) * (before * after)
        matrix = matrix.bfloat16()
    return matrix.mT if is_tall else matrix


def norm(matrix: torch.Tensor) -> torch.Tensor:
    """Returns the norm, fp32, by sums of whole numbers: examples/adam_on_a_page.py says how."""
    square = matrix.double().square()
    unit = 2.0 ** (int(torch.frexp(square.max()).exponent) // 50 * 50)
    upper = torch.round(square / unit)
    lower = torch.round((square - upper * unit) / (unit * 2.0**-50))
    upper_sum, lower_sum = (float(sum(part.long().flatten().tolist())) for part in (upper, lower))
    total = (upper_sum * 2.0**50 + lower_sum) * (unit * 2.0**-50)
    return torch.tensor(total, dtype=torch.float64).sqrt().float()


if __name__ == "__main__":
    from megaopt import FusedMuon

    weight = torch.randn(64, 48).bfloat16()
    copy, state = weight.clone(), begin(weight)
    optimizer = FusedMuon([weight], lr=1e-2, weight_decay=0.1, dtype=torch.float32)
    for _ in range(10):
        weight.grad = torch.randn(weight.shape).bfloat16()
        optimizer.step()
        step(copy, weight.grad, state, lr=1e-2, weight_decay=0.1)
    print("10 steps have FusedMuon's bits:", torch.equal(weight, copy))
