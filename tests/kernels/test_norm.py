"""The norm: whole numbers and fractions of Python against the twin and the kernel, however cut."""

import itertools
import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from bits import assert_same_bits
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mutants import each_of, mutant
from norm_oracle import WIDTH, oracle_counts, oracle_norm, squares

from megaopt import kernels
from megaopt.kernels.formats import GRADS
from megaopt.kernels.norm import launch
from megaopt.kernels.norm.bins import BANKS, BINS, LIMB, LOWEST, MOST, ROWS, new_bins
from megaopt.kernels.norm.launch import NormPlan, tables_of, total
from megaopt.kernels.norm.reference import accumulate_reference, total_of_bins, total_reference
from megaopt.kernels.step.launch import Geometry

SMALL = Geometry(64, 2)


def counts_of(bins):
    """As oracle_counts, from a table: exact, where fp32 would hide most errors."""
    rows = bins.cpu().sum(0).tolist()
    sums = [high * 2**LIMB + low for low, high in rows[:BINS]]
    top = max((row for row in range(BINS) if sums[row]), default=None)
    return None if top is None else (top + LOWEST, sums[top], sums[top - 1])


def reference_bins(grads):
    bins = new_bins(grads[0].device)
    accumulate_reference(grads, bins)
    return bins


def kernel_bins(grads, geometry=SMALL, programs=None):
    bins = new_bins(grads[0].device)
    plan = NormPlan(GRADS[grads[0].dtype], geometry, programs)
    plan.accumulate(*tables_of(grads, geometry), bins)
    return bins


def assert_all_agree(grads, geometry=SMALL):
    """Twin, kernel and oracle: the totals that count as whole numbers, then the norm's bits."""
    counts = oracle_counts(torch.cat([grad.flatten().cpu() for grad in grads]))
    expected = oracle_norm(counts)
    for name, bins in (
        ("twin", reference_bins([grad.cpu() for grad in grads])),
        ("kernel", kernel_bins(grads, geometry)),
    ):
        assert counts_of(bins) == counts, f"{name}: 2 of 2 differ"
        for evaluate in (total, total_reference):
            on = bins if evaluate is total_reference else bins.to(grads[0].device)
            norm, nonfinite = evaluate(on)
            assert_same_bits(norm, expected, f"{name}, {evaluate.__name__}")
            assert not bool(nonfinite)


def spread(count, sigma, seed=1):
    generator = torch.Generator().manual_seed(seed)
    magnitude = (torch.randn(count, generator=generator) * sigma).exp()
    return torch.randn(count, generator=generator) * magnitude


def beside_bin_edges():
    """The fp32 neighbours of the root of half a unit, of every unit: they change the top bin."""
    found = []
    for index in range(-5, 6):
        root = np.float32(math.sqrt(2.0 ** (WIDTH * index - 1)))
        below, above = (np.nextafter(root, np.float32(end)) for end in (0, np.inf))
        found += [float(below), float(root), float(above)]
    return found


EDGES = beside_bin_edges()
HARD = {
    "one": [1.0],
    "smallest": [1e-45],
    "subnormals": [1e-45, -3e-42, 1e-39, 7e-40],
    "largest": [3.4028234663852886e38] * 5,
    "overflow of fp32 squares": [1e38, -2e38, 1e30],
    "ends of the range": [1e-45, 3e38, 1.0, 1e-20],
    "zeros": [0.0, -0.0, 0.0],
    "signs": [3.0, -4.0],
    "edges of bins, up": EDGES,
    "edges of bins, down": EDGES[::-1],
    "three bins deep": [1.0, 2.0**-25, 2.0**-26, 1.5 * 2.0**-26, 2.0**-50, 2.0**-52, 2.0**-76],
    "an edge above small ones": [EDGES[17], *[2.0**-30 * (1 + k / 64) for k in range(64)]],
    "negative rests": [1.7, 1.3, 1.9 * 2.0**-12, 1.01 * 2.0**-20, 0.7 * 2.0**-25],
}


@pytest.mark.parametrize("values", HARD.values(), ids=HARD)
def test_hard_values(values, device):
    whole = torch.tensor(values, device=device)
    assert_all_agree([whole])
    assert_all_agree([piece.clone() for piece in whole.split(1)])


