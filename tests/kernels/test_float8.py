"""fp8: codes against ml_dtypes and at the middles between codes; saturation, NaN, the scale."""

import numpy as np
import oracle
import torch
from bits import assert_same_bits
from encoding_cases import (
    assert_encodes,
    decode_kernel,
    every_pattern_of_16_bits,
    oracle_codes,
    random_patterns,
    run,
    ties,
)

from megaopt.kernels.formats import FLOAT8_E4M3 as CODES
from megaopt.kernels.formats import MOMENTS
from megaopt.kernels.step.reference import scale_reference

SCALED = MOMENTS[torch.float8_e4m3fn]


def test_the_largest_magnitude_of_a_tensor_has_the_largest_code():
    """Whatever the three roundings on the way do: 448 never becomes 416, nor NaN."""
    amax = torch.from_numpy(np.random.default_rng(0).uniform(1, 2, 2000).astype(np.float32))
    for value in torch.cat([amax, amax * 2.0**-100, torch.tensor([3.4028235e38])]).split(1):
        _, inverse = scale_reference(value, SCALED)
        assert SCALED.encode_reference(value, inverse).float() == 448.0


def test_fp8_of_every_16_bit_number(device):
    values = every_pattern_of_16_bits()
    expected = oracle_codes(CODES, values).view(CODES.dtype)
    assert len(expected.view(torch.uint8).unique()) == 255
    assert_encodes(CODES, values, expected, device)


def test_fp8_at_every_tie(device):
    assert_encodes(CODES, *ties(CODES), device)


def test_fp8_of_random_patterns(device):
    values = random_patterns(2**22)
    expected = oracle_codes(CODES, values).view(CODES.dtype)
    assert_same_bits(CODES.encode_reference(values), expected, "twin")
    some = slice(None, None, 1 if device.type == "cuda" else 16)  # the interpreter is slow
    assert_encodes(CODES, values[some].contiguous(), expected[some].contiguous(), device)


def test_fp8_saturates(device):
    """Where torch's own cast gives NaN or infinity, in some versions of torch."""
    largest = torch.finfo(CODES.dtype).max
    beyond = torch.tensor([largest, largest * 1.2, 1e30, 3.4028235e38, torch.inf]).repeat(2)
    beyond[5:] *= -1
    expected = torch.full((10,), largest).copysign(beyond).to(CODES.dtype)
    assert_encodes(CODES, beyond, expected, device)


def test_decode_of_every_fp8_code(device):
    """NaNs too: they are read as 0x7FC00000 everywhere."""
    codes = torch.arange(256, dtype=torch.uint8)
    expected = torch.from_numpy(oracle.decode(CODES.name, codes.numpy(), None))
    assert_same_bits(CODES.decode_reference(codes.view(CODES.dtype)), expected, "twin")
    value = torch.zeros(4096, device=device)
    run(decode_kernel, codes.view(torch.int8).repeat(16).to(device), value, form=CODES)
    assert_same_bits(value, expected.repeat(16), "kernel")
    numbers = ~expected.isnan() & ~expected.isinf()
    again = CODES.encode_reference(expected).view(torch.uint8)
    assert_same_bits(again[numbers], codes[numbers], "encoded again")


def test_fp8_moments_that_overflowed_are_nan(device):
    """A number in an infinity's place would hide that the moment is lost."""
    values = torch.tensor([torch.inf, -torch.inf, torch.nan, -torch.nan, 448.0, 449.0, -1e30])
    expected = torch.tensor([0x7F, 0x7F, 0x7F, 0x7F, 0x7E, 0x7E, 0xFE], dtype=torch.uint8)
    assert_encodes(SCALED, values, expected.view(torch.float8_e4m3fn), device)
