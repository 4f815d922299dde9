"""Linear blocks of 8 bits beside a model in whole numbers and fractions, which is written here."""

import math
from fractions import Fraction
from functools import cache

import pytest
import torch
from bits import assert_same_bits
from block_cases import (
    LINEAR,
    assert_stored,
    draws_of,
    random_bits,
    random_values,
    read_by_kernel,
    read_by_twin,
    stored_by_kernel,
    stored_by_twin,
)

from megaopt.kernels.formats.block8 import scale_of_amax_reference

WIDE = [form for form in LINEAR if form.block == 128]
DRAWN, NEAREST = WIDE
LARGEST = torch.finfo(torch.float32).max
NAN_CODE = 128
each_form = pytest.mark.parametrize("form", WIDE, ids=lambda form: form.name)
both_ways = pytest.mark.parametrize("way", ["twin", "kernel"])


# --- the model


@cache
def power(scale):
    """f, what a code of 64 is."""
    return Fraction(2) ** (scale - 127)


def scale_of(values):
    """The largest scale of which 127/128 f is less than the block's largest, or the first."""
    amax = max((abs(value) for value in values if abs(value) <= LARGEST), default=0.0)
    found = max(math.frexp(amax)[1] + 125, 1) if amax else 1  # amax is in [2 f, 4 f)
    while found < 253 and Fraction(amax) > Fraction(127, 128) * power(found + 1):
        found += 1
    return found


def code_of(value, scale, bits=None):
    """bits: 16 random ones, or None to nearest."""
    if not abs(value) <= LARGEST:
        return NAN_CODE
    exact = abs(Fraction(value)) / power(scale) * 64
    places = round(exact * 2**17)  # fp32's: ties to even, as in Python
    code = round(Fraction(places, 2**17)) if bits is None else (places + 2 * bits + 1) // 2**17
    if code > 127:
        return NAN_CODE
    return code + 128 if value < 0 and code else code


def value_of(code, scale):
    exact = Fraction(code % 128, 64) * power(scale) * (-1 if code > 127 else 1)
    assert Fraction(float(exact)) == exact
    return torch.nan if code == NAN_CODE else float(exact)


def stored_by_model(form, value, bits):
    rows = value.view(-1, form.block).tolist()
    scales = [scale_of(row) for row in rows]
    drawn = bits.tolist() if form.draws else [None] * value.numel()
    each = [scale for scale in scales for _ in range(form.block)]
    code = [code_of(*own) for own in zip(value.tolist(), each, drawn, strict=True)]
    return torch.tensor(code, dtype=torch.uint8), torch.tensor(scales, dtype=torch.uint8)


# --- kernel and twin


def stored(form, value, bits, way, device):
    if way == "kernel":
        return stored_by_kernel(form, value, bits if form.draws else None, 0, device)
    return stored_by_twin(form, value, bits)


def around(*parts):
    """These parts of every power of two, the numbers beside each, and the ends of fp32."""
    powers = torch.exp2(torch.arange(-149, 128).double())
    amax = torch.cat([part * powers for part in parts]).float()
    amax = torch.cat([amax, *(amax.nextafter(torch.tensor(end)) for end in (0.0, LARGEST))])
    return torch.cat([amax, torch.tensor([0.0, LARGEST])])


def test_windows_are_those_of_the_model():
    amax = around(127 / 128, 1.0, 1.5, 127 / 64)
    found = scale_of_amax_reference(amax, DRAWN.window_offset)
    assert found.tolist() == [scale_of([each]) for each in amax.tolist()]
    value = torch.zeros(amax.numel(), 128)
    value[:, 17] = amax
    assert_same_bits(stored_by_twin(NEAREST, value.view(-1))[1], found)


@each_form
def test_the_kernel_has_the_windows_of_the_twin(form, device):
    for part in (127 / 128, 1.0, 127 / 64):
        value = torch.zeros(around(part).numel(), 128)
        value[:, 17] = around(part)
        value[:, 3] = -value[:, 17] / 3
        assert_stored(form, value.view(-1), device)


@both_ways
def test_every_code_under_every_scale_is_the_models_number(way, device):
    """All are fp32 numbers: none is rounded."""
    codes = torch.arange(256).to(torch.uint8).repeat(253)
    scales = torch.arange(1, 254).to(torch.uint8).repeat_interleave(2)
    if way == "kernel":
        found = read_by_kernel(DRAWN, codes, scales, 0, device)
    else:
        found = read_by_twin(DRAWN, codes, scales)
    expected = [value_of(code, scale) for scale in range(1, 254) for code in range(256)]
    expected = torch.tensor(expected, dtype=torch.float64)
    assert torch.equal(expected.float().double().nan_to_num(), expected.nan_to_num())
    assert_same_bits(found, expected.float())