@pytest.mark.parametrize("edge", EDGES)
def test_the_top_bin_is_the_one_that_the_largest_square_reaches(edge, device):
    """A top bin of 0 with smaller numbers beside would make the result depend on the cutting."""
    assert_all_agree([torch.tensor([edge, edge * 2.0**-13, edge * 2.0**-26], device=device)])


@pytest.mark.sample(7)
@pytest.mark.parametrize("dtype", GRADS.allowed, ids=str)
@pytest.mark.parametrize("sigma", [0, 4, 12])
def test_spread_values_in_every_format(dtype, sigma, device):
    values = spread(700, sigma).clamp(-6e4, 6e4).to(dtype).to(device)
    assert_all_agree([values[:1], values[1:128], values[128:128], values[128:]])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_format_does_not_show(dtype, device):
    grad = spread(500, 3).clamp(-6e4, 6e4).to(dtype).to(device)
    norms = [total(kernel_bins([g]))[0] for g in (grad, grad.float())]
    assert_same_bits(*norms)
    assert counts_of(kernel_bins([grad])) == counts_of(kernel_bins([grad.float()]))


GEOMETRIES = [Geometry(16, 16), Geometry(64, 3), Geometry(1024, 1), Geometry(512, 4)]


@pytest.mark.sample(2)
@pytest.mark.parametrize("programs", [None, 1, 3, 37], ids=lambda count: f"{count} programs")
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_geometry_shows_in_no_bit(geometry, programs, device):
    values = spread(2100, 10).to(device)
    counts = oracle_counts(values.cpu())
    assert counts_of(kernel_bins([values, values[:0]], geometry, programs)) == counts


def test_default_geometry_and_tables_of_more_than_one_block(device):
    assert_all_agree([spread(MOST * 2 + 5, 8).to(device)], None)


@pytest.mark.parametrize("dtype", GRADS.allowed, ids=str)
@pytest.mark.parametrize("shift", [1, 3])
def test_unaligned_gradients(dtype, shift, device):
    values = spread(300, 8).clamp(-6e4, 6e4).to(dtype).to(device)
    base = torch.zeros(400, dtype=dtype, device=device)
    view = base[shift : shift + 300].copy_(values)
    assert view.data_ptr() % 16
    base[shift + 300] = math.inf  # nothing beside the gradient is read
    base[shift - 1] = math.nan
    assert_all_agree([view])


FLOATS = st.one_of(
    st.floats(width=32, allow_nan=False, allow_infinity=False),
    st.floats(-2, 2, width=32),
    st.sampled_from(EDGES),
    st.integers(-149, 127).map(lambda exponent: 2.0**exponent),
)


@st.composite
def cut_values(draw):
    """A list of values, and the same values shuffled and cut into pieces, empty ones among them."""
    values = draw(st.lists(FLOATS, min_size=1, max_size=60))
    order = draw(st.permutations(range(len(values))))
    cuts = sorted(draw(st.lists(st.integers(0, len(values)), max_size=8)))
    bounds = [0, *cuts, len(values)]
    shuffled = torch.tensor([values[index] for index in order], dtype=torch.float32)
    pieces = [shuffled[a:b] for a, b in itertools.pairwise(bounds)]
    return torch.tensor(values, dtype=torch.float32), pieces


@settings(deadline=None)
@given(cut_values())
def test_twin_on_any_cutting_is_the_oracle(case):
    values, pieces = case
    counts = oracle_counts(values)
    bins = reference_bins(pieces)
    assert counts_of(bins) == counts
    assert_same_bits(total_reference(bins)[0], oracle_norm(counts))


@settings(deadline=None, max_examples=25)
@given(cut_values(), st.sampled_from([Geometry(4, 1), Geometry(16, 3), Geometry(64, 1)]))
def test_kernel_on_any_cutting_is_the_oracle(case, geometry):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    values, pieces = case
    bins = kernel_bins([piece.to(device) for piece in pieces], geometry)
    counts = oracle_counts(values)
    assert counts_of(bins) == counts
    assert_same_bits(total(bins)[0], oracle_norm(counts))


@settings(deadline=None)
@given(st.lists(FLOATS, min_size=1, max_size=60))
@example([1.0, *[2.0**-25] * 59])
@example(HARD["three bins deep"])
def test_the_total_is_within_its_bound(values):
    """Of bins.py: off by at most (N + 1) * 2**-50 of the exact sum of squares."""
    values = torch.tensor(values, dtype=torch.float32)
    exact = sum(squares(values))
    counts = counts_of(reference_bins([values]))
    found = 0.0 if counts is None else total_of_bins(*counts[1:], counts[0] - LOWEST)
    assert abs(Fraction(found) - exact) <= (len(values) + 1) * Fraction(1, 2**50) * exact


