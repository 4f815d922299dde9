"""Products with a card's bits: results that an H100 made, torch against C++, and what they promise.

h100.npz: 8 rows and 8 columns each of 130 products that an H100 made (wgmma; mma.sync agreed), as
bits: of bf16, fp16 and TF32 operands, whose names say what is rare in them.
"""

from pathlib import Path

import numpy
import pytest
import torch
from bits import assert_same_bits, bits
from mutants import mutant

from megaopt.kernels import native
from megaopt.kernels.products import reference
from megaopt.kernels.products.reference import OPERANDS, product_reference

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in OPERANDS}
RECORD = numpy.load(Path(__file__).with_name("h100.npz"))
GROUPS = sorted({name.rpartition("/")[0] for name in RECORD.files})
INF, NAN = float("inf"), float("nan")


@pytest.fixture(params=["torch", "native"])
def twin(request, monkeypatch):
    """Either twin serves."""
    if request.param == "torch":
        monkeypatch.setenv(native.SWITCH, "0")
    else:
        needs_native()


def needs_native():
    module, why_not = native.build()
    if module is None:
        pytest.skip(f"the extension cannot be built here: {why_not}")


def both(left, right, total=None):
    """The product in C++, which is that in torch."""
    found = product_reference(left, right, total)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(native.SWITCH, "0")
        assert_same_bits(found, product_reference(left, right, total), "C++ and torch")
    return found


def spread(shape, binades, dtype, seed=0):
    """Random numbers over so many binades around 1, some of them zeros of either sign."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.rand(shape, generator=generator) * binades - binades / 2
    value = torch.randn(shape, generator=generator).double() * torch.exp2(exponents).double()
    return (value * (torch.rand(shape, generator=generator) > 0.05)).to(dtype)


def patterns(shape, dtype, seed=0):
    """Numbers of random bits: every exponent, subnormals, infinities, NaNs of all payloads."""
    generator = torch.Generator().manual_seed(seed)
    size = (*shape[:-1], shape[-1] * dtype.itemsize)
    return torch.randint(0, 256, size, dtype=torch.uint8, generator=generator).view(dtype)


def sprinkled(value, specials, share, seed=0):
    generator = torch.Generator().manual_seed(seed)
    place = torch.randint(len(specials), value.shape, generator=generator)
    there = torch.rand(value.shape, generator=generator) < share
    return torch.where(there, torch.tensor(specials, dtype=value.dtype)[place], value)


# --- a card's results


def assert_recorded(product):
    for group in GROUPS:
        names, *arrays = (
            RECORD[f"{group}/{each}"] for each in ("name", "left", "right", "total", "result")
        )
        dtype = DTYPES[group.partition("/")[0]]
        for name, left, right, total, result in zip(
            names, *map(torch.from_numpy, arrays), strict=True
        ):
            found = product(left.view(dtype), right.view(dtype), total.view(torch.float32))
            assert_same_bits(found, result.view(torch.float32), f"{name}, {group}")


def test_results_are_those_of_a_card(twin):
    assert_recorded(product_reference)


MUTANTS = {
    "24 bits": ("FRACTION = 25", "FRACTION = 24"),
    "26 bits": ("FRACTION = 25", "FRACTION = 26"),
    "no floor": ("LEAST = -133", "LEAST = -1000"),
    "terms rounded": ("torch.trunc(left_64[:, k, None]", "torch.round(left_64[:, k, None]"),
    "total rounded": ("torch.trunc(total_64 * scale)", "torch.round(total_64 * scale)"),
    "sum rounded": ("value.view(torch.int64) & -(2**29)", "value.view(torch.int64)"),
    "subnormal sums rounded": ("torch.trunc(value * 2.0**149)", "torch.round(value * 2.0**149)"),
    "zeros in the alignment": ("(value == 0) | ~value.isfinite()", "~value.isfinite()"),
    "fp16 subnormals normalised": ("Operand(16, -14)", "Operand(16, -24)"),
    "bf16 subnormals normalised": (
        "torch.bfloat16: Operand(16, -126)",
        "torch.bfloat16: Operand(16, -133)",
    ),
    "bf16 blocks of 8": ("torch.bfloat16: Operand(16, -126)", "torch.bfloat16: Operand(8, -126)"),
    "fp16 blocks of 8": ("Operand(16, -14)", "Operand(8, -14)"),
    "TF32 blocks of 16": ("Operand(8, -126)", "Operand(16, -126)"),
    "TF32 of 11 bits": ("& -0x2000)", "& -0x1000)"),
    "NaN of another payload": ("NAN = 0x7FFFFFFF", "NAN = 0x7FC00000"),
}


@pytest.mark.parametrize("change", MUTANTS.values(), ids=MUTANTS)
def test_the_record_notices_a_mutant(change, tmp_path, monkeypatch):
    monkeypatch.setenv(native.SWITCH, "0")
    changed = mutant(Path(reference.__file__), change, tmp_path)
    with pytest.raises(AssertionError, match="differ"):
        assert_recorded(changed.product_reference)


# --- C++ against torch

SHAPES = [
    *((5, k, 33) for k in (1, 8, 15, 16, 17, 100, 1000)),
    *((m, 24, n) for m in (0, 1, 7, 65) for n in (0, 1, 7, 64)),
    (70, 0, 3),
]


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", OPERANDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_both_twins_agree_on_shapes(dtype, shape):
    needs_native()
    m, k, n = shape
    left, right = spread((m, k), 4, dtype), spread((k, n), 4, dtype, seed=1)
    both(left, right)
    both(left, right, spread((m, n), 8, torch.float32, seed=2))
    both(
        spread((k, m), 4, dtype).mT,
        spread((n, k), 4, dtype).mT,
        spread((n, m), 8, torch.float32).mT,
    )
    both(spread((m, 2 * k), 4, dtype)[:, ::2], spread((k, 3 * n), 4, dtype)[:, 1::3])


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", OPERANDS)
@pytest.mark.parametrize("binades", [0, 5, 20, 40, 90, 130, 240])
@pytest.mark.parametrize("around", [-70, -40, 0, 40, 62])
@pytest.mark.sample(2)
def test_both_twins_agree_on_spreads(dtype, binades, around):
    """Products of fp32's whole range and beyond, subnormal and infinite results among them."""
    needs_native()
    left, right = (
        spread((20, 100), binades, torch.float64),
        spread((100, 40), binades, torch.float64, seed=1),
    )
    left, right = (left * 2.0**around).to(dtype), (right * 2.0**around).to(dtype)
    both(left, right)
    for power in (-140, 2 * around, 120):
        total = (spread((20, 40), 20, torch.float64, seed=2) * 2.0**power).float()
        both(left, right, total)


