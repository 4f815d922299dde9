"""The bits of a step: which word an element has, and that words have nothing to do with another."""

import functools
import itertools

import philox_oracle
import pytest
import torch
from bits import assert_same_bits
from draw_cases import CPU, assert_words, numbers_of
from hypothesis import given, settings
from hypothesis import strategies as st
from step_cases import DRAWING, GROUP, assert_all_agree

from megaopt.kernels.chunks.draws import (
    moment_bits_reference,
    seed_and_step,
    weight_bits_reference,
    words_reference,
)
from megaopt.kernels.chunks.table import Geometry
from megaopt.kernels.place import Place
from megaopt.kernels.rules import RULES
from megaopt.kernels.rules.base import draw_numbers

ADAMW = RULES["adamw", "ieee"]
PLAIN = next(formats for formats in DRAWING if not formats.scaled)


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**31 - 1))
def test_seed_and_step_go_through_fp32(seed, step):
    row = torch.tensor(draw_numbers({"seed": seed, "step": step}), dtype=torch.float32)
    key, found = seed_and_step(row.tolist())
    assert (key[0] + key[1] * 2**32, found) == (seed, step)


numbers = st.integers(0, 2**32 - 1)
firsts = st.one_of(st.integers(0, 2**40), st.integers(2**34 - 99, 2**34 + 99))
runs = st.tuples(st.integers(1, 40), st.integers(0, 2**20))
places = st.one_of(
    st.tuples(numbers, firsts).map(lambda own: Place(*own)),
    st.tuples(numbers, firsts, runs).map(
        lambda own: Place(*own[:2], own[2][0], own[2][0] + own[2][1])
    ),
)