def test_the_largest_sum_of_a_block_fits(device):
    """All squares just below half of u_1: the most that a bin can get of a block."""
    below = torch.full((MOST + 7,), EDGES[3 * 6], device=device)
    assert_all_agree([below], Geometry(MOST, 1))


def test_tables_of_shards_add_up(device):
    values = spread(1000, 12)
    shards = [values[:333], values[333:334], values[334:]]
    tables = [
        kernel_bins([shards[0].to(device)]).cpu(),
        *map(reference_bins, [[s] for s in shards[1:]]),
    ]
    added = sum(tables)
    assert counts_of(added) == oracle_counts(values)
    assert_same_bits(total(added.to(device))[0], oracle_norm(oracle_counts(values)))


def test_a_second_launch_adds_to_the_first(device):
    first, second = spread(200, 5).to(device), spread(100, 5, seed=2).to(device)
    bins = kernel_bins([first])
    NormPlan(GRADS[torch.float32], SMALL).accumulate(*tables_of([second], SMALL), bins)
    assert counts_of(bins) == oracle_counts(torch.cat([first, second]).cpu())
    before = bins.clone()
    total(bins)
    assert_same_bits(bins, before)


@pytest.mark.sample(3)
@pytest.mark.parametrize("where", [0, 64, 130])
@pytest.mark.parametrize(
    "values",
    [[math.inf], [-math.inf], [math.nan], [math.inf, math.nan], [math.nan, -math.inf, math.nan]],
    ids=str,
)
@pytest.mark.parametrize("dtype", GRADS.allowed, ids=str)
def test_nonfinite_elements(values, where, dtype, device):
    """As torch has it, together in a block or not."""
    grad = spread(140, 1).to(dtype).to(device)
    grad[where : where + len(values)] = torch.tensor(values)
    expected = torch.linalg.vector_norm(grad.float())
    expected = torch.where(expected.isnan(), math.nan, expected)
    pieces = [grad[: where + 1], grad[where + 1 :].clone()]
    for bins in (kernel_bins([grad]), kernel_bins(pieces), reference_bins([grad])):
        for norm, nonfinite in (total(bins), total_reference(bins)):
            assert_same_bits(norm, expected)
            assert bool(nonfinite)


def test_a_norm_too_large_for_fp32_is_infinite_and_its_elements_are_not(device):
    grads = [torch.full((2,), 3e38, device=device)]
    norm, nonfinite = total(kernel_bins(grads))
    assert norm == math.inf
    assert not bool(nonfinite)
    assert_all_agree(grads)


def test_no_elements_at_all(device):
    norm, nonfinite = total(kernel_bins([torch.zeros(0, device=device)]))
    assert_same_bits(norm, torch.tensor(0.0, device=device))
    assert not bool(nonfinite)


# (2n + 1)**2, n even: its root is a tie of fp32 that goes down, and any bit more sends it up
TIE = (2**25 - 3) ** 2


def synthetic(rows):
    """A table with these limbs, spread over banks."""
    bins = torch.zeros((BANKS, ROWS, 2), dtype=torch.int64)
    for bank, (row, low, high) in enumerate(rows):
        bins[bank, row] += torch.tensor([low, high])
    return bins


SYNTHETIC = {
    "a tie": [(7, 1, 0), (6, 0, 0), (6, (TIE - 2**50) % 2**26, (TIE - 2**50) >> 26)],
    "above the tie": [(7, 1, 0), (6, (TIE + 1 - 2**50) % 2**26, (TIE + 1 - 2**50) >> 26)],
    "the third bin does not count": [
        (7, 1, 0), (6, (TIE - 2**50) % 2**26, (TIE - 2**50) >> 26), (5, 0, 2**36),
    ],
    "limbs shared anyhow": [(7, 2**54 + 1, -(2**28) + (TIE >> 26)), (7, TIE % 2**26, 0)],
    "rounded once a limb": [(7, 2**26 - 1, 2**55 + 1), (6, 5, -(2**60) - 1)],
    "lowest bins": [(1, 1, 0)],
    "highest bin": [(12, 2**25, 2**20), (11, 1, -1)],
}  # fmt: skip


