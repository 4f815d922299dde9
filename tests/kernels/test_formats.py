"""The formats' encodings against numpy, ml_dtypes and integers, at every rounding edge."""

import numpy as np
import oracle
import pytest
import torch
from bits import INTEGERS, assert_same_bits
from encoding_cases import (
    by_kernel,
    by_twin,
    decode_kernel,
    kernel_codes,
    oracle_codes,
    run,
)

from megaopt.kernels.formats import (
    FLOAT8_E4M3,
    MASTERS,
    MOMENTS,
    STOCHASTIC_WEIGHTS,
    WEIGHTS,
)
from megaopt.kernels.step.reference import scale_reference

REMAINDER16 = MASTERS[torch.int16]
JOINED = [form for form in MASTERS.values() if form.joined]
SCALED = MOMENTS[torch.float16]
FLOAT8 = [FLOAT8_E4M3]
SCALED_FLOAT8 = MOMENTS[torch.float8_e4m3fn]

# Around every tie of a conversion that drops 16 bits (bf16) or 13 (fp16): both neighbours of each.
LOWER_HALVES = [
    0,
    1,
    0x0FFF,
    0x1000,
    0x1001,
    0x2FFF,
    0x3000,
    0x3001,
    0x7FFF,
    0x8000,
    0x8001,
    0xFFFF,
]


def edges():
    """Every upper half of an fp32 pattern with each of the lower halves; NaNs made canonical."""
    upper = np.arange(2**16, dtype=np.uint32)[:, None] << 16
    patterns = (upper | np.array(LOWER_HALVES, dtype=np.uint32)).reshape(-1)
    return torch.from_numpy(oracle.canonical(patterns.view(np.float32)))


EDGES = edges()


@pytest.mark.parametrize("form", WEIGHTS.values(), ids=lambda form: form.name)
def test_encode_at_every_edge(form, device):
    expected = oracle_codes(form, EDGES).view(form.dtype)
    assert_same_bits(form.encode_reference(EDGES), expected, "twin")
    assert_same_bits(kernel_codes(form, EDGES, device), expected, "kernel")


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
    weight, code = REMAINDER16.encode_reference(EDGES)
    upper, lower = oracle.split(EDGES.numpy())
    assert_same_bits(weight.view(torch.int16), torch.from_numpy(upper.view(np.int16)), "weight")
    assert_same_bits(code, torch.from_numpy(lower), "remainder")
    assert_same_bits(REMAINDER16.decode_reference(weight, code), EDGES, "joined again")
    assert weight.isnan().equal(EDGES.isnan())


@pytest.mark.parametrize(
    "pattern", [0x7FC00000, 0x7FFFFFFF, 0xFFC00001, 0x7F800001, 0xFF800001], ids=hex
)
@pytest.mark.parametrize(
    "form",
    [*WEIGHTS.values(), *STOCHASTIC_WEIGHTS.values(), SCALED, *JOINED, *FLOAT8, SCALED_FLOAT8],
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