def blocks_of(largest):
    """A block with each of these codes as its largest, between all codes that are not larger.

    With both signs, in turn.
    """
    below = torch.arange(1, 128).repeat(len(largest), 1)
    most = torch.tensor(largest)[:, None]
    code = torch.cat([most, torch.minimum(below, most)], 1)
    return torch.where(torch.arange(128) % 3 == 0, code | 128, code).to(torch.uint8).view(-1)


@each_form
def test_all_codes_under_all_scales_stay_when_stored_again(form):
    """Whatever the draws: of any value under any scale, beside any code as the largest."""
    code, moved = blocks_of(range(1, 128)), 0
    bits = draws_of(code.numel())
    for scale in range(1, 254):
        own = torch.full((127,), scale, dtype=torch.uint8)
        value = read_by_twin(form, code, own)
        again = stored_by_twin(form, value, bits)
        assert torch.equal(read_by_twin(form, *again), value), f"scale {scale}"
        moved += int((again[1] != own).sum())
    # each code below 64 is in the window of another scale, where there is one
    assert moved == 63 * 252


@each_form
@both_ways
def test_random_blocks_are_the_models_and_stay(form, way, device):
    """Also read in one and stored in the other format, as from a checkpoint in fp32."""
    value = random_values(24 * 128, 7)
    for draw, bits in enumerate((random_bits(value.numel(), 3), *ends(value))):
        code, scale = stored(form, value, bits, way, device)
        expected = stored_by_model(form, value, bits)
        assert_same_bits(code, expected[0])
        assert_same_bits(scale, expected[1])
        read = read_by_twin(form, code, scale)
        for other in WIDE:
            for more in (random_bits(value.numel(), 10 + draw), *ends(value)):
                again = read_by_twin(other, *stored(other, read, more, way, device))
                assert_same_bits(again, read)


def ends(value):
    """The smallest draw for all, and the largest."""
    return [torch.full((value.numel(),), each, dtype=torch.int32) for each in (0, 65535)]


TOP = 2.0**126
EDGES = {
    "fp32's largest is beyond": (LARGEST, NAN_CODE, 253),
    "2**127 is beyond": (2.0**127, NAN_CODE, 253),
    "the largest number": (127 / 64 * TOP, 127, 253),
    "half above it is 128": (127.5 / 64 * TOP, NAN_CODE, 253),
    "just below that": (127.4999 / 64 * TOP, 127, 253),
    "a window's largest": (127 / 64, 127, 127),
    "the next one's least": (127.0001 / 64, 64, 128),
    "one": (1.0, 64, 127),
    "fp32's smallest": (2.0**-149, 0, 1),
    "half of the smallest code": (2.0**-133, 0, 1),
    "more than that": (1.0001 * 2.0**-133, 1, 1),
    "the smallest code": (2.0**-132, 1, 1),
    "fp32's smallest normal number": (2.0**-126, 64, 1),
}


@both_ways
@pytest.mark.parametrize("name", EDGES)
def test_edges_to_nearest(name, way, device):
    number, code, scale = EDGES[name]
    for sign, own in ((1, code), (-1, code + 128 if 0 < code < 128 else code)):
        value = torch.tensor([sign * number] + [0.0] * 127)
        found = stored(NEAREST, value, None, way, device)
        assert (found[0][0].item(), found[1].item()) == (own, scale)


@pytest.mark.parametrize("base", [0, 1, 63, 126])
def test_as_many_draws_go_up_as_the_place_between_two_codes_says(base):
    """Of all 65,536, so that the mean is the value itself."""
    bits = torch.arange(2**16, dtype=torch.int32)
    for part in (0, 1, 2, 0x1234, 2**15, 2**16 - 1):
        value = torch.full((2**16 // 64, 128), (base + part / 2**16) / 64)
        value[:, 64:] = 127 / 64
        own = torch.cat([bits.view(-1, 64), torch.zeros_like(bits).view(-1, 64)], 1).view(-1)
        code, scale = stored_by_twin(DRAWN, value.view(-1), own)
        assert set(scale.tolist()) == {127}
        up = code.view(-1, 128)[:, :64].reshape(-1).int() - base
        assert torch.equal(up, (bits >= 2**16 - part).int())


def test_no_element_is_farther_away_than_half_a_code():
    """To nearest 1/128 of f, wherever it lies in the block, and e4m3's largest are not so near."""
    value = torch.linspace(-127 / 64, 127 / 64, 128 * 500)
    value.view(-1, 128)[:, 0] = 127 / 64
    error = (read_by_twin(NEAREST, *stored_by_twin(NEAREST, value)) - value).abs().max()
    assert 0.99 / 128 < float(error) <= 1 / 128
