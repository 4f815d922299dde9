"""Sampled elements as numbers, and how far they lie apart, beside torch's own."""

import math

import numpy
import pytest
import torch

from megaopt.recording.measure import NEAR, as_numbers, distance

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
DTYPES = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")


def bits_of(tensor):
    """As a recording has them: words of 4 or 8 bytes."""
    width = tensor.element_size()
    found = tensor.view(INTEGERS[width]).numpy().view(f"<u{width}")
    return found.astype("<u8" if width == 8 else "<u4")


def patterns(dtype):
    """All codes of 8 and 16 bits; others at random, with what is special."""
    kind = getattr(torch, dtype)
    width = torch.empty((), dtype=kind).element_size()
    if width <= 2:
        return torch.arange(256**width, dtype=torch.int32).to(INTEGERS[width]).view(kind)
    special = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1e-310, 1e-42], dtype=kind)
    return torch.cat([special, torch.randn(1000, dtype=kind) * 1e3])


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_are_torchs(dtype):
    tensor = patterns(dtype)
    numpy.testing.assert_array_equal(as_numbers(bits_of(tensor), dtype), tensor.double().numpy())


def test_codes_count_as_numbers():
    assert as_numbers(numpy.array([3, 255], "<u4"), "uint8").tolist() == [3, 255]


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("start", [0.0, -0.0, 1.0, -1.0, 1e-40, -1e-40, 1e30])
def test_neighbours_lie_one_unit_apart(dtype, start):
    """Over zero too, where bits are far apart."""
    here = torch.full((3,), start, dtype=getattr(torch, dtype))
    up = torch.nextafter(here, torch.tensor(math.inf, dtype=here.dtype))
    down = torch.nextafter(here, torch.tensor(-math.inf, dtype=here.dtype))
    one = distance(bits_of(here), bits_of(up), dtype, dtype)
    two = distance(bits_of(down), bits_of(up), dtype, dtype)
    assert (one.largest, dict(one.ulps)) == (1, {1: 3})
    assert (two.largest, dict(two.ulps)) == (2, {2: 3})


def test_bins_double():
    a = numpy.zeros(6, "<u4")
    b = numpy.array([0, 1, 2, 3, 4, 1000], "<u4")
    assert dict(distance(a, b, "float32", "float32").ulps) == {0: 1, 1: 1, 2: 2, 3: 1, 10: 1}


def test_the_norm_of_the_difference():
    a, b = torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5])
    assert distance(bits_of(a), bits_of(b), "float32", "float32").relative == 0.1
    half = distance(bits_of(a), bits_of(b.bfloat16()), "float32", "bfloat16")
    assert (half.relative, half.largest, dict(half.ulps)) == (0.1, 0, {})


def test_what_is_no_number_is_equal_in_bits_or_far_apart():
    nan, one = torch.tensor([math.nan, 1.0]), torch.tensor([2.0, 1.0])
    assert distance(bits_of(nan), bits_of(nan), "float32", "float32").relative == 0
    for pair in ((nan, one), (one, nan)):
        assert distance(*map(bits_of, pair), "float32", "float32").relative == math.inf


def test_distances_add_over_tensors():
    a, b = torch.randn(20), torch.randn(20)
    whole = distance(bits_of(a), bits_of(b), "float32", "float32")
    parts = [
        distance(bits_of(a[i]), bits_of(b[i]), "float32", "float32")
        for i in (slice(7), slice(7, 20))
    ]
    added = NEAR.plus(parts[0]).plus(parts[1])
    assert (added.ulps, added.largest) == (whole.ulps, whole.largest)
    assert math.isclose(added.relative, whole.relative, rel_tol=1e-15)
