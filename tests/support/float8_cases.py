"""Amaxes that are hard, and the checks of what the twins and the kernels make of them."""

import float8_oracle
import numpy as np
import torch
from bits import assert_same_bits

from megaopt.kernels.optional_triton import jit, tl

BLOCK = 4096
SUBNORMAL = [2.0**-149, 2.0**-140, 2.0**-127, 1.5 * 2.0**-127, 2.0**-126 - 2.0**-149]
LARGEST = float(torch.finfo(torch.float32).max)
EDGES = torch.tensor(
    [
        0.0, *SUBNORMAL, 2.0**-126, 2.0**-120, 1e-36, 1.3e-36, 1e-30, 0.5, 1.0, 3.0, 447.0, 448.0,
        449.0, 57344.0, 1e30, 2.0**127, LARGEST, torch.inf, torch.nan,
    ]
)  # fmt: skip


def every_power_of_two():
    return torch.tensor([2.0**exponent for exponent in range(-149, 128)])


def random_amaxes(count):
    """From 2**-126 to 2**127, any mantissa."""
    generator = np.random.default_rng(0)
    bits = generator.integers(1 << 23, 254 << 23, count, dtype=np.int32)
    return torch.from_numpy(bits).view(torch.float32)


def hard_amaxes(code_max):
    """Powers of two, what lies beside them, what code_max makes of them, and any."""
    powers = every_power_of_two()
    beside = torch.cat([powers.view(torch.int32) + step for step in (-1, 0, 1)])
    amax = torch.cat([beside.view(torch.float32), powers[:260] * code_max, EDGES])
    return torch.cat([amax, random_amaxes(2000)])


@jit
def scale_kernel(
    amax_ptr, scale_ptr, inverse_ptr, code_max, epsilon, POWER: tl.constexpr, SCALE: tl.constexpr,
    RECIPROCAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    old = tl.load(scale_ptr + offsets)
    scale = SCALE(tl.load(amax_ptr + offsets), code_max, epsilon, old, POWER)
    tl.store(scale_ptr + offsets, scale)
    tl.store(inverse_ptr + offsets, RECIPROCAL(scale))


@jit
def e8m0_kernel(
    amax_ptr, code_ptr, multiplier_ptr, value_ptr, code_max_inverse, CODE: tl.constexpr,
    MULTIPLIER: tl.constexpr, VALUE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    code = CODE(tl.load(amax_ptr + offsets), code_max_inverse)
    tl.store(code_ptr + offsets, code)
    tl.store(multiplier_ptr + offsets, MULTIPLIER(code))
    tl.store(value_ptr + offsets, VALUE(code))


def run(kernel, amax, device, outputs, *arguments):
    """Each output for as many amaxes, padded with 0 to whole blocks."""
    padded = torch.cat([amax, torch.zeros(-len(amax) % BLOCK)]).to(device)
    made = [torch.full(padded.shape, 3.0, device=device).to(dtype) for dtype in outputs]
    with np.errstate(all="ignore"):
        kernel[(len(padded) // BLOCK,)](padded, *made, *arguments, BLOCK, enable_fp_fusion=False)
    return [tensor[: len(amax)] for tensor in made]


def assert_scales(module, amax, code_max, epsilon, power_of_two, device):
    expected = torch.from_numpy(
        np.array(
            [
                float8_oracle.scale_of(value, code_max, epsilon, power_of_two, 3.0)
                for value in amax.numpy()
            ]
        )
    )
    with np.errstate(all="ignore"):
        inverse = torch.from_numpy((1.0 / expected.double().numpy()).astype(np.float32))
    for place in {torch.device("cpu"), device}:
        old = torch.full_like(amax, 3.0).to(place)
        found = module.scale_from_amax_reference(
            amax.to(place), code_max, epsilon, old, power_of_two
        )
        assert_same_bits(found, expected, "scale, twin")
        assert_same_bits(module.reciprocal_reference(found), inverse, "scale_inv, twin")
    arguments = (code_max, epsilon, power_of_two, module.scale_from_amax, module.reciprocal)
    kinds = (torch.float32, torch.float32)
    found, found_inverse = run(scale_kernel, amax, device, kinds, *arguments)
    assert_same_bits(found, expected, "scale, kernel")
    assert_same_bits(found_inverse, inverse, "scale_inv, kernel")


def assert_e8m0(module, amax, code_max, device):
    codes = [float8_oracle.e8m0_of(value, code_max) for value in amax.numpy()]
    expected = torch.tensor(codes, dtype=torch.uint8)
    multiplier, value = (
        torch.tensor([2.0**power if code < 0xFF else torch.nan for code, power in powers])
        for powers in (
            [(code, 127 - code) for code in codes],
            [(code, code - 127) for code in codes],
        )
    )
    for place in {torch.device("cpu"), device}:
        found = module.e8m0_from_amax_reference(amax.to(place), code_max)
        assert_same_bits(found, expected, "code, twin")
        assert_same_bits(module.e8m0_multiplier_reference(found), multiplier, "multiplier, twin")
        assert_same_bits(module.e8m0_value_reference(found), value, "value, twin")
    inverse = float(np.float32(1.0 / code_max))
    arguments = (inverse, module.e8m0_from_amax, module.e8m0_multiplier, module.e8m0_value)
    kinds = (torch.int32, torch.float32, torch.float32)
    found, *found_powers = run(e8m0_kernel, amax, device, kinds, *arguments)
    assert_same_bits(found, expected.int(), "code, kernel")
    assert_same_bits(found_powers[0], multiplier, "multiplier, kernel")
    assert_same_bits(found_powers[1], value, "value, kernel")
