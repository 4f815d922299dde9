"""The formats' encodings against numpy, ml_dtypes and integers, at every rounding edge."""

import numpy as np
import oracle
import pytest
import torch
from bits import INTEGERS, assert_same_bits
from encoding_cases import (
    assert_encoded,
    assert_encodes,
    by_kernel,
    by_twin,
    every_pattern_of_16_bits,
    oracle_codes,
    run,
    ties,
    upper_halves,
)

from megaopt.kernels.formats import (
    FLOAT8_E4M3,
    MASTERS,
    MOMENTS,
    STOCHASTIC_WEIGHTS,
    WEIGHTS,
)
from megaopt.kernels.optional_triton import jit, tl
from megaopt.kernels.step.reference import scale_reference


@jit
def decode_kernel(code_ptr, value_ptr, FORMAT: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(value_ptr + offsets, FORMAT.decode(tl.load(code_ptr + offsets), 1.0))


def random_patterns(count):
    """Half of all fp32 patterns, half of numbers where fp8 has codes."""
    generator = np.random.default_rng(0)
    patterns = generator.integers(0, 2**32, count // 2, dtype=np.uint32).view(np.float32)
    exponents = np.exp2(generator.integers(-24, 18, count // 2)).astype(np.float32)
    near = generator.standard_normal(count // 2, dtype=np.float32) * exponents
    return torch.from_numpy(np.concatenate([patterns, near]))


REMAINDER16 = MASTERS[torch.int16]
JOINED = [form for form in MASTERS.values() if form.joined]
SCALED = MOMENTS[torch.float16]
SCALED_FLOAT8 = MOMENTS[torch.float8_e4m3fn]

# around every tie of a conversion that drops 16 bits (bf16) or 13 (fp16): both neighbours of each
LOWER = (0, 1, 0x0FFF, 0x1000, 0x1001, 0x2FFF, 0x3000, 0x3001, 0x7FFF, 0x8000, 0x8001, 0xFFFF)
EDGES = upper_halves(LOWER)


@pytest.mark.parametrize("form", WEIGHTS.values(), ids=lambda form: form.name)
def test_encode_at_every_edge(form, device):
    assert_encoded(form, EDGES, device)


@pytest.mark.parametrize("form", list(WEIGHTS.values())[1:], ids=lambda form: form.name)
def test_decode_of_every_code(form, device):
    """Up to the payloads of NaNs, which every rule makes canonical before a store."""
    codes = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(form.dtype)
    values = oracle.decode(form.name, codes.view(torch.int16).numpy(), None)
    expected = torch.from_numpy(oracle.canonical(values))
    twin = form.decode_reference(codes)
    assert_same_bits(torch.where(twin.isnan(), expected, twin), expected, "twin")
    assert twin.isnan().equal(expected.isnan())
    value = torch.zeros(2**16, device=device)
    run(decode_kernel, codes.view(torch.int16).to(device), value, form=form)
    value = value.cpu()
    assert_same_bits(torch.where(value.isnan(), expected, value), expected, "kernel")
    assert value.isnan().equal(expected.isnan())


def test_split_is_lossless_and_rounds_ties_away(device):
    weight, code = assert_encoded(REMAINDER16, EDGES, device)
    assert_same_bits(REMAINDER16.decode_reference(weight, code), EDGES, "joined again")
    assert weight.isnan().equal(EDGES.isnan())


@pytest.mark.parametrize(
    "pattern", [0x7FC00000, 0x7FFFFFFF, 0xFFC00001, 0x7F800001, 0xFF800001], ids=hex
)
@pytest.mark.parametrize(
    "form",
    [*WEIGHTS.values(), *STOCHASTIC_WEIGHTS.values(), SCALED, *JOINED, FLOAT8_E4M3, SCALED_FLOAT8],
    ids=lambda f: f.name,
)
def test_any_nan_stays_one(form, pattern, device):
    """Also the GPU's own 0x7FFFFFFF, and those whose upper half alone would be infinity."""
    value = torch.from_numpy(np.full(4096, pattern, np.uint32).view(np.float32))
    bits = torch.arange(4096, dtype=torch.int32) * 16 + 15 if form.draws else None
    twin = by_twin(form, value, bits)
    assert bool(twin[0].float().isnan().all())
    if form.joined:
        assert bool(form.decode_reference(*twin).isnan().all())
    for found, expected in zip(by_kernel(form, value, device, bits), twin, strict=True):
        assert_same_bits(found, expected)


SCALES = [
    ([0.0, 0.0], 0.0),
    ([1.0, -32752.0], 32752.0),
    ([448.0, -1.0], 448.0),
    ([torch.inf, -2.0, torch.nan], 2.0),
    ([torch.nan], 0.0),
    ([1e-40], 1e-40),
    ([3.4e38], 3.4e38),
]


@pytest.mark.parametrize(("values", "amax"), SCALES, ids=str)
@pytest.mark.parametrize("form", [SCALED, SCALED_FLOAT8], ids=lambda form: form.name)
def test_scale_covers_the_largest_finite_magnitude(form, values, amax):
    scale, inverse = scale_reference(torch.tensor(values), form)
    quotient = oracle.divide(np.float32(amax), np.float32(form.code_max))
    quotient = max(quotient, np.float32(2.0**-126))
    wanted = oracle.divide(np.float32(1), quotient)
    assert_same_bits(inverse, torch.tensor([wanted]))
    kept = oracle.divide(np.float32(1), wanted) if form is SCALED_FLOAT8 else quotient
    assert_same_bits(scale, torch.tensor([kept]))
    code = form.encode_reference(torch.tensor(values), inverse)
    finite = torch.tensor(values).isfinite()
    assert code.float().isfinite().equal(finite)


@pytest.mark.parametrize("dtype", INTEGERS, ids=lambda size: f"{size} bytes")
def test_bits_tell_nan_payloads_and_zeros_apart(dtype):
    """The comparison itself must be able to fail."""
    integer = INTEGERS[dtype]
    one, other = torch.zeros(3, dtype=integer), torch.zeros(3, dtype=integer)
    other[1] = 1
    with pytest.raises(AssertionError, match="1 of 3 differ, first at 1"):
        assert_same_bits(one, other)


# --- fp8: against ml_dtypes and at the middles between codes


def test_the_largest_magnitude_of_a_tensor_has_the_largest_code():
    """Whatever the three roundings on the way do: 448 never becomes 416, nor NaN."""
    amax = torch.from_numpy(np.random.default_rng(0).uniform(1, 2, 2000).astype(np.float32))
    for value in torch.cat([amax, amax * 2.0**-100, torch.tensor([3.4028235e38])]).split(1):
        _, inverse = scale_reference(value, SCALED_FLOAT8)
        assert SCALED_FLOAT8.encode_reference(value, inverse).float() == 448.0


def test_fp8_of_every_16_bit_number(device):
    values = every_pattern_of_16_bits()
    expected = oracle_codes(FLOAT8_E4M3, values).view(FLOAT8_E4M3.dtype)
    assert len(expected.view(torch.uint8).unique()) == 255
    assert_encodes(FLOAT8_E4M3, values, expected, device)


def test_fp8_at_every_tie(device):
    assert_encodes(FLOAT8_E4M3, *ties(FLOAT8_E4M3), device)


def test_fp8_of_random_patterns(device):
    values = random_patterns(2**22)
    expected = oracle_codes(FLOAT8_E4M3, values).view(FLOAT8_E4M3.dtype)
    assert_same_bits(FLOAT8_E4M3.encode_reference(values), expected, "twin")
    some = slice(None, None, 1 if device.type == "cuda" else 16)  # the interpreter is slow
    assert_encodes(FLOAT8_E4M3, values[some].contiguous(), expected[some].contiguous(), device)


def test_fp8_saturates(device):
    """Where torch's own cast gives NaN or infinity, in some versions of torch."""
    largest = torch.finfo(FLOAT8_E4M3.dtype).max
    beyond = torch.tensor([largest, largest * 1.2, 1e30, 3.4028235e38, torch.inf]).repeat(2)
    beyond[5:] *= -1
    expected = torch.full((10,), largest).copysign(beyond).to(FLOAT8_E4M3.dtype)
    assert_encodes(FLOAT8_E4M3, beyond, expected, device)


def test_decode_of_every_fp8_code(device):
    """NaNs too: they are read as 0x7FC00000 everywhere."""
    codes = torch.arange(256, dtype=torch.uint8)
    expected = torch.from_numpy(oracle.decode(FLOAT8_E4M3.name, codes.numpy(), None))
    assert_same_bits(FLOAT8_E4M3.decode_reference(codes.view(FLOAT8_E4M3.dtype)), expected, "twin")
    value = torch.zeros(4096, device=device)
    run(decode_kernel, codes.view(torch.int8).repeat(16).to(device), value, form=FLOAT8_E4M3)
    assert_same_bits(value, expected.repeat(16), "kernel")
    numbers = ~expected.isnan() & ~expected.isinf()
    again = FLOAT8_E4M3.encode_reference(expected).view(torch.uint8)
    assert_same_bits(again[numbers], codes[numbers], "encoded again")


def test_fp8_moments_that_overflowed_are_nan(device):
    """A number in an infinity's place would hide that the moment is lost."""
    values = torch.tensor([torch.inf, -torch.inf, torch.nan, -torch.nan, 448.0, 449.0, -1e30])
    expected = torch.tensor([0x7F, 0x7F, 0x7F, 0x7F, 0x7E, 0x7E, 0xFE], dtype=torch.uint8)
    assert_encodes(SCALED_FLOAT8, values, expected.view(torch.float8_e4m3fn), device)