@pytest.mark.parametrize("dtype", OPERANDS)
@pytest.mark.parametrize("seed", range(4))
def test_both_twins_agree_on_any_bits(dtype, seed):
    needs_native()
    left, right = patterns((16, 48), dtype, seed), patterns((48, 40), dtype, seed + 10)
    total = patterns((16, 40), torch.float32, seed + 20)
    both(left, right, total)
    finite = [torch.where(each.isfinite(), each, 1) for each in (left, right, total)]
    both(*finite)
    both(*[each.clamp(-(2.0**14), 2.0**14) for each in finite])


@pytest.mark.parametrize("dtype", OPERANDS)
@pytest.mark.parametrize("gap", [0, 30, 45, 49, 51, 55, 60, 64, 70])
def test_both_twins_agree_where_the_largest_meet_zeros(dtype, gap):
    """What is left lies twice the gap below the product of the largest."""
    needs_native()
    left, right = spread((9, 64), 6, torch.float64), spread((64, 40), 6, torch.float64, seed=1)
    left[:, ::4] *= 2.0 ** min(gap, 15 if dtype == torch.float16 else gap)
    right[1::4] *= 2.0**gap
    left[:, 1::4], right[::4] = 0, -0.0
    for down in (0, 60):
        both((left * 2.0**-down).to(dtype), (right * 2.0**-down).to(dtype))


@pytest.mark.parametrize("dtype", OPERANDS)
@pytest.mark.parametrize("sign", [1, -1])
def test_both_twins_agree_on_the_largest_sum(dtype, sign):
    """Some 65.5 * 2**25: more than 31 bits."""
    needs_native()
    almost_2 = 2 - (2.0**-10 if dtype == torch.float32 else torch.finfo(dtype).eps)
    left = torch.full((2, 32), almost_2).to(dtype)
    right = torch.full((32, 3), sign * almost_2).to(dtype)
    total = torch.tensor([[1.9999999, -1.9999999, 0.0]]).expand(2, 3)
    both(left, right, total)


@pytest.mark.parametrize("dtype", OPERANDS)
@pytest.mark.parametrize("specials", [[INF], [INF, -INF], [NAN], [INF, NAN, 0.0, -0.0]], ids=str)
@pytest.mark.parametrize(("binades", "around"), [(40, 0), (4, -20)])
def test_both_twins_agree_beside_infinities(dtype, specials, binades, around):
    """Rows, columns and totals without them keep their bits, where fp16 is subnormal too."""
    needs_native()
    left = (spread((20, 100), binades, torch.float64) * 2.0**around).to(dtype)
    right = spread((100, 70), binades, dtype, seed=1)
    total = spread((20, 70), 4, torch.float32, seed=2) * 2.0**around
    plain = both(left, right, total)
    one, other, begun = left.clone(), right.clone(), total.clone()
    one[::3] = sprinkled(left[::3], specials, 0.02)
    one[3] = 0
    one[3, 50], other[50, :40] = specials[0], 0
    other[:, ::5] = sprinkled(right[:, ::5], specials, 0.02)
    begun[4] = sprinkled(total[4], specials, 0.2)
    found = both(one, other, begun)
    rows = torch.tensor([i for i in range(20) if i % 3 and i != 4])
    columns = torch.tensor([j for j in range(40, 70) if j % 5])
    assert_same_bits(found[rows][:, columns], plain[rows][:, columns])
    assert found[3].isnan().any()


