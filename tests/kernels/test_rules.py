"""The host's arithmetic: scalars rounded once from exact fp64, powers that any machine repeats."""

from fractions import Fraction

import numpy as np
import oracle
import pytest
import torch
from bits import assert_same_bits
from hypothesis import given
from hypothesis import strategies as st
from step_cases import IEEE_RULES

from megaopt.kernels.rules.adam_ieee import square_root_reference
from megaopt.kernels.rules.base import power, round_to_fp32

GROUP = {
    "lr": 0.1,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.01,
    "bias_correction": True,
    "step": 1,
}


@given(st.floats(0, 1, exclude_max=True), st.integers(1, 10**7))
def test_power_is_squaring_with_one_rounding_a_product(base, exponent):
    assert power(base, exponent) == oracle.power(base, exponent)


@pytest.mark.parametrize("step", [1, 2, 3, 10, 1000, 100_000])
def test_power_is_near_the_exact_one(step):
    """At most 2 * bits(step) roundings, each of relative error 2**-53, doubled by each squaring.

    Squaring doubles the relative error so far and adds a rounding, a product adds one more, so that
    after all bits the error is below 2 * step roundings: less than 2**-51 * step in all
    for step < 2**50.
    """
    exact = Fraction(0.999) ** step
    assert abs(Fraction(power(0.999, step)) - exact) <= exact * step * Fraction(1, 2**51)


@pytest.mark.parametrize("rule", IEEE_RULES, ids=lambda rule: rule.name)
@pytest.mark.parametrize("step", [1, 2, 7, 100, 12345])
def test_scalars_are_rounded_once(rule, step):
    beta1, beta2 = GROUP["betas"]
    exact = (
        *(beta1, 1 - beta1, beta2, 1 - beta2),
        *(1 / (1 - oracle.power(beta1, step)), 1 / (1 - oracle.power(beta2, step))),
        *(GROUP["eps"], GROUP["weight_decay"], GROUP["lr"]),
    )
    assert rule.scalars({**GROUP, "step": step}) == tuple(float(np.float32(x)) for x in exact)


def test_round_to_fp32_overflows_to_infinity():
    assert round_to_fp32(1e300) == float("inf")
    assert round_to_fp32(1 + 2**-24) == 1.0
    assert round_to_fp32(1 + 2**-24 + 2**-50) == 1 + 2**-23


def test_square_root_is_correctly_rounded():
    """Against fractions: the root of x is right when x lies between its midpoints' squares."""
    values = torch.cat([torch.rand(20_000) * 4, torch.arange(1, 20_000).float()])
    root = square_root_reference(values)
    assert_same_bits(root, torch.from_numpy(np.sqrt(values.numpy())))
    for value, found in list(zip(values.tolist(), root.tolist(), strict=True))[::400]:
        down, up = (np.nextafter(np.float32(found), np.float32(way)) for way in (0, np.inf))
        low = (Fraction(float(down)) + Fraction(found)) / 2
        high = (Fraction(float(up)) + Fraction(found)) / 2
        assert low**2 <= Fraction(value) <= high**2