@pytest.mark.parametrize("rows", SYNTHETIC.values(), ids=SYNTHETIC)
def test_total_of_a_table(rows, device):
    bins = synthetic(rows)
    expected = oracle_norm(counts_of(bins))
    assert_same_bits(total_reference(bins)[0], expected, "twin")
    assert_same_bits(total(bins.to(device))[0], expected, "kernel")


def test_the_tie_is_one():
    assert float(oracle_norm((0, 0, TIE))) < float(oracle_norm((0, 0, TIE + 1)))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", GRADS.allowed, ids=str)
@pytest.mark.parametrize("geometry", [None, Geometry(512, 8), Geometry(64, 1)], ids=str)
def test_compiled_kernel_is_the_twin(dtype, geometry, device):
    counts = [1, 2047, 2048, 2049, 0, 3_000_001]
    grads = [spread(count, 6, seed).clamp(-6e4, 6e4).to(dtype) for seed, count in enumerate(counts)]
    expected = reference_bins(grads)
    for programs in (None, 5):
        bins = kernel_bins([grad.to(device) for grad in grads], geometry, programs)
        assert counts_of(bins) == counts_of(expected)
        assert_same_bits(total(bins)[0], total_reference(expected)[0])


# --- operations changed: by source and check what goes wrong, the old text and the new one. Of the
# true source test_hard_values and test_total_of_a_table are the checks


def agree_on_every_case(device):
    for name in HARD:
        test_hard_values(HARD[name], device)


def agree_on_every_table(device):
    for rows in SYNTHETIC.values():
        test_total_of_a_table(rows, device)


MUTANTS = {
    ("kernel", agree_on_every_case): {
        "other units": ("(ROW_0 + 52)", "(ROW_0 + 51)"),
        "no second rounding": ("lower = rest + lower_magic", "lower = lower_magic + 0.0 * rest"),
        "the square again for its rest": ("value, upper_magic - upper)", "value, 0.0)"),
        "top bin by the floor alone": ("- 1022", "- 1023"),
        "top bin one too high": ("(above - ROW_0) // WIDTH", "(above - ROW_0) // WIDTH + 1"),
        "amax of signed numbers": ("bitcast=True) & 0x7FFFFFFF, 0)", "bitcast=True), 0)"),
        "values that are not exact": ("grad.to(tl.float64)", "(grad * 1.0000001).to(tl.float64)"),
        "low limb of the wrong width": ("sums & LOW_MASK, sums", "sums & (LOW_MASK >> 1), sums"),
        "magic numbers left in": ("(lower_sums, 0) - lower_bits", "(lower_sums, 0) + 0"),
        "a chunk left out": ("while chunk < chunks:", "while chunk < chunks - 1:"),
    },
    ("kernel", agree_on_every_table): {
        "a third bin": (
            "high, top - 1)) * unit",
            "high, top - 1) + row_total(low, high, top - 2) / BIN_SCALE) * unit",
        ),
        "one bin": ("BIN_SCALE + row_total(low, high, top - 1)", "BIN_SCALE"),
        "no carry": ("    high += low >> LIMB\n    low &= LOW_MASK\n", ""),
        "one bank": ("low = tl.sum(tl.load(places), 0)", "low = tl.max(tl.load(places), 0)"),
        "root in fp32": ("tl.sqrt(total).to(tl.float32)", "tl.sqrt(total.to(tl.float32))"),
    },
    ("reference", agree_on_every_case): {
        "truncation": ("lower = torch.round(rest", "lower = torch.floor(rest"),
        "top bin by the floor alone": ("row = above // WIDTH", "row = (above - 1) // WIDTH"),
        "rest of another unit": ("rest / unit_of(row - 1)", "rest / unit_of(row - 1) * 2"),
        "no carry from limb to limb": (".sum() + (low >> LIMB)", ".sum()"),
    },
}


@pytest.mark.sample(2)
@pytest.mark.parametrize(("source", "check", "change"), each_of(MUTANTS))
def test_the_check_notices_a_mutant(source, check, change, tmp_path, monkeypatch, device):
    changed = mutant(Path(kernels.__file__).parent / "norm" / f"{source}.py", change, tmp_path)
    if source == "kernel":
        monkeypatch.setattr(launch, "kernel", changed)
    else:
        monkeypatch.setitem(globals(), "accumulate_reference", changed.accumulate_reference)
    with pytest.raises(AssertionError, match="differ"):
        check(device)
