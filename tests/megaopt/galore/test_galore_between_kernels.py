"""GaLoreAdamW's kernels beside each other, where their sums have other orders."""

import pytest
import torch
from bits import assert_same_bits
from runs import BF16, FP32, params_of, values

from megaopt import GaLoreAdamW
from megaopt.kernels.galore.rule import LEFT, RIGHT

# How far kernels of GaLore may differ in one step: docs/numbers.md states the bound.


def bound_of_a_step(before, after, grad, side, coefficient, numbers):
    """How far apart the weights of two kernels may be after one step, [m, n] in fp64.

    A sum of k products is off by k * unit of the products' magnitudes in any order (Higham,
    Accuracy and Stability, 3.5), two of them by twice that. dR of the projected gradient moves the
    mean by rest1 * dR and the root of the square, a norm of R and what was there, by at most
    sqrt(rest2) * dR, so N = mean / (root + eps) by (rest1 + |N| * sqrt(rest2)) * dR / (root + eps);
    six more operations round N. Each of the update's four operations rounds a number of the
    weight's size.
    """
    unit = 2.0**-24
    basis, grad = after["projection"].double().abs(), grad.double().abs() * coefficient
    (beta1, beta2), eps = (0.9, 0.999), numbers["eps"]
    rest1, rest2 = 1 - beta1, 1 - beta2
    low = grad @ basis.mT if side == RIGHT else basis.mT @ grad
    terms = grad.shape[1] if side == RIGHT else grad.shape[0]
    mean, root = after["exp_avg"].double(), after["exp_avg_sq"].double().sqrt()
    found = mean.abs() / (root + eps)
    moved = (rest1 + found * rest2**0.5) * (2.01 * terms * unit * low) / (root + eps)
    # the mean's own sum may cancel: its roundings are of what is added up
    summed = beta1 * before["exp_avg"].double().abs() + rest1 * low
    moved = moved + 2.0**-22 * (found + summed / (root + eps))
    rank = basis.shape[0] if side == RIGHT else basis.shape[1]
    moved = moved + 2.01 * rank * unit * found
    step = after["step"]
    size = numbers["lr"] * numbers["scale"] * (1 - beta2**step) ** 0.5 / (1 - beta1**step)
    update = size * (moved @ basis if side == RIGHT else basis @ moved)
    whole = size * (found @ basis if side == RIGHT else basis @ found)
    return update + 8 * 2.0**-24 * (before["master"].double().abs() + whole)


RANKED = {"rank": 3, "update_proj_gap": 3, "scale": 0.25}
NUMBERS = {"lr": 0.01, "weight_decay": 0.1, "eps": 1e-4}
MASTERS = {"dtype": FP32, "store_param_remainders": True}


def copy_of(optimizer):
    (param,) = params_of(optimizer)
    state = optimizer.state[param]
    found = {name: state[name].clone() for name in ("exp_avg", "exp_avg_sq", "projection")}
    found["master"] = optimizer.get_unscaled_state(param, "master_param").clone()
    return {**found, "step": optimizer.param_groups[0]["step"]}


@pytest.mark.sample(8)
@pytest.mark.parametrize("kernel", ["grouped", "fused"])
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("precision", ["ieee", "tf32", "bf16"])
@pytest.mark.parametrize("shape", [(517, 33), (33, 300)], ids=str)
def test_kernels_have_the_same_bits_or_differ_as_sums_of_ieee_may(
    shape, precision, steps, kernel, device
):
    """In one step from the same state; docs/numbers.md states the bound."""
    given = {"precision": precision, "rank": 8, "update_proj_gap": 100, "eps": NUMBERS["eps"]}
    options, side = {**MASTERS, **given}, LEFT if shape[0] < shape[1] else RIGHT
    pair = []
    for each in ("torch", kernel):
        param = torch.nn.Parameter(values(shape, 0, BF16).to(device))
        optimizer = GaLoreAdamW([param], kernel=each, **{**NUMBERS, **RANKED, **options})
        optimizer.initialize_states()
        pair.append(optimizer)
    for step in range(steps):
        params_of(pair[0])[0].grad = values(shape, 50 + step, BF16).to(device)
        pair[0].step()
    with torch.no_grad():
        params_of(pair[1])[0].copy_(params_of(pair[0])[0])
    pair[1].load_state_dict(pair[0].state_dict())
    before, grad = copy_of(pair[0]), values(shape, 100, BF16).to(device)
    for optimizer in pair:
        params_of(optimizer)[0].grad = grad.clone()
        optimizer.step(clip_norm=1.0)
    after, found = (copy_of(each) for each in pair)
    assert_same_bits(found["projection"], after["projection"])
    if precision != "ieee":
        for name in ("exp_avg", "exp_avg_sq", "master"):
            assert_same_bits(found[name], after[name], name)
        assert_same_bits(*(params_of(each)[0].detach() for each in pair))
        return
    coefficient = min(1.0, 1.0 / float(pair[0].grad_norm))
    own = {**NUMBERS, **RANKED}
    bound = bound_of_a_step(before, after, grad, side, coefficient, own)
    difference = (found["master"].double() - after["master"].double()).abs()
    assert bool((difference <= bound).all()), float((difference / bound).max())
    # a bound that means something: an update that is not there is beyond it
    assert float(((before["master"] - after["master"]).double().abs() / bound).median()) > 10