# --- what a product promises


@pytest.fixture(params=OPERANDS, ids=DTYPES)
def factors(request, twin):
    return spread((40, 96), 8, request.param), spread((96, 50), 8, request.param, seed=1)


def test_a_result_depends_on_its_row_and_column_alone(factors):
    left, right = factors
    whole = product_reference(left, right)
    assert_same_bits(product_reference(left[7:8], right[:, 33:34]), whole[7:8, 33:34])
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    assert_same_bits(product_reference(left[order], right), whole[order])


def test_order_within_a_block_and_zeros_behind_change_no_bit(factors):
    left, right = factors
    whole, terms = product_reference(left, right), OPERANDS[left.dtype].terms
    generator = torch.Generator().manual_seed(0)
    order = torch.cat(
        [first + torch.randperm(terms, generator=generator) for first in range(0, 96, terms)]
    )
    assert_same_bits(product_reference(left[:, order], right[order]), whole)
    longer = torch.nn.functional.pad(left, (0, 29)), torch.nn.functional.pad(right, (0, 0, 0, 29))
    assert_same_bits(product_reference(*longer), whole)
    swapped = order.view(-1, terms).flip(0).flatten()
    assert not torch.equal(bits(product_reference(left[:, swapped], right[swapped])), bits(whole))


def test_a_chain_can_be_cut_between_blocks_but_not_summed(factors):
    left, right = factors
    whole = product_reference(left, right)
    begun = product_reference(left[:, :48], right[:48])
    assert_same_bits(product_reference(left[:, 48:], right[48:], begun), whole)
    assert not torch.equal(begun + product_reference(left[:, 48:], right[48:]), whole)
    inside = product_reference(left[:, :44], right[:44])
    assert not torch.equal(product_reference(left[:, 44:], right[44:], inside), whole)


def test_a_matrix_times_its_transpose_is_symmetric(factors):
    left, _ = factors
    found = product_reference(left, left.mT)
    assert_same_bits(found, found.mT)


def test_negation_negates_all_but_zeros(factors):
    left, right = factors
    whole = product_reference(left, right)
    assert_same_bits(product_reference(-left, right), 0.0 - whole)


@pytest.mark.parametrize("dtype", OPERANDS)
def test_no_zero_has_a_sign(twin, dtype):
    """Nor what is below all that fp32 has. The card's results have neither."""
    minus, one = torch.tensor([[-0.0]]).to(dtype), torch.tensor([[1.0]]).to(dtype)
    assert_same_bits(product_reference(minus, one, torch.tensor([[-0.0]])), torch.tensor([[0.0]]))
    if dtype != torch.float16:
        for power in (-80, -77, -75):  # cut as a term, and as a sum
            tiny = torch.tensor([[2.0**power]]).to(dtype)
            assert_same_bits(product_reference(-tiny, tiny), torch.tensor([[0.0]]))


def test_operands_and_total_are_left_alone(factors):
    left, right = factors
    total = spread((40, 50), 8, torch.float32)
    before = [each.clone() for each in (left, right, total)]
    product_reference(left, right, total)
    for each, kept in zip((left, right, total), before, strict=True):
        assert_same_bits(each, kept)


@pytest.mark.parametrize("dtype", OPERANDS)
def test_the_number_of_threads_changes_no_bit(dtype):
    needs_native()
    left, right = spread((150, 600), 8, dtype), spread((600, 130), 8, dtype, seed=1)
    one = product_reference(left, right)
    torch.set_num_threads(2)
    try:
        assert_same_bits(product_reference(left, right), one)
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("left", "right", "total", "message"),
    [
        (torch.ones(2, 3), torch.ones(5, 4), None, r"must be \[m, k\] and \[k, n\]"),
        (torch.ones(2, 3), torch.ones(3), None, r"must be \[m, k\] and \[k, n\]"),
        (torch.ones(2, 3), torch.ones(3, 4).bfloat16(), None, "must be of one of the dtypes"),
        (torch.ones(2, 3).double(), torch.ones(3, 4).double(), None, "of one of the dtypes"),
        (torch.ones(2, 3), torch.ones(3, 4), torch.ones(1, 4), r"total must be .* \[2, 4\]"),
        (torch.ones(2, 3), torch.ones(3, 4), torch.ones(2, 4).double(), "total must be"),
    ],
)
def test_other_matrices_are_refused(left, right, total, message, twin):
    with pytest.raises(ValueError, match=message):
        product_reference(left, right, total)
