"""8 bits in blocks: kernel, twin and an independent oracle store and read the same, bit by bit."""

import block_oracle
import numpy as np
import pytest
import torch
from bits import assert_same_bits
from block_cases import (
    BLOCKS,
    assert_read,
    assert_stored,
    draws_of,
    random_bits,
    random_values,
    read_by_twin,
    stored_by_kernel,
    stored_by_twin,
)

from megaopt.kernels.formats.block8 import (
    factor_reference,
    inverse_factor_reference,
    scale_of_amax_reference,
)
from megaopt.kernels.step.reference import store_blocks

EVERY_SCALE = torch.arange(1, 254).to(torch.uint8)
EVERY_DRAW = torch.arange(2**16, dtype=torch.int32)
LARGEST = torch.finfo(torch.float32).max
WIDE = [form for form in BLOCKS if form.block == 128]
DRAWING = [form for form in WIDE if form.draws]


def name(form):
    return form.name


each_form = pytest.mark.parametrize("form", BLOCKS, ids=name)
each_wide = pytest.mark.parametrize("form", WIDE, ids=name)
each_drawing = pytest.mark.parametrize("form", DRAWING, ids=name)


def patterns(*numbers):
    return torch.tensor(numbers, dtype=torch.int64).to(torch.int32).view(torch.float32)


# --- windows


def test_the_scale_is_that_of_the_window_at_every_power_of_two():
    """2**(s - 127) < amax <= 2**(s - 126), and the ends where there is no such scale."""
    powers = torch.ldexp(torch.ones(277, dtype=torch.float64), torch.arange(-149, 128)).float()
    around = torch.cat([powers, *(powers.nextafter(torch.tensor(end)) for end in (0.0, LARGEST))])
    around = torch.cat([around, torch.tensor([0.0, LARGEST])])
    found = scale_of_amax_reference(around)
    assert_same_bits(found, torch.from_numpy(block_oracle.scales(around.numpy())))
    amax, scale = around.double(), found.double()
    inside = (torch.exp2(scale - 127) < amax) & (amax <= torch.exp2(scale - 126))
    assert bool((inside | (scale == 1) | (scale == 253)).all())
    assert bool((amax[scale == 1] <= 2.0**-125).all())
    assert bool((amax[scale == 253] > 2.0**126).all())


@pytest.mark.parametrize("form", [WIDE[0], WIDE[2]], ids=name)
def test_the_kernel_takes_the_same_windows(form, device):
    powers = torch.ldexp(torch.ones(277, dtype=torch.float64), torch.arange(-149, 128)).float()
    for end in (0.0, LARGEST):
        value = torch.zeros(277, 128)
        value[:, 77] = powers.nextafter(torch.tensor(end))
        value[1:, 3] = powers[:-1]
        assert_stored(form, value.view(-1), device)


def test_factors_are_powers_of_two():
    power = torch.exp2(EVERY_SCALE.double() - 127)
    assert torch.equal(factor_reference(EVERY_SCALE).double(), power)
    assert torch.equal(inverse_factor_reference(EVERY_SCALE).double(), 1 / power)


# --- reading, and storing again what was read


