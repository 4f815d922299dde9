"""The scales of fp8 weights: twin, kernel and oracle, at every edge."""

import numpy as np
import pytest
import torch
from bits import assert_same_bits
from float8_cases import (
    EDGES,
    LARGEST,
    assert_e8m0,
    assert_scales,
    every_power_of_two,
    hard_amaxes,
    random_amaxes,
    run,
    scale_kernel,
)

from megaopt.kernels.optional_triton import jit, tl
from megaopt.kernels.quantizers import scale as true_scale


@jit
def single_kernel(
    amax_ptr, scale_ptr, code_max, epsilon, otherwise, SCALE: tl.constexpr, RECIPROCAL: tl.constexpr
):
    scale = SCALE(tl.load(amax_ptr), code_max, epsilon, otherwise, False)
    tl.store(scale_ptr, scale)
    tl.store(scale_ptr + 1, RECIPROCAL(scale))


# a margin, which makes code_max smaller, never goes with powers of two
@pytest.mark.parametrize(
    ("code_max", "power_of_two"), [(448.0, False), (448.0 / 2**7, False), (448.0, True)]
)
def test_scale_at_every_edge(code_max, power_of_two, device):
    amax = torch.cat([EDGES, every_power_of_two(), random_amaxes(3000)])
    for epsilon in (0.0, 2.0**-130, 1e-6, 2.0):
        assert_scales(true_scale, amax, code_max, float(np.float32(epsilon)), power_of_two, device)


def test_scale_of_known_amaxes():
    """By hand, so that oracle and twin cannot be wrong together."""
    amax = torch.tensor([448.0, 1.0, 896.0, 0.0, torch.inf, torch.nan, 1e-37, 2.0**-149])
    found = true_scale.scale_from_amax_reference(amax, 448.0)
    expected = torch.tensor([1.0, 448.0, 0.5, 1.0, 1.0, 1.0, LARGEST, LARGEST])
    assert_same_bits(found, expected)
    found = true_scale.scale_from_amax_reference(amax, 448.0, 0.0, 1.0, True)
    expected = torch.tensor([1.0, 256.0, 0.5, 1.0, 1.0, 1.0, 2.0**127, 2.0**127])
    assert_same_bits(found, expected)


def test_a_scale_for_one_number_is_that_of_many(device):
    """A kernel computes one scale a tensor: scalars instead of blocks."""
    for amax in EDGES:
        found = torch.zeros(2, device=device)
        functions = (true_scale.scale_from_amax, true_scale.reciprocal)
        with np.errstate(all="ignore"):
            single_kernel[(1,)](
                amax.reshape(1).to(device), found, 448.0, 0.0, 1.0, *functions,
                enable_fp_fusion=False,
            )  # fmt: skip
        scale = true_scale.scale_from_amax_reference(amax.reshape(1), 448.0)
        expected = torch.cat([scale, true_scale.reciprocal_reference(scale)])
        assert_same_bits(found, expected, f"amax {amax}")


def test_reciprocals_of_a_million_scales(device):
    """Against fp64 rounded once, which is exact: float8_oracle says why."""
    scale = true_scale.scale_from_amax_reference(random_amaxes(10**6), 448.0)
    scale = torch.cat([scale, every_power_of_two(), EDGES[:-2]])
    with np.errstate(all="ignore"):
        expected = torch.from_numpy((1.0 / scale.double().numpy()).astype(np.float32))
    assert int((expected.abs() < 2.0**-126).sum()) > 100  # subnormal reciprocals are among them
    assert_same_bits(true_scale.reciprocal_reference(scale), expected, "twin")
    every = 1 if device.type == "cuda" else 16  # the interpreter is slow
    arguments = (448.0, 0.0, False, keep_old, true_scale.reciprocal)
    some = scale[::every].contiguous()
    _, found = run_reciprocal(some, device, arguments)
    assert_same_bits(found, expected[::every].contiguous(), "kernel")


@true_scale.helper
def keep_old(amax, code_max, epsilon, otherwise, POWER: tl.constexpr):
    return amax


def run_reciprocal(scale, device, arguments):
    return run(scale_kernel, scale, device, (torch.float32, torch.float32), *arguments)


def test_e8m0_at_every_edge(device):
    assert_e8m0(true_scale, hard_amaxes(448.0), 448.0, device)


def test_e8m0_of_known_amaxes():
    """1 / 448 in fp32 is too large by 3/7 of a last place, and still 448 has the scale 1."""
    amax = torch.tensor([448.0, 448.00003, 447.99997, 0.0, torch.inf, torch.nan, LARGEST, 1e-45])
    found = true_scale.e8m0_from_amax_reference(amax, 448.0)
    expected = torch.tensor([127, 128, 127, 0, 0xFE, 0xFF, 247, 0], dtype=torch.uint8)
    assert_same_bits(found, expected)


def test_magnitudes_pass_nans_over_and_keep_infinities():
    values = torch.tensor([-3.0, torch.nan, torch.inf, -torch.inf, -0.0, -torch.nan])
    found = true_scale.magnitude_reference(values)
    assert_same_bits(found, torch.tensor([3.0, 0.0, torch.inf, torch.inf, 0.0, 0.0]))
