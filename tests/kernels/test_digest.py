"""The digest: docs/numbers.md in numpy against the twin and the kernel, and what it must see."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from digest_oracle import multipliers, oracle
from mutants import each_of, mutant

from megaopt import kernels
from megaopt.kernels.chunks.table import Geometry
from megaopt.kernels.digest import launch, reference
from megaopt.kernels.digest.codes import LAST_PLACE, NONFINITE, count_of, initial
from megaopt.kernels.digest.launch import DigestPlan, Digests
from megaopt.kernels.place import Place

INTEGERS = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
DTYPES = [*INTEGERS, torch.uint16, torch.uint32, torch.uint64, *NONFINITE]
COMPLEX = [torch.complex64, torch.complex128]
SMALL = Geometry(512, 3)
CASES = [
    *((count, Place(0)) for count in (0, 1, 511, 512, 513, 1100)),
    (700, Place(0, 505)),
    (700, Place(0, 2**34 + 1024)),
    (700, Place(0, LAST_PLACE // 2 - 699)),
    (5, Place(0, 3, 2, 1000)),
    (1101, Place(0, 24, 40, 96)),
    (1601, Place(0, 24, 41, 96)),
]
"""Whole tensors, shards that begin within a row or far behind, shards of columns; the last has two
chunks of SMALL."""


def random_bits(count, dtype, seed=0):
    """Every pattern: subnormals, infinities and NaNs of all payloads."""
    generator = torch.Generator().manual_seed(seed)
    size = (count * dtype.itemsize,)
    raw = torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)
    if dtype == torch.bool:
        return raw % 2 == 1
    raw[: 8 * dtype.itemsize] |= 0x7F  # some that are not finite, in every dtype that has them
    return raw.view(dtype)


def start_of(tensors):
    return initial([*map(count_of, tensors)], tensors[0].device)


def twin_of(tensors, places):
    out = start_of(tensors)
    reference.add_reference(places, tensors, out)
    return out


def launched(tensors, places, geometry=SMALL):
    out = start_of(tensors)
    DigestPlan(tensors, places, geometry).add(tensors, out)
    return out


def assert_all_agree(tensors, places, device):
    truth = [oracle(tensor, place) for tensor, place in zip(tensors, places, strict=True)]
    on_device = [tensor.to(device) for tensor in tensors]
    for name, add in (
        ("twin", lambda: twin_of(tensors, places)),
        ("kernel", lambda: launched(on_device, places)),
    ):
        lanes = [(one % 2**64, other % 2**64, count) for one, other, count in add().tolist()]
        wrong = [case for case, own in enumerate(lanes) if own != truth[case]]
        assert not wrong, f"{name}: {len(wrong)} of {len(truth)} differ: {wrong}"


def cases_of(dtype):
    return [random_bits(count, dtype) for count, _ in CASES], [place for _, place in CASES]


def cases_of_words():
    """Those of one word and of two."""
    (one, places), (other, _) = cases_of(torch.bfloat16), cases_of(torch.float64)
    return [*one, *other], [*places, *places]


@pytest.mark.parametrize("dtype", [*DTYPES, *COMPLEX], ids=str)
@pytest.mark.sample(2)
def test_twin_and_kernel_are_the_page(dtype, device):
    assert_all_agree(*cases_of(dtype), device)


def test_one_launch_takes_all_dtypes(device):
    tensors = [random_bits(1000, dtype) for dtype in DTYPES]
    assert_all_agree(tensors, [Place(0, 8 * i) for i in range(len(tensors))], device)


def test_aligned_and_unaligned_tensors_are_the_same(device):
    values = random_bits(3001, torch.bfloat16).to(device)
    shifted = torch.cat([values[:1], values])[1:]
    assert torch.equal(*(launched([each], [Place(0)]) for each in (values, shifted)))


def test_tables_follow_tensors_that_move(device):
    first, second = (random_bits(2000, torch.float32, seed).to(device) for seed in (1, 2))
    digests = Digests([first], [Place(0)], launches=True)
    for each in (first, second, first):
        assert torch.equal(digests([each]), twin_of([each], [Place(0)]))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.float64])
def test_shards_add_up(dtype):
    values, generator = random_bits(3000, dtype), np.random.default_rng(0)
    whole = twin_of([values], [Place(0)])[0]
    for _ in range(10):
        cuts = [0, *sorted(generator.integers(0, 3001, 6).tolist()), 3000]
        shards = [values[i:j] for i, j in pairwise(cuts)]
        found = twin_of(shards, [Place(0, cut) for cut in cuts[:-1]])
        assert torch.equal(found.sum(0), whole)


def test_pieces_are_cut_where_no_one_sees_it(monkeypatch):
    values, places = random_bits(5000, torch.int16), [Place(0, 77), Place(0, 77, 300, 700)]
    whole = twin_of([values] * 2, places)
    monkeypatch.setitem(reference.PIECE, "cpu", 512)
    assert torch.equal(twin_of([values] * 2, places), whole)


# --- what it must see: changes of the sums are sums of changes, by the page's multipliers

COUNT = 2**16


def of_two(one, other):
    """Changes at two places each: rows of places, and of what is added to the bits there."""
    generator = np.random.default_rng(1)
    where = generator.integers(0, COUNT, (10_000, 2))
    where = where[where[:, 0] != where[:, 1]]
    return where, np.stack([np.full(len(where), one), np.full(len(where), other)], 1)


def of_rectangles(change):
    """At the corners of rectangles, of two rows of places and two columns."""
    generator = np.random.default_rng(2)
    rows = np.sort(generator.permuted(np.tile(np.arange(COUNT // 512), (10_000, 1)), axis=1)[:, :2])
    columns = np.sort(generator.permuted(np.tile(np.arange(512), (10_000, 1)), axis=1)[:, :2])
    where = (512 * rows[:, :, None] + columns[:, None, :]).reshape(-1, 4)
    return where, np.tile(np.array(change), (len(where), 1))


SIGN = {bits: 2 ** (bits - 1) for bits in (8, 16, 32)}
PLANTED = {
    **{f"a flip of bit {bit}": of_two(2**bit, 0) for bit in range(0, 32, 5)},
    "one more here, one less there": of_two(1, -1),
    **{f"a swap of numbers {2**bit} apart": of_two(2**bit, -(2**bit)) for bit in range(0, 32, 3)},
    **{f"two signs of {bits} bits": of_two(sign, sign) for bits, sign in SIGN.items()},
    **{f"a sign of {bits} bits goes": of_two(sign, -sign) for bits, sign in SIGN.items()},
    "rectangles": of_rectangles([1, -1, -1, 1]),
    **{f"rectangles of {bits} bits": of_rectangles([sign] * 4) for bits, sign in SIGN.items()},
}


@pytest.mark.parametrize("name", PLANTED)
def test_no_planted_change_is_missed(name):
    """Some 10,000 of each, in each lane alone."""
    where, changes = PLANTED[name]
    for lane in multipliers(np.arange(COUNT)):
        with np.errstate(over="ignore"):
            moved = (lane[where] * changes.astype(np.int64).view(np.uint64)).sum(1)
        assert len(where) > 9000
        assert (moved == 0).sum() == 0


def lanes_of(values, start=0):
    return oracle(values, Place(0, start))[:2]


def assert_all_differ(found):
    for lane in zip(*found, strict=True):
        assert len(set(lane)) == len(lane)


def low_entropy():
    """A bf16 matrix of few values: zeros, and ones of either sign."""
    generator = torch.Generator().manual_seed(3)
    return torch.randint(-1, 2, (64, 96), generator=generator).bfloat16()


def one_hot():
    return torch.eye(512)[torch.arange(96) * 5 % 512].bfloat16()


@pytest.mark.parametrize("make", [low_entropy, one_hot])
def test_rows_that_change_places_are_seen(make):
    values, generator = make(), np.random.default_rng(4)
    found = {lanes_of(values)}
    pairs = [generator.choice(len(values), 2, replace=False) for _ in range(200)]
    pairs = {tuple(sorted(pair.tolist())) for pair in pairs}
    for one, other in pairs:
        changed = values.clone()
        changed[[one, other]] = values[[other, one]]
        assert not torch.equal(changed, values)
        found.add(lanes_of(changed))
    assert len(found) == len(pairs) + 1
    assert_all_differ(found)


@pytest.mark.parametrize("size", [1, 16, 512, 1536])
def test_permuted_experts_or_heads_are_seen(size):
    """Blocks of a flat parameter in other orders."""
    values, generator = (
        random_bits(12 * size, torch.bfloat16).view(12, size),
        np.random.default_rng(5),
    )
    orders = {tuple(generator.permutation(12).tolist()) for _ in range(100)}
    assert_all_differ([lanes_of(values[list(order)]) for order in orders])


def test_shifts_are_seen():
    for values in (random_bits(3000, torch.bfloat16), low_entropy().flatten()):
        assert_all_differ([lanes_of(values.roll(shift)) for shift in range(20)])


@pytest.mark.parametrize("value", [0.0, 1.0, -2.0])
def test_constant_tensors_differ_by_length(value):
    assert_all_differ([lanes_of(torch.full((count,), value)) for count in range(600)])


# --- mutants

MUTANTS = {
    "reference": {
        "another constant": ("0x735A2D97", "0x735A2D99"),
        "no last mixing": ("mixed ^= mixed >> 15", "mixed ^= mixed >> 31"),
        "an even factor": ("return mixed | 1", "return mixed & -2"),
        "columns as rows": ("device=device) + 2**31", "device=device)"),
        "rows from 0 on": ("[part.first // ROW for", "[0 for"),
        "one lane twice": ("lane1.sum(1) * row1", "lane0.sum(1) * row0"),
        "the upper word as the lower": ("words[1] * (2 * column0)", "words[1] * column0"),
        "signed bits": (
            ".long().bitwise_and_(2 ** (8 * codes.element_size()) - 1)",
            ".long()",
        ),
        "runs without a stride": ("alpha=place.stride - place.run", "alpha=place.stride"),
        "parts from the first's row on": (" - counts.cumsum() + counts", ""),
        "one tensor's numbers": ("[part.number for", "[0 for"),
    },
    "kernel": {
        "another constant": ("0x735A2D97", "0x735A2D99"),
        "a shift less": ("(second >> 16)", "(second >> 15)"),
        "an even factor": ("return mixed | 1", "return mixed & 0xFFFFFFFE"),
        "columns as rows": (" + 0x80000000", " + 0x00000000"),
        "rows of the chunk alone": ("first_row = (place >>", "first_row = (start >>"),
        "lanes exchanged": ("wide(words[0], columns[0])", "wide(words[0], columns[1])"),
        "the upper word as the lower": ("2 * wide(words[1]", "wide(words[1]"),
        "runs without a stride": ("whole.to(tl.int64) * stride", "whole.to(tl.int64) * 0"),
        "a chunk's run from its beginning": ("(start % run)", "(start * 0)"),
        "a tensor from its beginning": ("< elements) & (offsets >= -start)", "< elements)"),
        "infinities not counted": ("- 1 >> 31)", "- 1 >> 30)"),
    },
}


@pytest.mark.sample(3)
@pytest.mark.parametrize(("source", "change"), each_of(MUTANTS))
def test_the_check_notices_a_mutant(source, change, tmp_path, monkeypatch, device):
    changed = mutant(Path(kernels.__file__).parent / "digest" / f"{source}.py", change, tmp_path)
    if source == "kernel":
        monkeypatch.setattr(launch, "kernel", changed)
    else:
        monkeypatch.setattr(reference, "add_reference", changed.add_reference)
    with pytest.raises(AssertionError, match="differ"):
        assert_all_agree(*cases_of_words(), device)