@each_form
def test_every_code_under_every_scale_is_its_number(form, device):
    """Exactly, but for numbers below fp32's smallest, which are rounded once; one NaN."""
    code = torch.arange(256).to(torch.uint8).repeat(253)
    found = assert_read(form, code, EVERY_SCALE.repeat_interleave(256 // form.block), 0, device)
    is_nan = (code if form.unsigned else code & 0x7F) == (255 if form.unsigned else 127)
    assert torch.equal(found.isnan(), is_nan)
    assert not bool(found.isinf().any())


def blocks_of_codes(form, largest):
    """For each of these codes blocks that have it and, between them, all codes below it."""
    own = form.block // (1 if form.unsigned else 2) - 1
    count = 256 if form.unsigned else 128
    every = torch.nn.functional.pad(torch.arange(count), (0, -count % own)).view(-1, own)
    rows = []
    for most in largest:
        first = torch.full((len(every), 1), most)
        rows.append(torch.cat([first, every.clamp(max=most)], 1))
    code = torch.cat(rows)
    if not form.unsigned:  # each with both signs
        code = torch.cat([code, code | 0x80], 1)
    return code.to(torch.uint8).view(-1)


def codes_that_are_largest(form, scale):
    """Of a block as storing makes it: up to 2 times the scale's power, at the last scale beyond."""
    top = 248 if form.unsigned else 120
    return list(range(1, (top if scale < 253 else top + 6) + 1))


def assert_stays(form, scale, largest, store, bits_of):
    """Fails unless blocks of codes under a scale, read and stored again, read as the same."""
    code = blocks_of_codes(form, largest)
    own = torch.full((code.numel() // form.block,), scale, dtype=torch.uint8)
    value = read_by_twin(form, code, own)
    assert bool(value.isfinite().all())
    again = store(form, value, bits_of(code.numel()) if form.draws else None)
    assert torch.equal(read_by_twin(form, *again), value), f"scale {scale}"


@each_wide
def test_what_was_read_is_stored_as_it_was(form):
    """All codes beside every 9th code as the largest, under all scales; zeros lose their sign."""
    for scale in range(1, 254):
        codes = codes_that_are_largest(form, scale)
        assert_stays(form, scale, [*codes[scale % 9 :: 9], codes[-1]], stored_by_twin, draws_of)


@pytest.mark.slow
@each_form
def test_all_that_can_be_read_is_stored_as_it_was(form, device):
    def kernel(form, value, bits):
        return stored_by_kernel(form, value, bits, 0, device)

    # every one takes minutes a format
    for scale in (1, 2, *range(3, 254, 25), 252, 253):
        for store in (stored_by_twin, kernel):
            assert_stays(form, scale, codes_that_are_largest(form, scale), store, draws_of)


@each_form
def test_the_kernel_stores_what_was_read_as_it_was(form, device):
    for scale in (1, 2, 9, 10, 77, 127, 200, 252, 253):
        codes = codes_that_are_largest(form, scale)

        def kernel(form, value, bits):
            return stored_by_kernel(form, value, bits, 0, device)

        assert_stays(form, scale, [1, 2, *codes[scale % 20 :: 20], codes[-1]], kernel, draws_of)


# --- storing


@pytest.mark.parametrize("lead", [0, 5, 127])
@pytest.mark.parametrize("count", [1, 127, 128, 129, 5000])
@each_form
def test_random_values_are_stored_as_the_oracle_stores_them(form, count, lead, device):
    assert_stored(form, random_values(count, count + lead), device, lead % form.block)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@each_form
def test_many_random_values(form, seed, device):
    assert_stored(form, random_values(200_000, seed), device, seed * 13 % form.block, seed)


@each_form
def test_every_upper_half_of_fp32(form, device):
    """As blocks of neighbours, as blocks of all magnitudes, and each beside fp32's largest."""
    upper = torch.arange(2**16, dtype=torch.int32) << 16
    value = torch.cat([upper, upper | 0x8000, upper | 0xFFFF]).view(torch.float32)
    assert_stored(form, value, device)
    assert_stored(form, value.view(-1, 64).t().reshape(-1), device)
    beside = torch.full((2**16, 2), LARGEST)
    beside[:, 1] = value[: 2**16]
    assert_stored(form, beside.view(-1), device)


HARD = {
    "zeros": [0.0] * 128,
    "zeros of both signs": [0.0, -0.0] * 64,
    "NaN": [torch.nan] * 128,
    "infinities": [torch.inf, -torch.inf] * 64,
    "one NaN": [0.5] * 60 + [torch.nan] + [0.25] * 67,
    "one infinity": [0.5] * 60 + [-torch.inf] + [1e-6] * 67,
    "an infinity beside zeros": [0.0] * 127 + [torch.inf],
    "subnormals": [1e-45, -1e-45, 1e-40, 0.0, 1.1754942e-38, -3e-39, 2.0**-126, 7e-45] * 16,
    "a subnormal beside 1": [1.0, 1e-45] * 64,
    "a subnormal beside the largest": [LARGEST, 1e-45] * 64,
    "the largest": [LARGEST, -LARGEST, 2.0**127, 1.75 * 2.0**127, 1.8125 * 2.0**127] * 26,
    "below the largest": [1.874 * 2.0**127, 1.0, 1.99 * 2.0**127, 2.0**126, 1.1e38, 0.0] * 21,
    "one element": [3.0],
}


@pytest.mark.parametrize("hard", HARD.values(), ids=HARD)
@pytest.mark.parametrize(
    "form",
    [
        pytest.param(form, marks=[pytest.mark.slow] * (form.draws != (form.block == 128)))
        for form in BLOCKS
    ],
    ids=name,
)
def test_hard_blocks_leave_their_neighbours_alone(form, hard, device):
    """Before it and behind it: there codes and scales are what they are beside ordinary values."""
    block, bits = form.block, random_bits(512, 3)
    own = torch.tensor(hard)[:block]
    before, behind = random_values(2 * block, 1).nan_to_num(1.0, 1.0, 1.0).split(block)
    assert_stored(form, own, device)
    for middle in (own, torch.ones_like(own)):
        padded = torch.cat([middle, torch.zeros(block - len(middle))])
        value = torch.cat([before, padded, behind])
        assert_stored(form, value, device)
        given = bits[: len(value)] if form.draws else None
        alone = stored_by_twin(form, value, given)
        sides = [(alone[0], alone[1])]
        sides.append(stored_by_kernel(form, value, given, 0, device))
        for codes, scales in sides:
            expected = stored_by_twin(form, before, None if given is None else given[:block])
            assert_same_bits(codes[:block], expected[0])
            assert_same_bits(scales[:1], expected[1])
            last = None if given is None else given[-block:]
            expected = stored_by_twin(form, behind, last)
            assert_same_bits(codes[-block:], expected[0])
            assert_same_bits(scales[-1:], expected[1])


@each_form
def test_codes_of_what_is_no_ordinary_number(form, device):
    """NaN and infinities: the one NaN, of e4m3 with the infinity's sign; zeros."""
    value = torch.tensor([1.0, torch.nan, torch.inf, -torch.inf, 0.0, -0.0, -1.0, -1e-30])
    value = torch.cat([value, patterns(0xFFC00000, 0x7F800001)])
    code, scale = assert_stored(form, value, device)
    if form.unsigned:
        assert code.tolist() == [248, 255, 255, 255, 0, 1, 248, 1, 255, 255]
    else:
        assert code.tolist() == [120, 127, 127, 255, 0, 0, 120 + 128, 128, 127, 127]
    assert scale.tolist() == [126]


@pytest.mark.parametrize("form", [f for f in BLOCKS if f.unsigned], ids=name)
def test_what_is_not_0_never_becomes_0(form, device):
    """Down to a 2**-276th of the block's largest: the update stays bounded."""
    exponents = torch.arange(-149, 128)
    powers = torch.ldexp(torch.ones(277, dtype=torch.float64), exponents).float()
    beside = torch.stack([powers.flip(0), powers], 1).view(-1)
    for value in (powers, beside, beside.flip(0)):
        code, scale = assert_stored(form, value, device)
        assert bool((code > 0).all())
        assert bool((read_by_twin(form, code, scale) > 0).all())


def test_nearest_takes_the_even_code_on_a_tie(device):
    for form in (form for form in WIDE if not form.draws):
        top = 247 if form.unsigned else 119
        number = torch.from_numpy(block_oracle.numbers(form.unsigned))[: top + 2]
        middle = ((number[1:-1] + number[2:]) / 2).float()  # from code 1 on: the floor is below
        value = torch.stack([torch.full_like(middle, 2.0), middle], 1).view(-1)
        value = torch.cat([value, value.new_full((-len(value) % 2,), 2.0)])
        code, scale = assert_stored(form, value, device)
        below = torch.arange(1, top + 1)
        assert code[1::2][:top].tolist() == (below + below % 2).tolist()
        assert set(scale.tolist()) == {127}


# --- stochastic rounding


def fractions(form, units=(0, 1, 15, 16, 17, 0x1234 << 4, 2**19, 2**20 - 16, 2**20 - 1)):
    """Numbers a fraction, in 2**-20, of the way from one code to the next; beside a 2."""
    bases = [9, 247] if form.unsigned else [9, 119]
    numbers = torch.from_numpy(block_oracle.numbers(form.unsigned))
    for base in bases:
        step = numbers[base + 1] - numbers[base]
        for unit in units:
            yield base, unit, float((numbers[base] + step * (unit / 2**20)).float())
    for base in (0, 7):  # below 8 units fp32 is as coarse as 2**-20 of the step
        for unit in units[::4]:
            yield base, unit, float((numbers[base] + numbers[1] * (unit / 2**20)).float())


def codes_of_every_draw(form, value, store):
    """Those of one value under each of 2**16 draws, in blocks of which the largest is 2."""

    def beside(own, other):
        return torch.cat([own.view(1024, 64), torch.full_like(own, other).view(1024, 64)], 1)

    values = beside(torch.full((2**16,), value), 2.0).view(-1)
    code, scale = store(form, values, beside(EVERY_DRAW, 0).view(-1))
    assert bool((scale == 127).all())
    return code.view(1024, 128)[:, :64].reshape(-1).long()


def assert_rounded(form, base, unit, found):
    """Fails unless as many of 65,536 draws go up as a fraction in 2**-20 says.

    In whole 2**-16 exactly, so that the mean is the value itself; else the nearest of them. e5m3's
    smallest code is 1: below it all go up.
    """
    has_floor = form.unsigned and base == 0 and unit > 0
    ups = 2**16 if has_floor else (unit + 8) // 16
    assert bool((found - base == (torch.arange(2**16) >= 2**16 - ups)).all())
    numbers = torch.from_numpy(block_oracle.numbers(form.unsigned))
    if unit % 16 == 0 and not has_floor:
        exact = numbers[base] + (numbers[base + 1] - numbers[base]) * (unit / 2**20)
        # multiples of 2**-52 of at most 2, 2**16 of them: their sums are exact in fp64
        assert float((numbers[found] / numbers[1]).sum()) == float(exact / numbers[1]) * 2**16


@each_drawing
def test_every_draw_of_some_fractions(form):
    for base, unit, value in fractions(form):
        assert_rounded(form, base, unit, codes_of_every_draw(form, value, stored_by_twin))


@each_drawing
def test_the_kernel_takes_every_draw_so(form, device):
    def store(form, value, bits):
        return stored_by_kernel(form, value, bits, 0, device)

    for base, unit, value in list(fractions(form))[::5]:
        assert_rounded(form, base, unit, codes_of_every_draw(form, value, store))


@each_drawing
def test_every_fraction_of_a_step_under_some_draws(form, device):
    """All 2**16 fractions between two codes, and each of them with more bits behind."""
    base = 240 if form.unsigned else 112
    numbers = block_oracle.numbers(form.unsigned)
    for more in (0, 7, 8):
        part = (torch.arange(2**16, dtype=torch.float64) * 16 + more) / 2**20
        value = (numbers[base] + (numbers[base + 1] - numbers[base]) * part).float()
        value = torch.cat([value.view(-1, 64), torch.full((1024, 64), 2.0)], 1).view(-1)
        for seed in (1, 2):
            assert_stored(form, value, device, 0, seed)


@each_drawing
def test_by_hand_it_is_the_nearest(form):
    """What no step stores has no draw: half of the fractions go up, those of the half and more."""
    value = torch.cat([random_values(1000), torch.tensor([2.0, 1.0625, 1.0624, 1.0626])])
    code = torch.zeros(1004, dtype=torch.uint8)
    scale = torch.zeros(-(-1004 // form.block), dtype=torch.uint8)
    store_blocks(code, scale, value, form)
    half = np.full(1004, 0x8000)
    expected = block_oracle.encode(form.name, value.numpy(), 0, half)
    assert_same_bits(code, torch.from_numpy(expected[0]))
    assert_same_bits(scale, torch.from_numpy(expected[1]))
