"""Contract torch's twin on the CPU: its fused multiply-add rounds once, its order is torch's."""

import numpy as np
import pytest
import torch
from bits import assert_same_bits
from step_cases import hard_values
from torch_oracle import F32, fma, one_element

from megaopt.kernels.rules import RULES
from megaopt.kernels.rules.adam_torch import fused_multiply_add


@pytest.mark.parametrize("spread", [0, 12, 24, 40])
def test_multiply_add_rounds_once(spread):
    generator = torch.Generator().manual_seed(spread)
    a, b = (torch.randn(400, generator=generator) for _ in range(2))
    c = torch.randn(400, generator=generator) * 2.0**spread
    expected = [fma(*each) for each in zip(a.tolist(), b.tolist(), c.tolist(), strict=True)]
    assert_same_bits(fused_multiply_add(a, b, c), torch.from_numpy(np.array(expected, dtype=F32)))


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_multiply_add_meets_a_false_tie(sign):
    """The exact sum lies 2**-70 below a tie of fp32, which fp64 cannot see."""
    a = torch.tensor([sign * 2.0**-24 * (1 - 2.0**-23)])
    b = torch.tensor([1 + 2.0**-23])
    c = torch.tensor([sign * (1 + 2.0**-23)])
    assert_same_bits(fused_multiply_add(a, b, c), c)
    assert (a.double() * b.double() + c.double()).float().item() == sign * (1 + 2.0**-22)


def test_multiply_add_keeps_infinities_and_nans():
    values = hard_values(3000, torch.Generator().manual_seed(1))
    found = fused_multiply_add(values, values.flip(0), values.roll(7))
    product = values.double() * values.flip(0).double()
    plain = (product + values.roll(7).double()).float()
    assert found.isnan().equal(plain.isnan())
    assert found.isinf().equal(plain.isinf())


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_twin_takes_torchs_operations(weight_decay):
    """Against fractions, one operation at a time, without bias correction (powf is the GPU's)."""
    group = {
        "lr": 3e-3,
        "betas": (0.9, 0.95),
        "eps": 1e-8,
        "weight_decay": weight_decay,
        "bias_correction": False,
        "step": 1,
    }
    generator = torch.Generator().manual_seed(0)
    param, exp_avg, grad = (torch.randn(60, generator=generator) for _ in range(3))
    exp_avg_sq = torch.rand(60, generator=generator)
    rule = RULES["adamw", "torch"]
    found = rule.update_reference(param, exp_avg, exp_avg_sq, grad, rule.scalars(group))
    expected = [
        one_element(*each, group) for each in zip(param, exp_avg, exp_avg_sq, grad, strict=True)
    ]
    for tensor, values in zip(found, zip(*expected, strict=True), strict=True):
        assert_same_bits(tensor, torch.from_numpy(np.array(values, dtype=F32)))
