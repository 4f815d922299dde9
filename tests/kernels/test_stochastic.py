"""Stochastic rounding, 24-bit masters and Kahan compensation: exact means, and what stays put.

A value's codes over all 65,536 draws are known: there is nothing to be estimated.
"""

import numpy as np
import oracle
import pytest
import torch
from bits import assert_same_bits
from encoding_cases import assert_encoded, by_kernel, by_twin, run, upper_halves

from megaopt.kernels.chunks.draws import (
    moment_bits_reference,
    weight_bits_reference,
    words_reference,
)
from megaopt.kernels.formats import MASTERS, STOCHASTIC_WEIGHTS
from megaopt.kernels.optional_triton import jit, tl
from megaopt.kernels.place import Place
from megaopt.kernels.rules.base import draw_numbers


@jit
def join_kernel(weight_ptr, code_ptr, value_ptr, FORMAT: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = FORMAT.decode(tl.load(weight_ptr + offsets), tl.load(code_ptr + offsets))
    tl.store(value_ptr + offsets, value)


def values_of(form, codes):
    """What codes say, fp32, by the twin."""
    return form.decode_reference(*codes)


DRAWS = 2**16
ALL_BITS = torch.arange(DRAWS, dtype=torch.int32)
SOME_BITS = [0, 1, 0x7FFF, 0x8000, 0xFFFE, 0xFFFF]
BF16, FP16 = STOCHASTIC_WEIGHTS.values()
NEAREST24, STOCHASTIC24 = MASTERS["remainder8"], MASTERS["remainder8_stochastic"]
KAHANS = [form for name, form in MASTERS.items() if name.startswith("kahan")]
DRAWING = [BF16, FP16, *(form for form in MASTERS.values() if form.draws)]
each_drawing = pytest.mark.parametrize("form", DRAWING, ids=lambda form: form.name)


def name(form):
    return form.name


def random_values(count, seed=0, least=-90, most=120):
    generator = np.random.default_rng(seed)
    exponents = np.exp2(generator.integers(least, most, count)).astype(np.float32)
    return torch.from_numpy(generator.standard_normal(count, dtype=np.float32) * exponents)


def random_bits(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, DRAWS, (count,), generator=generator, dtype=torch.int32)


def lower_bits(upper, fractions):
    """fp32 numbers of one upper half with each of the lower halves."""
    return torch.tensor([upper + each for each in fractions], dtype=torch.int32).view(torch.float32)


FRACTIONS = [0, 1, 3, 0x1234, 0x8000, 0xABCD, 0xFFFF]
# 1 and beyond, the last place below 2, a subnormal of fp32, and below fp32's largest
UPPERS = {"1": 0x3F800000, "below 2": 0x3FFF0000, "subnormal": 0x00030000, "large": 0x7F000000}
# fp16: 2**-20 and more; from 2**-24 on multiples of 2**-24 are its numbers
SMALL = [3 * 2.0**-24 + k * 2.0**-40 for k in (0, 1, 2, 3, 0x7FFF, 0x8000, 0xFFFF)]
SMALL += [2.0**-40, 2.0**-25, 2.0**-24 - 2.0**-40, 2.0**-14 - 2.0**-38, 5e-6]


def values_for(form):
    """Numbers whose fraction of a last place has at most 16 bits."""
    is_half = torch.float16 in (form.dtype, form.requires_weight)
    uppers = [0x3F800000, 0x42FE0000] if is_half else UPPERS.values()
    found = [lower_bits(each, FRACTIONS) for each in uppers]
    return torch.cat([*found, torch.tensor(SMALL if is_half else []), -found[0]])


@each_drawing
def test_the_mean_over_all_draws_is_the_value(form):
    """Exactly: as many of 65,536 draws take the other neighbour as the fraction says."""
    for value in values_for(form).tolist():
        codes = by_twin(form, torch.full((DRAWS,), value), ALL_BITS)
        found = values_of(form, codes).double()
        one, other = float(found[0]), float(found[-1])
        assert bool(((found == one) | (found == other)).all()), "of two neighbours one"
        assert min(one, other) <= value <= max(one, other)
        assert_neighbours(form, codes, found)
        # sums of 2**16 numbers of at most 24 bits around one another: exact in fp64
        assert float(found.sum()) / DRAWS == value
        ups = found != one
        assert int(ups.sum()) == abs(value - one) / (abs(other - one) or 1) * DRAWS
        assert bool(ups.int().diff().ge(0).all()), "the larger the draw, the rather up"


def assert_neighbours(form, codes, found):
    """Fails unless there is no number of the format between the first and the last."""
    if form is STOCHASTIC24:
        patterns = found.float().view(torch.int32)
        assert int((patterns[-1] - patterns[0]).abs()) in (0, 256)
        return
    code = codes[-1]
    if len(codes) > 1:  # of Kahan's: what lies beside the first weight; a tie may have another
        code = (found - codes[0][0].double()).to(torch.bfloat16)
    pattern = code.view(torch.int16).int()
    order = torch.where(pattern < 0, -(pattern & 0x7FFF), pattern)
    assert int((order[-1] - order[0]).abs()) in (0, 1)


@pytest.mark.parametrize("name", ["kahan", "kahan_stochastic"])
@pytest.mark.parametrize("weight", ["", "_float16"])
def test_a_compensated_weight_is_what_its_value_rounds_to(name, weight):
    """So a value that is read and set again keeps both, also where rounding made a tie."""
    form = MASTERS[name.replace("kahan", "kahan" + weight)]
    value = torch.randn(1 << 16, generator=torch.Generator().manual_seed(0))
    value = torch.cat([value, value * 1e-6, value * 1e3])
    bits = torch.arange(len(value), dtype=torch.int32) % DRAWS
    own, rest = form.encode_reference(value, *((bits,) if form.draws else ()))
    ties = rest.float().abs() * 2 == (own.float() - torch.nextafter(own, own * 0).float()).abs()
    assert int(ties.sum()) > 100
    again = form.encode_by_hand(form.decode_reference(own, rest))
    assert torch.equal(again[0], own)
    assert torch.equal(again[1].view(torch.int16), rest.view(torch.int16))


@each_drawing
def test_every_fraction_under_some_draws(form, device):
    """All 2**16 lower halves of a number; what they say is up to the oracle."""
    for upper, bits in zip((0x3F800000, 0xC2FF0000 - 2**32), (0x1234, 0x8000), strict=True):
        values = lower_bits(upper, range(2**16))
        assert_encoded(form, values, device, torch.full((2**16,), bits, dtype=torch.int32))
        assert_encoded(form, values, device, random_bits(2**16, upper & 255))


EDGES = upper_halves()
NEW = [*DRAWING, *(form for form in MASTERS.values() if form.joined and not form.draws)]
LONG = [
    pytest.param(form, marks=[pytest.mark.slow] * form.name.startswith("kahan_float16"))
    for form in NEW
]


@pytest.mark.parametrize("form", LONG, ids=name)
def test_kernel_and_twin_are_the_oracle_at_every_edge(form, device):
    assert_encoded(form, EDGES, device, random_bits(len(EDGES)) if form.draws else None)


@pytest.mark.parametrize("form", [f for f in MASTERS.values() if f.joined], ids=name)
def test_any_pair_of_codes_is_read_as_the_oracle_reads_it(form, device):
    """Also such as no step makes: zeros and infinities beside anything."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.arange(2**16, dtype=torch.int32).to(torch.int16).repeat(2)
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf], dtype=form.requires_weight)
    weight = torch.cat([weight, special.view(torch.int16).repeat(1024)])
    dtype = {1: torch.int8, 2: torch.int16}[form.dtype.itemsize]
    code = torch.randint(-(2**15), 2**15, weight.shape, generator=generator).to(dtype)
    weight_name = "bfloat16" if form.requires_weight == torch.bfloat16 else "float16"
    own = {"weight": weight.numpy().view(np.uint16), "master": code.numpy()}
    if form in KAHANS:
        own["master"] = own["master"].view(np.uint16)
    expected = torch.from_numpy(oracle.joined_value(form.name, weight_name, own))
    twin = form.decode_reference(weight.view(form.requires_weight), code.view(form.dtype))
    assert_same_bits(twin, expected, "twin")
    value = torch.zeros(len(weight), device=device)
    run(join_kernel, weight.to(device), code.to(device), value, form=form)
    assert_same_bits(value, expected, "kernel")


# --- what is a number of the format stays it


@pytest.mark.parametrize("form", [BF16, FP16], ids=name)
def test_numbers_of_the_format_stay_what_they_are(form, device):
    """All 2**16 codes, with zeros of both signs, infinities and NaNs, whatever is drawn."""
    codes = ALL_BITS.to(torch.int16).view(form.dtype)
    values = form.decode_reference(codes)
    kept = ~values.isnan()
    for bits in [*(torch.full_like(ALL_BITS, each) for each in SOME_BITS), random_bits(DRAWS)]:
        for found in (by_twin(form, values, bits)[0], by_kernel(form, values, device, bits)[0]):
            assert_same_bits(found[kept], codes[kept])
            assert bool(found[~kept].isnan().all())


@each_drawing
def test_zeros_infinities_and_nan_stay_under_all_draws(form, device):
    """By the kernel under one draw in 16, the first and the last among them."""
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan])
    for bits in (ALL_BITS, torch.cat([ALL_BITS[::16], ALL_BITS[-1:]])):
        values, drawn = special.repeat_interleave(len(bits)), bits.repeat(5)
        own = (form, values, drawn) if bits is ALL_BITS else (form, values, device, drawn)
        codes = by_twin(*own) if bits is ALL_BITS else by_kernel(*own)
        assert_same_bits(values_of(form, codes), values)


# --- Kahan's compensation


@pytest.mark.parametrize(
    "form",
    [pytest.param(f, marks=[pytest.mark.slow] * (not f.draws)) for f in KAHANS],
    ids=name,
)
def test_no_compensation_is_infinite_or_nan(form, device):
    """At every edge, and around the weight formats' largest numbers, by all kinds of draws."""
    around = torch.tensor([65503.9, 65504.0, 65519.9, 65520.0, 65536.0, 3.38e38, 3.3895e38, 3.4e38])
    values = torch.cat([EDGES, around, -around])
    for each in SOME_BITS if form.draws else [None]:
        bits = None if each is None else torch.full_like(values, each, dtype=torch.int32)
        codes = by_twin(form, values, bits)
        assert bool(codes[1].float().isfinite().all())
        lost = ~codes[0].float().isfinite()
        assert bool((codes[1][lost].float() == 0).all())
    for found, expected in zip(by_kernel(form, values, device, bits), codes, strict=True):
        assert_same_bits(found, expected)


@pytest.mark.parametrize("form", KAHANS, ids=name)
def test_what_weight_and_compensation_say_comes_back(form):
    """A value that was read is stored as it was, whatever is drawn: a step of 0 moves nothing."""
    values = random_values(10**5, 5, -12, 14)
    codes = by_twin(form, values, random_bits(10**5) if form.draws else None)
    again = values_of(form, codes)
    for each in SOME_BITS if form.draws else [None]:
        bits = None if each is None else torch.full_like(again, each, dtype=torch.int32)
        assert_same_bits(values_of(form, by_twin(form, again, bits)), again)


# --- with the bits of a step


def ups_of_every_fraction(count, bits_of, seed):
    """How often each of 2**16 fractions goes up in bf16, of so many draws."""
    values = lower_bits(0x3F800000, range(2**16))
    ups = torch.zeros(2**16, dtype=torch.int64)
    for step in range(1, count + 1):
        numbers = draw_numbers({"seed": seed, "step": step})
        words = words_reference(Place(0), 2**16, numbers, torch.device("cpu"))
        ups += by_twin(BF16, values, bits_of(words))[0].float() > 1
    return ups.double()


SLOTS = {
    "weight": weight_bits_reference,
    "exp_avg": lambda words: moment_bits_reference(words, 0),
    "exp_avg_sq": lambda words: moment_bits_reference(words, 1),
}


@pytest.mark.parametrize("count", [16, pytest.param(256, marks=pytest.mark.slow)])
@pytest.mark.parametrize("slot", SLOTS)
def test_every_fraction_goes_up_as_often_as_it_says(slot, count):
    """Chi-square over all 2**16 fractions, with the bits that steps of one parameter draw.

    Each summand (ups - n p)**2 / (n p q) has mean 1 and variance 2 + (1 - 6 p q) / (n p q).
    """
    ups = ups_of_every_fraction(count, SLOTS[slot], 11)
    chance = torch.arange(2**16, dtype=torch.float64) / 2**16
    assert ups[0] == 0
    ups, chance = ups[1:], chance[1:]
    spread = chance * (1 - chance)
    squares = ((ups - count * chance) ** 2 / (count * spread)).sum()
    deviation = (2 + (1 - 6 * spread) / (count * spread)).sum() ** 0.5
    assert abs(float((squares - len(ups)) / deviation)) < 4
    total = (ups - count * chance).sum() / (count * spread.sum()) ** 0.5
    assert abs(float(total)) < 4
