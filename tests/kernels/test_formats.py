"""The formats' encodings against numpy, ml_dtypes and integers, at every rounding edge."""

import numpy as np
import oracle
import pytest
import torch
from bits import INTEGERS, assert_same_bits
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from megaopt.kernels.formats import MASTERS, MOMENTS, WEIGHTS
from megaopt.kernels.optional_triton import jit, tl
from megaopt.kernels.step.reference import scale_reference

REMAINDER16 = MASTERS[torch.int16]
SCALED = MOMENTS[torch.float16]

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


@jit
def encode_kernel(value_ptr, code_ptr, FORMAT: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(code_ptr + offsets, FORMAT.encode(tl.load(value_ptr + offsets), 1.0))


@jit
def decode_kernel(code_ptr, value_ptr, FORMAT: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(value_ptr + offsets, FORMAT.decode(tl.load(code_ptr + offsets), 1.0))


@jit
def split_kernel(value_ptr, weight_ptr, code_ptr, FORMAT: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    weight, code = FORMAT.encode(tl.load(value_ptr + offsets))
    tl.store(weight_ptr + offsets, weight)
    tl.store(code_ptr + offsets, code)


@jit
def join_kernel(weight_ptr, code_ptr, value_ptr, FORMAT: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = FORMAT.decode(tl.load(weight_ptr + offsets), tl.load(code_ptr + offsets))
    tl.store(value_ptr + offsets, value)


def run(kernel, *tensors, form):
    block = 4096
    assert tensors[0].numel() % block == 0
    with np.errstate(all="ignore"):
        kernel[(tensors[0].numel() // block,)](*tensors, form, block)


def oracle_codes(form, values):
    codes, _ = oracle.encode(form.name, values.numpy())
    return torch.from_numpy(np.ascontiguousarray(codes))


@pytest.mark.parametrize("form", WEIGHTS.values(), ids=lambda form: form.name)
def test_encode_at_every_edge(form, device):
    expected = oracle_codes(form, EDGES).view(form.dtype)
    assert_same_bits(form.encode_reference(EDGES), expected, "twin")
    code = torch.zeros_like(expected, device=device)
    integers = code if form.dtype == torch.float32 else code.view(torch.int16)
    run(encode_kernel, EDGES.to(device), integers, form=form)
    assert_same_bits(code, expected, "kernel")


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


def test_split_kernel_is_the_twin(device):
    weight, code = (torch.zeros(len(EDGES), dtype=torch.int16, device=device) for _ in range(2))
    run(split_kernel, EDGES.to(device), weight, code, form=REMAINDER16)
    expected = REMAINDER16.encode_reference(EDGES)
    assert_same_bits(weight.view(torch.bfloat16), expected[0], "weight")
    assert_same_bits(code, expected[1], "remainder")
    value = torch.zeros(len(EDGES), device=device)
    run(join_kernel, weight, code, value, form=REMAINDER16)
    assert_same_bits(value, EDGES, "joined again")


@pytest.mark.parametrize(
    "pattern", [0x7FC00000, 0x7FFFFFFF, 0xFFC00001, 0x7F800001, 0xFF800001], ids=hex
)
@pytest.mark.parametrize("form", [*WEIGHTS.values(), SCALED, REMAINDER16], ids=lambda f: f.name)
def test_any_nan_stays_one(form, pattern, device):
    """Also the GPU's own 0x7FFFFFFF, and those whose upper half alone would be infinity."""
    value = torch.from_numpy(np.full(4096, pattern, np.uint32).view(np.float32))
    twin = form.encode_reference(value)
    twin, *rest = twin if form.joined else (twin,)
    assert bool(twin.isnan().all())
    code = torch.zeros(4096, dtype=twin.dtype, device=device)
    integers = code if code.dtype == torch.float32 else code.view(torch.int16)
    if form.joined:
        remainder = torch.ones(4096, dtype=torch.int16, device=device)
        run(split_kernel, value.to(device), integers, remainder, form=form)
        assert_same_bits(remainder, rest[0])
    else:
        run(encode_kernel, value.to(device), integers, form=form)
    assert_same_bits(code, twin)


@given(arrays(np.uint32, 64, elements=st.integers(0, 2**32 - 1)))
def test_split_of_any_pattern(patterns):
    value = torch.from_numpy(oracle.canonical(patterns.view(np.float32)))
    weight, code = REMAINDER16.encode_reference(value)
    assert_same_bits(REMAINDER16.decode_reference(weight, code), value)


def test_weight_beside_a_remainder_is_the_nearest_with_ties_away():
    """Patterns order like magnitudes: the nearest is at most half of 2**16 away, above on a tie."""
    values = EDGES[~EDGES.isnan()]
    weight = REMAINDER16.encode_reference(values)[0].view(torch.int16).long() & 0x7FFF
    distance = (weight << 16) - (values.view(torch.int32).long() & 0x7FFFFFFF)
    assert int(distance.min()) > -0x8000
    assert int(distance.max()) == 0x8000


def test_nearest_even_cannot_be_split():
    """Why remainders round ties away: two masters would need the same 32 bits."""
    even = 0x3F80
    patterns = torch.arange((even << 16) - 0x8000, (even << 16) + 0x8001)
    masters = patterns.to(torch.int32).view(torch.float32)
    assert int((masters.bfloat16().view(torch.int16) == even).sum()) == 2**16 + 1


SCALES = [
    ([0.0, 0.0], 2.0**-126),
    ([1.0, -32752.0], 1.0),
    ([torch.inf, -2.0, torch.nan], 2.0 / 32752.0),
    ([torch.nan], 2.0**-126),
    ([1e-40], 2.0**-126),
    ([3.4e38], 3.4e38 / 32752.0),
]


@pytest.mark.parametrize(("values", "expected"), SCALES, ids=str)
def test_scale_covers_the_largest_finite_magnitude(values, expected):
    scale, inverse = scale_reference(torch.tensor(values), SCALED.code_max)
    wanted = oracle.divide(np.float32(expected * 32752.0), np.float32(32752.0))
    wanted = max(wanted, np.float32(2.0**-126))
    assert_same_bits(scale, torch.tensor([wanted]))
    assert_same_bits(inverse, torch.tensor([oracle.divide(np.float32(1), wanted)]))
    code = SCALED.encode_reference(torch.tensor(values), inverse)
    finite = torch.tensor(values).isfinite()
    assert code.isfinite().equal(finite)


@pytest.mark.parametrize("dtype", INTEGERS, ids=lambda size: f"{size} bytes")
def test_bits_tell_nan_payloads_and_zeros_apart(dtype):
    """The comparison itself must be able to fail."""
    integer = INTEGERS[dtype]
    one, other = torch.zeros(3, dtype=integer), torch.zeros(3, dtype=integer)
    other[1] = 1
    with pytest.raises(AssertionError, match="1 of 3 differ, first at 1"):
        assert_same_bits(one, other)
