"""Contract torch's twin on the CPU: its fused multiply-add rounds once, its order is torch's."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from bits import assert_same_bits
from step_cases import hard_values, reference_step, triton_step
from torch_oracle import F32, fma, one_element

from megaopt.kernels.chunks.batch import Formats
from megaopt.kernels.formats import GRADS, MOMENTS, NONE, WEIGHTS
from megaopt.kernels.rules import RULES
from megaopt.kernels.rules.adam_torch import fused_multiply_add

FP32 = MOMENTS[torch.float32]


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


BETAS = [(0.9, 0.95), (0.1, 0.3), (0.0, 0.0), (0.9, 0.999)]
NAN = torch.tensor(torch.nan)


def group_of(betas, weight_decay):
    """Without bias correction: powf is the GPU's."""
    rest = {"lr": 3e-3, "eps": 1e-8, "bias_correction": False, "step": 1}
    return {**rest, "betas": betas, "weight_decay": weight_decay}


def drawn(count, hard):
    """A parameter, both moments and a gradient; hard ones hold infinities, NaN and subnormals."""
    generator = torch.Generator().manual_seed(0)
    if hard:
        draws = [hard_values(count, generator) for _ in range(3)]
        return [*draws[:2], hard_values(count, generator, positive=True), draws[2]]
    param, exp_avg, grad = (torch.randn(count, generator=generator) for _ in range(3))
    return [param, exp_avg, torch.rand(count, generator=generator), grad]


@pytest.mark.sample(3)
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("hard", [False, True], ids=["ordinary", "hard"])
@pytest.mark.parametrize("betas", BETAS, ids=str)
def test_twin_takes_torchs_operations(betas, hard, weight_decay):
    """Against fractions, one operation at a time."""
    group, values = group_of(betas, weight_decay), drawn(600, hard)
    rule = RULES["adamw", "torch"]
    param, *moments, grad = values
    param, moments = rule.update_reference(param, moments, grad, rule.scalars(group))
    found = (param, *moments)
    expected = [one_element(*each, group) for each in zip(*values, strict=True)]
    for tensor, own in zip(found, zip(*expected, strict=True), strict=True):
        truth = torch.from_numpy(np.array(own, dtype=F32))
        pair = [torch.where(each.isnan(), NAN, each) for each in (tensor, truth)]  # no payloads
        assert_same_bits(*pair)


@pytest.mark.parametrize("name", ["adamw", "adam", "adamw_amsgrad", "adam_amsgrad"])
@pytest.mark.parametrize("grad", [torch.inf, -torch.inf, torch.nan, 3e38])
def test_a_gradient_that_overflows_makes_the_average_nan(name, grad, device):
    """torch's inner multiply-add takes infinity from infinity; 3e38 has an infinite square."""
    rule, group = RULES[name, "torch"], group_of((0.9, 0.95), 0.0)
    tables = (table[torch.float32] for table in (GRADS, WEIGHTS))
    formats = Formats(*tables, NONE, (FP32,) * len(rule.moments), rule.moments)
    for step in (triton_step, reference_step):
        where = device if step is triton_step else "cpu"
        tensors = {slot: [torch.full((5,), 0.25, device=where)] for slot in formats.slots}
        tensors["grad"][0][2] = grad
        step(tensors, formats, rule, group)
        for slot in rule.moments[:2]:
            is_finite = slot == "exp_avg" and grad == 3e38
            assert tensors[slot][0].isnan().tolist() == [False, False, not is_finite, False, False]


def test_two_negative_zeros_make_a_positive_one(device):
    """torch's inner multiply-add adds a zero of either sign; a product alone would be negative."""
    rule, group = RULES["adamw", "torch"], group_of((0.9, 0.95), 0.0)
    tables = (table[torch.float32] for table in (GRADS, WEIGHTS))
    formats = Formats(*tables, NONE, (FP32,) * len(rule.moments), rule.moments)
    for step in (triton_step, reference_step):
        where = device if step is triton_step else "cpu"
        tensors = {slot: [torch.full((3,), -0.0, device=where)] for slot in formats.slots}
        step(tensors, formats, rule, group)
        assert_same_bits(tensors["exp_avg"][0].cpu(), torch.zeros(3))


@triton.jit
def multiply_add(values_ptr):
    a = tl.load(values_ptr + tl.arange(0, 1))
    b = tl.load(values_ptr + 1 + tl.arange(0, 1))
    tl.store(values_ptr + tl.arange(0, 1), tl.fma(a, a, b))


def rounds_once(device):
    """Whether tl.fma does: the interpreter of Triton 3.6 rounds the product too."""
    values = torch.tensor([1 + 2.0**-12, -1 - 2.0**-11], device=device)
    multiply_add[(1,)](values)
    return values[0].item() == 2.0**-24


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("name", ["adamw_amsgrad", "adam_amsgrad"])
def test_amsgrad_takes_the_larger_as_std_max_does(name, weight_decay, device):
    """Kernel and twin; the largest stays where the new one is NaN, and where itself is."""
    if not rounds_once(device):
        pytest.skip("this Triton's interpreter rounds a fused multiply-add twice")
    rule, group = RULES[name, "torch"], group_of((0.9, 0.95), weight_decay)
    tables = (table[torch.float32] for table in (GRADS, WEIGHTS))
    formats = Formats(*tables, NONE, (FP32,) * 3, rule.moments)
    generator = torch.Generator().manual_seed(3)
    start = {
        slot: hard_values(700, generator, positive=slot.endswith("_sq")) for slot in formats.slots
    }
    sides = []
    for step in (triton_step, reference_step):
        where = device if step is triton_step else "cpu"
        tensors = {slot: [value.to(where, copy=True)] for slot, value in start.items()}
        step(tensors, formats, rule, group)
        sides.append({slot: own[0].cpu() for slot, own in tensors.items()})
    for slot in formats.slots:
        # no payloads: the contract promises none
        pair = [torch.where(side[slot].isnan(), NAN, side[slot]) for side in sides]
        assert_same_bits(*pair, slot)
    before, after = start["max_exp_avg_sq"], sides[0]["max_exp_avg_sq"]
    new = sides[0]["exp_avg_sq"]
    kept = before.isnan() | new.isnan() | (before >= new)
    assert_same_bits(after[kept & ~before.isnan()], before[kept & ~before.isnan()])
    assert_same_bits(after[~kept], new[~kept])