@given(places, st.integers(0, 70), st.sampled_from([16, 64]), st.integers(0, 2**64 - 1))
@settings(deadline=None, max_examples=30)
def test_words_of_any_place(place, start, block, seed):
    """Twin, kernel and oracle, wherever a chunk starts."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    assert_words(place, start, block, device, seed)


@given(places, st.integers(1, 300))
def test_the_last_element_of_a_place(place, count):
    assert place.last(count) == philox_oracle.elements(place, count)[-1]


@given(places)
def test_four_at_a_time_only_where_four_are_one_counters(place):
    elements = philox_oracle.elements(place, 64)
    quads = [elements[i : i + 4] for i in range(0, 64, 4)]
    together = all(quad == [quad[0] + i for i in range(4)] and quad[0] % 4 == 0 for quad in quads)
    assert together or not place.in_quads


def test_a_shard_of_columns_draws_what_the_whole_draws():
    """Rows of 12: the columns from 5 to 7 of the rows from 2 on."""
    whole = words_reference(Place(3), 10 * 12, numbers_of(), CPU).view(10, 12)
    part = words_reference(Place(3, 2 * 12 + 5, 3, 12), 8 * 3, numbers_of(), CPU)
    assert_same_bits(part, whole[2:, 5:8].flatten())


PLACES = {
    "first": Place(0),
    "another parameter": Place(2**32 - 1),
    "in quads beyond 2**32": Place(3, 2**35 + 4096),
    "odd": Place(3, 3),
    "odd beyond 2**32": Place(9, 2**34 - 5),
    "columns": Place(1, 10, 7, 64),
    "columns in quads": Place(1, 16, 8, 64),
    "columns beyond 2**32": Place(70, 2**40 + 3, 16, 2**33 + 1),
}


@pytest.mark.parametrize("geometry", [Geometry(64, 2), Geometry(32, 1)], ids=str)
@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@pytest.mark.sample(2)
def test_a_step_of_any_place(place, geometry, device):
    """Tensors of many chunks and one, with others that start elsewhere."""
    own = [place, place._replace(number=77), Place(5, 1)]
    assert_all_agree(PLAIN, ADAMW, GROUP, [200, 3, 65], device, geometry, places=own)


@pytest.mark.parametrize(
    "changes", [{"seed": 0}, {"seed": 2**64 - 1}, {"step": 2**31 - 1}], ids=str
)
def test_every_bit_of_seed_and_step_counts(changes, device):
    assert_all_agree(PLAIN, ADAMW, {**GROUP, **changes}, [100], device)
    for name, bits in (("seed", 64), ("step", 31)):
        group = {"seed": 0, "step": 0}
        rows = [draw_numbers({**group, name: 2**bit}) for bit in range(bits)]
        words = {tuple(words_reference(Place(0), 4, row, CPU).tolist()) for row in rows}
        assert len(words) == bits


# --- nothing to do with another

LIMIT = 4.0
"""Standard errors. Seeds are fixed: what is within them stays so."""


def standardized(bits):
    """16 random bits as numbers of mean 0 and variance 1."""
    variance = (2.0**32 - 1) / 12
    return (bits.double() - (2**16 - 1) / 2) / variance**0.5


def drawn(count, number=0, step=1, seed=2024, first=0):
    words = words_reference(Place(number, first), count, numbers_of(seed, step), CPU)
    return {
        "weight": standardized(weight_bits_reference(words)),
        "exp_avg": standardized(moment_bits_reference(words, 0)),
        "exp_avg_sq": standardized(moment_bits_reference(words, 1)),
    }


@functools.lru_cache(maxsize=1)
def first_draw(count):
    return drawn(count)


def assert_uncorrelated(one, other, what):
    """Products of independent numbers of variance 1 have mean 0 and variance 1."""
    errors = float((one * other).mean()) * len(one) ** 0.5
    assert abs(errors) < LIMIT, f"{what}: {errors:.2f} standard errors"


def assert_all_pairs_uncorrelated(one, other, what):
    for (name, first), (second_name, second) in itertools.product(one.items(), other.items()):
        assert_uncorrelated(first, second, f"{what}: {name} and {second_name}")


SIZES = [10**6, pytest.param(10**7, marks=pytest.mark.exhaustive)]
every_size = pytest.mark.parametrize("count", SIZES)


@every_size
def test_slots_of_one_element_are_uncorrelated(count):
    found = first_draw(count)
    for (name, one), (other_name, other) in itertools.combinations(found.items(), 2):
        assert_uncorrelated(one, other, f"{name} and {other_name}")


@every_size
@pytest.mark.parametrize(
    "changes",
    [
        {"step": 2},
        {"step": 65537},
        {"number": 1},
        {"number": 2**16},
        {"seed": 2025},
        {"seed": 2**32},
    ]
    + [{"first": lag} for lag in (1, 2, 3, 4, 128)],
    ids=str,
)
@pytest.mark.sample(2)
def test_steps_parameters_seeds_and_neighbours_are_uncorrelated(count, changes):
    assert_all_pairs_uncorrelated(first_draw(count), drawn(count, **changes), changes)


@every_size
def test_bits_are_even(count):
    """Means and variances of what each slot draws, and each of the 32 bits of a word."""
    for name, found in first_draw(count).items():
        assert abs(float(found.mean())) * count**0.5 < LIMIT, name
        # the fourth moment of an even distribution of variance 1 is 1.8
        assert abs(float((found**2).mean()) - 1) * (count / 0.8) ** 0.5 < LIMIT, name
    words = words_reference(Place(0), count, numbers_of(2024, 1), CPU)
    for bit in range(32):
        share = float(((words >> bit) & 1).double().mean())
        assert abs(share - 0.5) * 2 * count**0.5 < LIMIT, bit


def test_the_check_notices_a_correlation():
    """Of a thousandth, at 1e7 draws 3 standard errors, of a hundredth at 1e6 ten."""
    found = drawn(10**6)
    mixed = found["weight"] * 0.99995 + found["exp_avg"] * 0.01
    with pytest.raises(AssertionError, match="standard errors"):
        assert_uncorrelated(mixed, found["exp_avg"], "mixed")
