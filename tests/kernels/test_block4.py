"""4 bits in blocks: kernel, twin and an independent oracle store and read the same, bit by bit."""

import block4_oracle
import numpy as np
import pytest
import torch
from bits import assert_same_bits
from block_cases import (
    BLOCKS_OF_4_BITS,
    assert_read,
    assert_stored,
    draws_of,
    random_bits,
    random_values,
    read_by_oracle,
    read_by_twin,
    stored_by_kernel,
    stored_by_twin,
)

EVERY_SCALE = torch.arange(1, 254).to(torch.uint8)
EVERY_DRAW = torch.arange(2**16, dtype=torch.int32)
LARGEST = torch.finfo(torch.float32).max
DRAWING = [form for form in BLOCKS_OF_4_BITS if form.draws]


def name(form):
    return form.name


def packed(code):
    """Two codes a byte."""
    return torch.from_numpy(block4_oracle.pack(code.numpy()))


def unpacked(stored):
    return torch.from_numpy(block4_oracle.unpack(stored.numpy()))


each_form = pytest.mark.parametrize("form", BLOCKS_OF_4_BITS, ids=name)
each_drawing = pytest.mark.parametrize("form", DRAWING, ids=name)


# --- reading, and storing again what was read


@each_form
def test_every_byte_under_every_scale_is_its_two_numbers(form, device):
    code = torch.arange(256).to(torch.uint8).repeat(253)
    found = assert_read(form, code, EVERY_SCALE.repeat_interleave(256 // 16), 0, device)
    assert torch.equal(found.isnan(), unpacked(code) == (15 if form.unsigned else 8))
    assert not bool(found.isinf().any())


def numbers_of(form):
    """What the codes are where the block's largest is in (1, 2]."""
    if form.unsigned:
        return [0.0] + [2.0**power for power in range(-12, 2)]
    return [0.0] + [1.5 * 2.0**power for power in range(-6, 1)]


@each_form
def test_numbers_are_a_chain_of_doubles(form):
    count = len(numbers_of(form))
    codes = torch.arange(16).to(torch.uint8)
    found = read_by_twin(form, packed(codes), torch.tensor([127], dtype=torch.uint8))
    assert found[:count].tolist() == numbers_of(form)
    if not form.unsigned:
        assert (-found[9:]).tolist() == numbers_of(form)[1:]


def blocks_of_codes(form, largest):
    """A block for each of these codes: it, and all codes below it, with both signs."""
    rows = []
    for most in largest:
        row = torch.arange(32) % (16 if form.unsigned else 8)
        row = row.clamp(max=most)
        row[0] = most
        if not form.unsigned:
            row[16:] = torch.where(row[16:] > 0, row[16:] + 8, 0)
        rows.append(row)
    return torch.cat(rows).to(torch.uint8)


@pytest.mark.parametrize("by", ["twin", "kernel"])
@each_form
def test_all_that_can_be_read_is_stored_as_it_was(form, by, device):
    """Under every scale, beside every largest; by the kernel also with the window below."""
    most = 14 if form.unsigned else 7
    code = blocks_of_codes(form, range(1, most + 1)).repeat(253)
    value = read_by_twin(form, packed(code), EVERY_SCALE.repeat_interleave(most))
    assert bool(value.isfinite().all())
    bits = draws_of(len(value)) if form.draws else None
    if by == "twin":
        again = stored_by_twin(form, value, bits)
    else:
        again = stored_by_kernel(form, value, bits, 0, device)
    assert torch.equal(read_by_twin(form, *again), value)
    moved = unpacked(again[0]) != code
    assert bool(moved.any()), "no window moved"


# --- storing


@pytest.mark.parametrize(
    ("count", "lead"),
    [
        pytest.param(count, lead, marks=[] if (count, lead) in quick else pytest.mark.slow)
        for quick in [{(2, 30), (34, 6), (5000, 14)}]
        for count in (2, 30, 32, 34, 5000)
        for lead in (0, 6, 14, 30)
    ],
)
@each_form
def test_random_values_are_stored_as_the_oracle_stores_them(form, count, lead, device):
    assert_stored(form, random_values(count, count + lead), device, lead)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@each_form
def test_many_random_values(form, seed, device):
    assert_stored(form, random_values(200_000, seed), device, seed * 14 % 32, seed)


@each_form
def test_every_upper_half_of_fp32(form, device):
    """As blocks of neighbours, whose windows are those of all numbers."""
    upper = torch.arange(2**16, dtype=torch.int32) << 16
    assert_stored(form, (upper | 0x8000).view(torch.float32), device)


@pytest.mark.slow
@each_form
def test_every_upper_half_of_fp32_beside_others(form, device):
    """In blocks of neighbours, in blocks of all magnitudes, and each beside fp32's largest."""
    upper = torch.arange(2**16, dtype=torch.int32) << 16
    value = torch.cat([upper, upper | 0x8000, upper | 0xFFFF]).view(torch.float32)
    assert_stored(form, value, device)
    assert_stored(form, value.view(-1, 64).t().reshape(-1), device)
    beside = torch.full((2**16, 2), LARGEST)
    beside[:, 1] = value[: 2**16]
    assert_stored(form, beside.view(-1), device)


@each_form
def test_ties_and_edges_of_every_window(form, device):
    """Numbers, the middle between two, and the numbers beside each, under every scale."""
    own = torch.tensor(numbers_of(form), dtype=torch.float64)
    points = torch.cat([own, (own[1:] + own[:-1]) / 2])
    power = torch.exp2(EVERY_SCALE.double() - 127)[:, None]
    value = (points * power).float()
    ends = (torch.tensor(0.0), torch.tensor(torch.inf))
    value = torch.cat([value, *(value.nextafter(end) for end in ends)], 1)
    blocks = torch.nn.functional.pad(value, (0, -value.shape[1] % 31)).view(253, -1, 31)
    top = (1.75 * power).float()[:, None].expand(-1, blocks.shape[1], 1)
    value = torch.cat([top, blocks], 2)
    assert_stored(form, value.reshape(-1), device)
    if not form.unsigned:
        assert_stored(form, -value.reshape(-1), device)


HARD = {
    "zeros": [0.0] * 32,
    "zeros of both signs": [0.0, -0.0] * 16,
    "NaN": [torch.nan] * 32,
    "infinities": [torch.inf, -torch.inf] * 16,
    "one NaN": [0.5] * 13 + [torch.nan] + [0.25] * 18,
    "one infinity": [0.5] * 13 + [-torch.inf] + [1e-2] * 18,
    "an infinity beside zeros": [0.0] * 31 + [torch.inf],
    "subnormals": [1e-45, -1e-45, 1e-40, 0.0, 1.1754942e-38, -3e-39, 2.0**-126, 7e-45] * 4,
    "a subnormal beside 1": [1.0, 1e-45] * 16,
    "a subnormal beside the largest": [LARGEST, 1e-45] * 16,
    "the largest": [LARGEST, -LARGEST, 2.0**127, 1.5 * 2.0**126] * 8,
    "below the largest": [1.99 * 2.0**126, 1.0, -(2.0**126), 1.1e38, 0.0, 3e-5, 9.0, 7.0] * 4,
    "one pair": [3.0, -0.1],
}


@each_form
def test_hard_blocks_leave_their_neighbours_alone(form, device):
    """Between ordinary ones, whose codes and scales are what they are by themselves."""
    rows = [torch.tensor(hard + [0.0] * (32 - len(hard))) for hard in HARD.values()]
    ordinary = random_values(32 * (len(rows) + 1), 1).nan_to_num(1.0, 1.0, 1.0).view(-1, 32)
    bits = random_bits(32 * (2 * len(rows) + 1), 3)
    mixed = torch.empty(2 * len(rows) + 1, 32)
    mixed[::2], mixed[1::2] = ordinary, torch.stack(rows)
    assert_stored(form, mixed.view(-1), device)
    assert_stored(form, mixed[1].clone(), device)
    given = bits if form.draws else None
    own = bits.view(-1, 32)[::2].reshape(-1) if form.draws else None
    alone = stored_by_twin(form, ordinary.reshape(-1), own)
    for codes, scales in (
        stored_by_twin(form, mixed.view(-1), given),
        stored_by_kernel(form, mixed.view(-1), given, 0, device),
    ):
        assert_same_bits(codes.view(-1, 16)[::2].reshape(-1), alone[0])
        assert_same_bits(scales[::2], alone[1])


@each_form
def test_codes_of_what_is_no_ordinary_number(form, device):
    """NaN and infinities: the one NaN; zeros; what is too small for e3m0 has no sign."""
    value = torch.tensor([2.0, torch.nan, torch.inf, -torch.inf, 0.0, -0.0, -2.0, -1e-30])
    code, scale = assert_stored(form, value, device)
    expected = [14, 15, 15, 15, 0, 1, 14, 1] if form.unsigned else [7, 8, 8, 8, 0, 0, 15, 0]
    assert unpacked(code).tolist() == expected
    assert scale.tolist() == [127]


@pytest.mark.parametrize("form", [f for f in BLOCKS_OF_4_BITS if f.unsigned], ids=name)
def test_what_is_not_0_never_becomes_0(form, device):
    powers = torch.ldexp(torch.ones(276, dtype=torch.float64), torch.arange(-149, 127)).float()
    beside = torch.stack([powers.flip(0), powers], 1).view(-1)
    for value in (powers, beside, beside.flip(0)):
        code, _ = assert_stored(form, value, device)
        assert bool((unpacked(code) > 0).all())


# --- draws


@each_drawing
def test_every_draw_at_many_places_between_two_numbers(form, device):
    """Up as often as the place says; bits of all 65,536 draws, kernel and twin."""
    own = numbers_of(form)
    places = [(own[-3], own[-2], part) for part in (1 / 64, 0.25, 0.7109375)]
    places += [(own[-2], own[-1], part) for part in (0.5, 63 / 64)]
    for low, high, part in places:
        value = torch.full((len(EVERY_DRAW),), low + (high - low) * part)
        value[::32] = own[-1]
        found = stored_by_twin(form, value, EVERY_DRAW)
        kernel = stored_by_kernel(form, value, EVERY_DRAW, 0, device)
        for one, other in zip(kernel, found, strict=True):
            assert_same_bits(one, other)
        read = read_by_oracle(form, *found).view(-1, 32)[:, 1:]
        assert set(read.unique().tolist()) == {low, high}
        # every 32nd draw is the largest's
        assert abs(float((read == high).double().mean()) - part) < 2.0**-10


@each_drawing
def test_small_values_are_right_in_the_mean(form, device):
    """Between 0 and the smallest number, in 2**-7 of it; of e4m0 beside its floor."""
    own = numbers_of(form)
    value = torch.full((len(EVERY_DRAW),), own[1] * 0.375)
    value[::32] = own[-1]
    stored = stored_by_kernel(form, value, EVERY_DRAW, 0, device)
    drawn = read_by_oracle(form, *stored).view(-1, 32)[:, 1:]
    if form.unsigned:  # code 0 would be 0
        assert set(drawn.reshape(-1).tolist()) == {own[1]}
    else:
        assert abs(float((drawn == own[1]).double().mean()) - 0.375) < 2.0**-10


def test_the_largest_loses_at_most_a_quarter():
    """e3m0 has nothing between 1.5 and 2 of a block's (1, 2]; all else is right in the mean."""
    form = DRAWING[0]
    value = torch.linspace(1.0, 2.0, 1001)[1:].repeat_interleave(32).view(-1, 32).clone()
    value[:, 1:] = 0.0
    value = value[:, :1].expand(-1, 32).reshape(-1)
    values = [
        read_by_twin(form, *stored_by_twin(form, value, random_bits(len(value), seed)))
        for seed in range(40)
    ]
    mean = torch.stack(values).view(-1, 32).double().view(40, -1, 32).mean((0, 2))
    exact = value.view(-1, 32)[:, 0].double()
    expected = exact.clamp(max=1.5)
    # 1,280 draws of a number between 0.75 and 1.5: 6 sigma
    assert bool(((mean - expected).abs() < 6 * 0.375 / np.sqrt(1280)).all())
    assert bool((mean[exact > 1.5] == 1.5).all())
