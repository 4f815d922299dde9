"""The linear layer of an fp8 weight: the products that F.linear makes of the values, in any layout.

Matrix products are the processor's and have other bits on another one; so both sides make the same
product here, whichever path torch takes for it.
"""

import random

import pytest
import torch
from bits import assert_same_bits
from float8_models import BF16, FP32
from torch.nn import functional

from megaopt.float8 import Float8Weight


def laid_out(rng, shape):
    """Contiguous values, or with dimensions in any order and the innermost with a step or not."""
    if rng.random() < 0.4:
        return torch.randn(shape)
    order, step = list(range(len(shape))), rng.choice([1, 1, 2])
    rng.shuffle(order)
    sizes = [shape[dim] for dim in order]
    values = torch.randn(*sizes[:-1], sizes[-1] * step)[..., ::step]
    return values.permute([order.index(dim) for dim in range(len(shape))])


def a_case(rng):
    """Weight, bias or None, input and the gradient of the output."""
    rows, columns = rng.choice([1, 10, 64, 160]), rng.choice([8, 24, 48, 160])
    batch = [rng.choice([1, 2, 3, 7, 16]) for _ in range(rng.choice([0, 1, 2, 2, 2, 3]))]
    bias = rng.choice([None, torch.randn(rows)])
    return (
        torch.randn(rows, columns), bias, laid_out(rng, [*batch, columns]),
        laid_out(rng, [*batch, rows]),
    )  # fmt: skip


def layer(weight, bias, input, grad, enabled=True):
    """The output, and the gradients of what needs one."""
    input = input.detach().requires_grad_()
    bias = None if bias is None else bias.detach().requires_grad_()
    with torch.set_grad_enabled(enabled):
        out = functional.linear(input, weight, bias)
    if not enabled:
        return {"out": out}
    named = {"input": input, "weight": weight, "bias": bias}
    needed = {name: one for name, one in named.items() if one is not None and one.requires_grad}
    return {
        "out": out.detach(),
        **dict(zip(needed, torch.autograd.grad(out, [*needed.values()], grad), strict=True)),
    }


def tries(count):
    """Cases of both dtypes with the fp8 weight, its values as a weight, and the plain layer."""
    rng = random.Random(0)
    for _ in range(count):
        dtype = rng.choice([BF16, FP32])
        weight, bias, x, grad = (None if t is None else t.to(dtype) for t in a_case(rng))
        float8 = Float8Weight.from_values(weight, "current").requires_grad_()
        plain = float8.dequantize().detach().requires_grad_()
        yield float8, bias, x, grad, layer(plain, bias, x, grad)


@pytest.mark.slow
def test_the_products_are_those_of_a_plain_weight_whatever_needs_a_gradient():
    """Of a training layer, of one whose weight is frozen, and without any gradients."""
    for float8, bias, x, grad, expected in tries(100):
        found = {
            "trained": layer(float8, bias, x, grad),
            "frozen": layer(float8.detach(), bias, x, grad),
            "without gradients": layer(float8, bias, x, grad, enabled=False),
        }
        assert found["trained"].keys() == expected.keys()
        assert found["frozen"].keys() == expected.keys() - {"weight"}
        for how, tensors in found.items():
            for name, tensor in tensors.items():
                what = f"{name} of input {x.shape}, {x.stride()}, {how}"
                assert_same_bits(tensor, expected[name], what)
