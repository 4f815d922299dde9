"""Eight roots and divisions under one guard: the bits of sqrt_rn and div_rn."""

import pytest
import torch

from megaopt.kernels.optional_triton import jit, tl
from megaopt.kernels.rules.adam_ieee import quotient

pytestmark = pytest.mark.gpu
COUNT = 2**22


@jit
def both(numerator_ptr, square_ptr, own_ptr, expected_ptr, eps, ROWS: tl.constexpr):
    """Of a tile: ours, and each operation by itself."""
    first = tl.program_id(0) * ROWS * 8
    offsets = first + tl.arange(0, ROWS)[:, None] * 8 + tl.arange(0, 8)[None, :]
    numerator = tl.load(numerator_ptr + offsets)
    square = tl.load(square_ptr + offsets)
    tl.store(own_ptr + offsets, quotient(numerator, square, eps))
    expected = tl.math.div_rn(numerator, tl.math.sqrt_rn(square) + eps)
    tl.store(expected_ptr + offsets, expected)


def pattern(count):
    """fp32 numbers of any pattern."""
    return torch.randint(-(2**31), 2**31, (count,), device="cuda").int().view(torch.float32)


def spread(count, low, high):
    """Numbers whose logarithm to the base 2 is uniform, of either sign."""
    size = torch.exp2(torch.empty(count, device="cuda").uniform_(low, high))
    return size * torch.randint(0, 2, (count,), device="cuda").mul(2).sub(1)


def ties(count):
    """Numerators and squares whose quotient lies near the middle of two numbers, eps 0."""
    root = torch.randint(2**23, 2**24, (count,), device="cuda").double() / 2**23
    middle = torch.randint(2**23, 2**24, (count,), device="cuda").double() / 2**23 + 2.0**-24
    return (middle * root.float().double()).float(), (root * root).float()


KINDS = {
    "adam": lambda: (spread(COUNT, -40, 10), spread(COUNT, -80, 20).abs()),
    "edges": lambda: (spread(COUNT, -62, -58), spread(COUNT, -103, -97).abs()),
    "large": lambda: (spread(COUNT, 50, 127.9), spread(COUNT, 90, 127.9).abs()),
    "any": lambda: (pattern(COUNT), pattern(COUNT)),
    "ties": lambda: ties(COUNT),
}
MIXED = {
    "a pattern among eight": lambda kind: (
        torch.where(torch.arange(COUNT, device="cuda") % 8 == 3, pattern(COUNT), kind[0]),
        torch.where(torch.arange(COUNT, device="cuda") % 8 == 6, pattern(COUNT), kind[1]),
    ),
    "all": lambda kind: kind,
    "zeros": lambda kind: (
        torch.where(torch.arange(COUNT, device="cuda") % 64 == 1, -0.0, kind[0]),
        torch.where(torch.arange(COUNT, device="cuda") % 64 == 9, 0.0, kind[1]),
    ),
}


@pytest.mark.parametrize("eps", [0.0, 1e-8, 1e-30, 1.0, 3e38])
@pytest.mark.parametrize("mixed", MIXED)
@pytest.mark.parametrize("kind", KINDS)
def test_the_quotient_is_rounded_as_each_operation_by_itself(kind, mixed, eps):
    numerator, square = MIXED[mixed](KINDS[kind]())
    own, expected = torch.empty_like(numerator), torch.empty_like(numerator)
    both[(COUNT // 1024,)](numerator, square, own, expected, eps, 128)
    # a NaN's bits are its maker's
    own, expected = (each.nan_to_num(7.5, torch.inf, -torch.inf) for each in (own, expected))
    assert torch.equal(own.view(torch.int32), expected.view(torch.int32))
