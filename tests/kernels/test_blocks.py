"""8 and 4 bits in blocks: kernel, twin and an independent oracle store and read the same bits."""

import block_oracle
import numpy as np
import pytest
import torch
from bits import assert_same_bits
from block_cases import (
    BLOCKS,
    BLOCKS_OF_4_BITS,
    LINEAR,
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

from megaopt.kernels.formats.block8 import (
    factor_reference,
    inverse_factor_reference,
    scale_of_amax_reference,
)
from megaopt.kernels.step.reference import store_blocks

EVERY = [*BLOCKS, *LINEAR, *BLOCKS_OF_4_BITS]
EVERY_SCALE = torch.arange(1, 254).to(torch.uint8)
EVERY_DRAW = torch.arange(2**16, dtype=torch.int32)
LARGEST = torch.finfo(torch.float32).max
WIDE = [form for form in BLOCKS if form.block == 128]


def name(form):
    return form.name


def kind(form):
    """What its codes are: e4m3, e5m3, int8, e3m0 or e4m0."""
    return form.name.split("_")[1]


def each_of(forms):
    return pytest.mark.parametrize("form", forms, ids=name)


def packed(form, code):
    """Codes as they are stored."""
    return torch.from_numpy(block_oracle.pack(code.numpy())) if form.packed == 2 else code


def unpacked(form, stored):
    return torch.from_numpy(block_oracle.unpack(stored.numpy())) if form.packed == 2 else stored


def numbers_of(form):
    """What the magnitudes are where a block's largest is up to 2, fp64."""
    if form.packed == 2:
        return torch.from_numpy(block_oracle.numbers(form.name)[: 15 if form.unsigned else 8])
    return torch.from_numpy(block_oracle.numbers(form.name))[: 248 if form.unsigned else 121]


# --- windows


def test_the_scale_is_that_of_the_window_at_every_power_of_two():
    """2**(s - 127) < amax <= 2**(s - 126), and the ends where there is no such scale."""
    powers = torch.ldexp(torch.ones(277, dtype=torch.float64), torch.arange(-149, 128)).float()
    around = torch.cat([powers, *(powers.nextafter(torch.tensor(end)) for end in (0.0, LARGEST))])
    around = torch.cat([around, torch.tensor([0.0, LARGEST])])
    found = scale_of_amax_reference(around, WIDE[0].window_offset)
    assert_same_bits(found, torch.from_numpy(block_oracle.scales(around.numpy())))
    amax, scale = around.double(), found.double()
    inside = (torch.exp2(scale - 127) < amax) & (amax <= torch.exp2(scale - 126))
    assert bool((inside | (scale == 1) | (scale == 253)).all())
    assert bool((amax[scale == 1] <= 2.0**-125).all())
    assert bool((amax[scale == 253] > 2.0**126).all())


@each_of([WIDE[0], WIDE[2], *BLOCKS_OF_4_BITS[::2]])
def test_the_kernel_takes_the_same_windows(form, device):
    powers = torch.ldexp(torch.ones(277, dtype=torch.float64), torch.arange(-149, 128)).float()
    for end in (0.0, LARGEST):
        value = torch.zeros(277, form.block)
        value[:, 17] = powers.nextafter(torch.tensor(end))
        value[1:, 3] = powers[:-1]
        assert_stored(form, value.view(-1), device)


def test_factors_are_powers_of_two():
    power = torch.exp2(EVERY_SCALE.double() - 127)
    assert torch.equal(factor_reference(EVERY_SCALE).double(), power)
    assert torch.equal(inverse_factor_reference(EVERY_SCALE).double(), 1 / power)


# --- reading, and storing again what was read


@each_of(EVERY)
def test_every_code_under_every_scale_is_its_number(form, device):
    """Exactly, but for numbers below fp32's smallest, which are rounded once; one NaN."""
    code = torch.arange(256).to(torch.uint8).repeat(253)
    scale = EVERY_SCALE.repeat_interleave(256 * form.packed // form.block)
    found = assert_read(form, code, scale, 0, device)
    nan = {"e4m3": 127, "e5m3": 255, "int8": 128, "e3m0": 8, "e4m0": 15}
    own = unpacked(form, code)
    own = own & 0x7F if kind(form) == "e4m3" else own
    assert torch.equal(found.isnan(), own == nan[kind(form)])
    assert not bool(found.isinf().any())


@each_of(BLOCKS_OF_4_BITS)
def test_numbers_of_4_bits_are_a_chain_of_doubles(form):
    if form.unsigned:
        expected = [0.0] + [2.0**power for power in range(-12, 2)]
    else:
        expected = [0.0] + [1.5 * 2.0**power for power in range(-6, 1)]
    codes = torch.arange(16).to(torch.uint8)
    found = read_by_twin(form, packed(form, codes), torch.tensor([127], dtype=torch.uint8))
    assert found[: len(expected)].tolist() == expected
    if not form.unsigned:
        assert (-found[9:]).tolist() == expected[1:]


def blocks_of_codes(form, largest):
    """For each of these codes blocks that have it and, between them, all codes below it."""
    sign = 128 // 16 ** (form.packed - 1)
    own = form.block // (1 if form.unsigned else 2) - 1
    count = 2 * sign if form.unsigned else sign
    every = torch.nn.functional.pad(torch.arange(count), (0, -count % own)).view(-1, own)
    rows = []
    for most in largest:
        first = torch.full((len(every), 1), most)
        rows.append(torch.cat([first, every.clamp(max=most)], 1))
    code = torch.cat(rows)
    if not form.unsigned:  # each with both signs, but for the only zero of others than e4m3
        negative = torch.where((code > 0) | (kind(form) == "e4m3"), code | sign, 0)
        code = torch.cat([code, negative], 1)
    return code.to(torch.uint8).view(-1)


def codes_that_are_largest(form, scale):
    """Of a block as storing makes it: up to 2 times the scale's power, at the last scale beyond."""
    tops = {"int8": 127, "e3m0": 7, "e4m0": 14}
    if kind(form) in tops:
        return list(range(1, tops[kind(form)] + 1))
    top = 248 if form.unsigned else 120
    return list(range(1, (top if scale < 253 else top + 6) + 1))


def assert_stays(form, scale, largest, store):
    """Fails unless blocks of codes under a scale, read and stored again, read as the same."""
    code = blocks_of_codes(form, largest)
    own = torch.full((code.numel() // form.block,), scale, dtype=torch.uint8)
    value = read_by_twin(form, packed(form, code), own)
    assert bool(value.isfinite().all())
    again = store(form, value, draws_of(code.numel()) if form.draws else None)
    assert torch.equal(read_by_twin(form, *again), value), f"scale {scale}"
    return bool((unpacked(form, again[0]) != code).any())


@each_of([*WIDE, *BLOCKS_OF_4_BITS])
def test_what_was_read_is_stored_as_it_was(form):
    """All codes beside every 9th code as the largest, or each of 4 bits, under all scales."""
    moved = False
    for scale in range(1, 254):
        codes = codes_that_are_largest(form, scale)
        some = codes if form.packed == 2 else [*codes[scale % 9 :: 9], codes[-1]]
        moved |= assert_stays(form, scale, some, stored_by_twin)
    assert moved, "no window moved"


@each_of(EVERY)
def test_the_kernel_stores_what_was_read_as_it_was(form, device):
    def kernel(form, value, bits):
        return stored_by_kernel(form, value, bits, 0, device)

    for scale in (1, 2, 9, 10, 77, 127, 200, 252, 253):
        codes = codes_that_are_largest(form, scale)
        some = codes if form.packed == 2 else [1, 2, *codes[scale % 20 :: 20], codes[-1]]
        assert_stays(form, scale, some, kernel)


# --- storing


@pytest.mark.parametrize(
    ("count", "lead"),
    [(1, 0), (127, 5), (128, 127), (129, 0), (5000, 5), (5000, 127)],
)
@each_of(EVERY)
@pytest.mark.sample(2)
@pytest.mark.thirds
def test_random_values_are_stored_as_the_oracle_stores_them(form, count, lead, device):
    if form.packed == 2:
        count, lead = count + count % 2, lead - lead % 2
    assert_stored(form, random_values(count, count + lead), device, lead % form.block)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(3))
@each_of(EVERY)
def test_many_random_values(form, seed, device):
    assert_stored(form, random_values(200_000, seed), device, seed * 14 % form.block, seed)


@each_of(EVERY)
def test_every_upper_half_of_fp32(form, device):
    """As blocks of neighbours, whose windows are those of all numbers."""
    upper = torch.arange(2**16, dtype=torch.int32) << 16
    assert_stored(form, (upper | 0x8000).view(torch.float32), device)


@pytest.mark.slow
@each_of(EVERY)
def test_every_upper_half_of_fp32_beside_others(form, device):
    """In blocks of neighbours, in blocks of all magnitudes, and each beside fp32's largest."""
    upper = torch.arange(2**16, dtype=torch.int32) << 16
    value = torch.cat([upper, upper | 0x8000, upper | 0xFFFF]).view(torch.float32)
    assert_stored(form, value, device)
    assert_stored(form, value.view(-1, 64).t().reshape(-1), device)
    beside = torch.full((2**16, 2), LARGEST)
    beside[:, 1] = value[: 2**16]
    assert_stored(form, beside.view(-1), device)


@each_of(BLOCKS_OF_4_BITS)
def test_ties_and_edges_of_every_window_of_4_bits(form, device):
    """Numbers, the middle between two, and the numbers beside each, under every scale."""
    own = numbers_of(form)
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
    "one infinity": [0.5] * 13 + [-torch.inf] + [1e-2] * 9 + [1e-6] * 9,
    "an infinity beside zeros": [0.0] * 31 + [torch.inf],
    "subnormals": [1e-45, -1e-45, 1e-40, 0.0, 1.1754942e-38, -3e-39, 2.0**-126, 7e-45] * 4,
    "a subnormal beside 1": [1.0, 1e-45] * 16,
    "a subnormal beside the largest": [LARGEST, 1e-45] * 16,
    "the largest": [LARGEST, -LARGEST, 2.0**127, 1.75 * 2.0**127, 1.8125 * 2.0**127] * 6,
    "the largest of 4 bits": [LARGEST, -LARGEST, 2.0**127, 1.5 * 2.0**126] * 8,
    "below the largest": [1.874 * 2.0**127, 1.0, 1.99 * 2.0**127, 2.0**126, 1.1e38, 0.0] * 5,
    "below them": [1.99 * 2.0**126, 1.0, -(2.0**126), 1.1e38, 0.0, 3e-5, 9.0, 7.0] * 4,
    "one pair": [3.0, -0.1],
}


@each_of(EVERY)
def test_hard_blocks_leave_their_neighbours_alone(form, device):
    """Between ordinary ones, whose codes and scales are what they are by themselves."""
    block = form.block
    rows = [torch.tensor((hard * 4 + [0.0] * block)[:block]) for hard in HARD.values()]
    ordinary = random_values(block * (len(rows) + 1), 1).nan_to_num(1.0, 1.0, 1.0).view(-1, block)
    bits = random_bits(block * (2 * len(rows) + 1), 3)
    mixed = torch.empty(2 * len(rows) + 1, block)
    mixed[::2], mixed[1::2] = ordinary, torch.stack(rows)
    assert_stored(form, mixed.view(-1), device)
    given = bits if form.draws else None
    own = bits.view(-1, block)[::2].reshape(-1) if form.draws else None
    alone = stored_by_twin(form, ordinary.reshape(-1), own)
    for codes, scales in (
        stored_by_twin(form, mixed.view(-1), given),
        stored_by_kernel(form, mixed.view(-1), given, 0, device),
    ):
        assert_same_bits(codes.view(-1, block // form.packed)[::2].reshape(-1), alone[0])
        assert_same_bits(scales[::2], alone[1])


@pytest.mark.sample(5)
@each_of(EVERY)
@pytest.mark.parametrize("hard", HARD.values(), ids=HARD)
def test_hard_blocks_that_are_shorter(hard, form, device):
    assert_stored(form, torch.tensor(hard), device)


@each_of(EVERY)
def test_codes_of_what_is_no_ordinary_number(form, device):
    """NaN and infinities: the one NaN, of e4m3 with the infinity's sign; zeros.

    What is too small for int8 and e3m0 has no sign.
    """
    exponent = 126 if kind(form) in ("e4m3", "e5m3") else 127
    largest = 2.0 if form.packed == 2 else 1.0
    value = [largest, torch.nan, torch.inf, -torch.inf, 0.0, -0.0, -largest, -1e-30]
    payloads = torch.tensor([-(1 << 22), 0x7F800001], dtype=torch.int32).view(torch.float32)
    value = torch.cat([torch.tensor(value), payloads])
    expected = {
        "e4m3": [120, 127, 127, 255, 0, 0, 248, 128, 127, 127],
        "e5m3": [248, 255, 255, 255, 0, 1, 248, 1, 255, 255],
        "int8": [64, 128, 128, 128, 0, 0, 192, 0, 128, 128],
        "e3m0": [7, 8, 8, 8, 0, 0, 15, 0, 8, 8],
        "e4m0": [14, 15, 15, 15, 0, 1, 14, 1, 15, 15],
    }[kind(form)]
    code, scale = assert_stored(form, value, device)
    assert unpacked(form, code).tolist() == expected
    assert scale.tolist() == [exponent]


@each_of([form for form in EVERY if form.unsigned])
def test_what_is_not_0_never_becomes_0(form, device):
    """Down to a 2**-276th of the block's largest: the update stays bounded."""
    powers = torch.ldexp(torch.ones(276, dtype=torch.float64), torch.arange(-149, 127)).float()
    beside = torch.stack([powers.flip(0), powers], 1).view(-1)
    for value in (powers, beside, beside.flip(0)):
        code, scale = assert_stored(form, value, device)
        assert bool((unpacked(form, code) > 0).all())
        assert bool((read_by_twin(form, code, scale) > 0).all())


def test_nearest_takes_the_even_code_on_a_tie(device):
    for form in (form for form in WIDE if not form.draws):
        top = 247 if form.unsigned else 119
        number = torch.from_numpy(block_oracle.numbers(form.name))[: top + 2]
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
    numbers = torch.from_numpy(block_oracle.numbers(form.name))
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
    numbers = torch.from_numpy(block_oracle.numbers(form.name))
    if unit % 16 == 0 and not has_floor:
        exact = numbers[base] + (numbers[base + 1] - numbers[base]) * (unit / 2**20)
        # multiples of 2**-52 of at most 2, 2**16 of them: their sums are exact in fp64
        assert float((numbers[found] / numbers[1]).sum()) == float(exact / numbers[1]) * 2**16


@each_of([form for form in WIDE if form.draws])
def test_every_draw_of_some_fractions(form, device):
    """By the twin; some of them by the kernel too."""

    def kernel(form, value, bits):
        return stored_by_kernel(form, value, bits, 0, device)

    for place, (base, unit, value) in enumerate(fractions(form)):
        for store in (stored_by_twin, kernel) if place % 12 == 0 else (stored_by_twin,):
            assert_rounded(form, base, unit, codes_of_every_draw(form, value, store))


@each_of([form for form in WIDE if form.draws])
def test_every_fraction_of_a_step_under_some_draws(form, device):
    """All 2**16 fractions between two codes, and each of them with more bits behind."""
    base = 240 if form.unsigned else 112
    numbers = block_oracle.numbers(form.name)
    for more in (0, 7, 8):
        part = (torch.arange(2**16, dtype=torch.float64) * 16 + more) / 2**20
        value = (numbers[base] + (numbers[base + 1] - numbers[base]) * part).float()
        value = torch.cat([value.view(-1, 64), torch.full((1024, 64), 2.0)], 1).view(-1)
        assert_stored(form, value, device, 0, more)


@each_of([form for form in WIDE if form.draws])
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


@each_of([form for form in BLOCKS_OF_4_BITS if form.draws])
def test_every_draw_of_4_bits_at_many_places_between_two_numbers(form, device):
    """Up as often as the place says; bits of all 65,536 draws, kernel and twin."""
    own = numbers_of(form).tolist()
    places = [(own[-3], own[-2], part) for part in (1 / 64, 0.25, 0.7109375)]
    places += [(own[-2], own[-1], part) for part in (0.5, 63 / 64)]
    if not form.unsigned:  # of e4m0 beside its floor: code 0 would be 0
        places.append((0.0, own[1], 0.375))
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


def test_the_largest_of_4_bits_loses_at_most_a_quarter():
    """e3m0 has nothing between 1.5 and 2 of a block's (1, 2]; all else is right in the mean."""
    form = next(form for form in BLOCKS_OF_4_BITS if form.draws and not form.unsigned)
    value = torch.linspace(1.0, 2.0, 1001)[1:].repeat_interleave(32)
    values = [
        read_by_twin(form, *stored_by_twin(form, value, random_bits(len(value), seed)))
        for seed in range(40)
    ]
    mean = torch.stack(values).double().view(40, -1, 32).mean((0, 2))
    exact = value.view(-1, 32)[:, 0].double()
    expected = exact.clamp(max=1.5)
    # 1,280 draws of a number between 0.75 and 1.5: 6 sigma
    assert bool(((mean - expected).abs() < 6 * 0.375 / np.sqrt(1280)).all())
    assert bool((mean[exact > 1.5] == 1.5).all())
