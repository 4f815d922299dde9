"""The step of low rank: its twin in fp64 beside an oracle, and how projections are found."""

from pathlib import Path

import numpy as np
import pytest
import torch
from bits import assert_same_bits
from galore_cases import GAP, GROUP, SHAPES, Twin, grad_of, side_of
from mutants import mutant
from runs import values

from megaopt import kernels
from megaopt.kernels.galore import rule as matrix
from megaopt.kernels.galore.products import parts_product, product
from megaopt.kernels.galore.rule import (
    LEFT,
    RIGHT,
    LowRank,
    captured_energy,
    iterated,
    orthonormal,
    refreshed,
    scaled,
    sketched,
)
from megaopt.kernels.rules import galore


class Oracle:
    """One matrix on its way: an Adam in the small space, whose steps are taken in the large one."""

    def __init__(self, weight, side, group):
        self.weight, self.side, self.group, self.count = weight.copy(), side, group, 0
        self.mean = self.square = 0.0

    def step(self, grad, basis):
        """basis: rows that are orthonormal for the right side, columns for the left one."""
        own, (fast, slow) = self.group, self.group["betas"]
        small = grad @ basis.T if self.side == "right" else basis.T @ grad
        self.count += 1
        self.mean = self.mean * fast + small * (1 - fast)
        self.square = self.square * slow + small**2 * (1 - slow)
        small = self.mean / (np.sqrt(self.square) + own["eps"])
        large = own["scale"] * (small @ basis if self.side == "right" else basis @ small)
        rate = own["lr"]
        if own["bias_correction"]:
            rate = rate * np.sqrt(1 - slow**self.count) / (1 - fast**self.count)
        self.weight = self.weight - rate * large
        self.weight = self.weight - own["lr"] * own["weight_decay"] * self.weight


def assert_basis(basis, grad, side, energy_of_best):
    """Fails unless it is orthonormal and captures so much of what any basis of its size can.

    basis: fp32, as Oracle.step takes it; energy_of_best: a share of the largest singular values'.
    """
    rows = np.float64(basis if side == "right" else basis.T)
    rank, width = rows.shape
    # LAPACK's users' guide: singular vectors are orthonormal to some epsilon times a dimension
    assert np.abs(rows @ rows.T - np.eye(rank)).max() <= width * 2.0**-23
    grad = np.float64(grad if side == "right" else grad.T)
    best = (np.linalg.svd(grad, compute_uv=False)[:rank] ** 2).sum()
    assert ((grad @ rows.T) ** 2).sum() >= energy_of_best * best


SOURCES = Path(kernels.__path__[0])
PROJ_TYPES = ("std", "reverse_std", "right", "left", "auto")


def assert_twin_is_the_oracle(side, rank, shape, refresh="svd", **changes):
    """Fails unless weights and moments agree to 1e-12 over three refreshes.

    9 steps of sums of some 20 products of numbers near 1, each off by 2**-53 of it; a root and a
    quotient of numbers well above eps lose a few bits more.
    """
    modules = {name: changes.pop(name) for name in ("matrix", "rules") if name in changes}
    group, weight = {**GROUP, **changes}, values(shape, 0).double()
    twin = Twin(weight, side, rank, group, refresh=refresh, **modules)
    oracle = Oracle(weight.numpy(), side, group)
    for step in range(3 * GAP):
        grad = grad_of(shape, step)
        twin.step(grad)
        oracle.step(grad.numpy(), twin.projection.numpy())
        if step % GAP == 0 and refresh == "svd":
            assert_basis(twin.projection.numpy(), grad.numpy(), side, 1 - 1e-5)
    found = (twin.weight, *twin.moments)
    for own, true in zip(found, (oracle.weight, oracle.mean, oracle.square), strict=True):
        np.testing.assert_allclose(own.numpy(), true, rtol=0, atol=1e-12)
    assert np.abs(oracle.weight - weight.numpy()).max() > 1e-3


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("proj_type", PROJ_TYPES)
def test_the_twin_is_the_oracle_over_three_refreshes(proj_type, shape):
    side = side_of(proj_type, shape)
    for rank in (1, 5, min(shape)):
        assert_twin_is_the_oracle(side, rank, shape)
    assert_twin_is_the_oracle(side, 5, shape, "subspace", bias_correction=False, weight_decay=0.0)


# In one file each: what the comparison with the oracle has to notice.
MUTANTS = {
    "no scale": ("rules", ('lr * float(group["scale"])', "lr")),
    "no bias correction": ("rules", ('    if group["bias_correction"]:', "    if False:")),
    "eps beside the corrected root": (
        "rules", ("(root + scalars[6])", "(root * scalars[5] ** 0.5 + scalars[6])"),
    ),
    "decay first": (
        "rules",
        (
            "    param = param - grad * step_size\n    return param - param * decay, ()",
            "    param = param - param * decay\n    return param - grad * step_size, ()",
        ),
    ),
    "a step of the last projection": (
        "matrix",
        ("projected(grad, work.kept[PROJECTION],", "projected(grad, _last(work.kept),"),
    ),
    "an element of each row dropped": (
        "matrix",
        ("projected(grad, work.kept[PROJECTION],",
         "projected(grad * _gap(grad), work.kept[PROJECTION],"),
    ),
    "back-projection forgets a dimension": (
        "matrix", ("projected_back(low, work", "projected_back(low * _gap(low), work"),
    ),
}  # fmt: skip
HELPERS = """

_given = []


def _last(kept):
    _given.append(kept[PROJECTION])
    return _given[max(len(_given) - 2, 0)]


def _gap(matrix):
    mask = torch.ones_like(matrix)
    mask[:, -1] = 0.0
    return mask
"""


@pytest.mark.sample(3)
@pytest.mark.parametrize(("name", "change"), MUTANTS.values(), ids=MUTANTS)
def test_a_mutant_is_noticed(name, change, tmp_path):
    paths = {"rules": "rules/galore.py", "matrix": "galore/rule.py"}
    module = mutant(SOURCES / paths[name], change, tmp_path)
    if name == "matrix":
        exec(HELPERS, vars(module))
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        assert_twin_is_the_oracle(RIGHT, 5, SHAPES["tall"], **{name: module})


def test_the_check_passes_on_the_true_source():
    assert_twin_is_the_oracle(RIGHT, 5, SHAPES["tall"], matrix=matrix, rules=galore)


# --- projections


def matrix_of(shape, spectrum, seed=0):
    """A matrix with these singular values, fp32."""
    own = torch.as_tensor(spectrum, dtype=torch.float64)
    left, right = (
        torch.linalg.qr(values((n, len(own)), seed + i).double())[0] for i, n in enumerate(shape)
    )
    return (left * own @ right.mT).float()


def decaying(shape, power):
    """Singular values i**-power."""
    return matrix_of(shape, torch.arange(1, min(shape) + 1, dtype=torch.float64) ** -power)


@pytest.mark.parametrize("side", [RIGHT, LEFT])
@pytest.mark.parametrize("shape", [(96, 64), (64, 96)], ids=str)
def test_a_first_projection_finds_what_stands_out(shape, side):
    """A pass divides the tangent of the angle to the best subspace by the gap's square, here 100.

    After three an angle whose tangent was 1,000 has one of 0.001, whose square is lost energy.
    """
    grad, low_rank = matrix_of(shape, [1.0] * 8 + [0.1] * 56), LowRank(side, 8)
    projection = refreshed(grad, low_rank, None, False, seed=1)
    assert_basis(projection.numpy(), grad.numpy(), side, 1 - 1e-6)


@pytest.mark.parametrize(
    ("side", "power"),
    [
        (RIGHT, 0.5),
        (LEFT, 1.0),
        pytest.param(RIGHT, 1.0, marks=pytest.mark.slow),
        pytest.param(LEFT, 0.5, marks=pytest.mark.slow),
    ],
)
def test_refreshes_come_to_0_99_of_the_best(power, side):
    """Where no singular value stands out."""
    grad, low_rank = decaying((96, 64), power), LowRank(side, 8)
    best = captured_energy(grad, low_rank, refreshed(grad, low_rank, None, True, seed=1))
    projection = refreshed(grad, low_rank, None, False, seed=1)
    shares = [captured_energy(grad, low_rank, projection) / best]
    for _ in range(8):
        projection = refreshed(grad, low_rank, projection, False, seed=1)
        shares.append(captured_energy(grad, low_rank, projection) / best)
    assert shares == sorted(shares)
    assert 0.99 <= shares[-1] <= 1
    assert_basis(projection.numpy(), grad.numpy(), side, 0.99)


@pytest.mark.parametrize("side", [RIGHT, LEFT])
def test_signs_go_on_where_the_subspace_does(side):
    """Moments are not rotated at a refresh: a flipped column would turn their sign."""
    grad, low_rank = decaying((40, 30), 1.0), LowRank(side, 4)
    known = refreshed(grad, low_rank, None, False, seed=0)
    for step in range(4):
        noisy = grad + values(grad.shape, step) * 0.01
        found = iterated(noisy, low_rank, known)
        along = (found * known).sum(1 if side == RIGHT else 0)
        assert along.min() > 0.8
        known = found


SLOW_SHAPE = pytest.param((300, 200), 30, marks=pytest.mark.slow)


def says_nothing(shape):
    """Gradients that say nothing about a subspace."""
    grad = values(shape, 0)
    nan, infinite = grad.clone(), grad.clone()
    nan[3, 2], infinite[0, 0] = torch.nan, -torch.inf
    return {"zero": grad * 0, "nan": nan, "inf": infinite}


@pytest.mark.parametrize("kind", says_nothing((8, 8)))
@pytest.mark.parametrize("side", [RIGHT, LEFT])
@pytest.mark.parametrize(("shape", "rank"), [((40, 30), 6), SLOW_SHAPE], ids=str)
def test_a_gradient_that_says_nothing_leaves_the_projection(shape, rank, side, kind):
    grad, low_rank = says_nothing(shape)[kind], LowRank(side, rank)
    known = refreshed(values(shape, 5), low_rank, None, False, seed=0)
    assert_same_bits(refreshed(grad, low_rank, known, False, seed=0), known)
    assert_same_bits(refreshed(grad, low_rank, known, True, seed=0), known)
    first = refreshed(grad, low_rank, None, False, seed=0)
    assert_same_bits(first, sketched(low_rank, grad.shape, 0, grad.device))


def of_few_dimensions(shape):
    """Gradients of fewer dimensions than a rank of 6, and how many they have."""
    thin = values((shape[0], 5), 1) @ values((5, shape[1]), 2)
    weak = matrix_of(shape, [1.0] * 2 + [2.0**-6, 2.0**-9])
    repeated = values(shape, 0)[:, :1].expand(shape).contiguous()
    return {"thin": (thin, 5), "weak": (weak, 4), "repeated": (repeated, 1)}


@pytest.mark.parametrize("kind", of_few_dimensions((8, 8)))
@pytest.mark.parametrize("side", [RIGHT, LEFT])
@pytest.mark.parametrize(("shape", "rank"), [((40, 30), 6), SLOW_SHAPE], ids=str)
@pytest.mark.parametrize("is_first", [True, False])
def test_a_gradient_of_few_dimensions_is_captured(shape, rank, side, kind, is_first):
    """As those of a GPT are, whose SVD has a rank's energy, and the rank no independent rows.

    A direction of singular value s is off by at most shift * t / s**2 after a pass, where t is the
    tangent of the angle between the gradient's directions and the projection so far. It loses s**2
    times the square of that, and at most all, which is the most where s**2 is shift * t.
    """
    (grad, dimensions), low_rank = of_few_dimensions(shape)[kind], LowRank(side, rank)
    known = refreshed(values(shape, 5), low_rank, None, False, seed=0)
    found = refreshed(grad, low_rank, None if is_first else known, False, seed=0)
    if is_first:
        known = sketched(low_rank, grad.shape, 0, grad.device)
    assert_captured(found, grad, dimensions, side, known)


def assert_captured(found, grad, dimensions, side, known):
    """Fails unless it is a basis that has all of so many dimensions, but for the shift's part."""
    _, _, rows = np.linalg.svd(np.float64(grad if side == RIGHT else grad.T))
    cosines = rows[:dimensions] @ np.float64(known.T if side == RIGHT else known)
    tangent = 1 / np.linalg.svd(cosines, compute_uv=False).min()
    shift = 4 * 2.0**-24 * max(grad.shape) ** 0.5
    assert_basis(found.numpy(), grad.numpy(), side, 1 - dimensions * shift * tangent)


def few_dimensions_in_bf16(shape):
    """Gradients of fewer dimensions than a rank of 6, of whole numbers and powers of two."""
    rows, columns = shape
    whole = values((rows, 5), 1).round().clamp(-2, 2) @ values((5, columns), 2).sign()
    weak = torch.zeros(shape)
    for place, size in enumerate((1.0, 1.0, 2.0**-6, 2.0**-9)):
        weak[place::4, place::4] = size
    return {"whole": (whole, 5), "weak": (weak, 4)}


@pytest.mark.parametrize("kind", few_dimensions_in_bf16((8, 8)))
@pytest.mark.parametrize("side", [RIGHT, LEFT])
@pytest.mark.parametrize(("shape", "rank"), [((40, 30), 6), SLOW_SHAPE], ids=str)
def test_a_bf16_gradient_of_few_dimensions_is_captured(shape, rank, side, kind, device):
    """Products on a GPU are of bf16 numbers; nothing of the gradient is lost by that."""
    (grad, dimensions), low_rank = few_dimensions_in_bf16(shape)[kind], LowRank(side, rank)
    assert torch.equal(grad.bfloat16().float(), grad)
    known = refreshed(values(shape, 5), low_rank, None, False, seed=0)
    own = scaled(grad.to(device, torch.bfloat16))
    found = refreshed(own, low_rank, known.to(device), False, seed=0).cpu()
    assert found.dtype == torch.float32
    assert_captured(found, grad, dimensions, side, known)
    captured = captured_energy(own, low_rank, found.to(device)).cpu()
    assert 1 - 2.0**-15 <= captured <= 1


@pytest.mark.parametrize("shape", [(6, 40, 30), (64, 1000, 96)], ids=str)
def test_products_with_bf16_matrices_are_near_those_of_fp32_numbers(shape, device):
    """Two bf16 numbers are off from one of fp32 by 2**-16 of it at most.

    A block of 16 products and a sum, each cut 25 bits behind the largest, and their sum, cut to
    fp32, are off by 17 * 2**-24 + 2**-23 of the largest, and that is at most all magnitudes' sum.
    """
    rows, terms, columns = shape
    some, others = values((rows, terms), 0), values((terms, columns), 1).bfloat16()
    found = parts_product(some.to(device), others.to(device)).cpu().double()
    some, others = some.double(), others.double()
    blocks = -(-terms // 16) + 8  # and sums over parts of the terms
    bound = (some.abs() @ others.abs()) * (2.0**-16 + blocks * 19 * 2.0**-24)
    assert bool(((found - some @ others).abs() <= bound).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_directions_that_a_gradient_lacks_stay(dtype, device):
    """Of a basis of axes, three of which a gradient has."""
    low_rank, known = LowRank(RIGHT, 6), torch.eye(6, 30)
    grad = torch.zeros(40, 30, dtype=dtype)
    grad[:, :3] = values((40, 3), 0)
    found = refreshed(grad.to(device), low_rank, known.to(device), False, seed=0).cpu()
    # but for what random numbers of 2**-52 turn them, by 2**-52 * 3 / (4 * 2**-24 * 40**0.5)
    assert (found[3:] - known[3:]).abs().max() <= 2.0**-30
    assert_basis(found.numpy(), grad.float().numpy(), RIGHT, 1 - 1e-6)


@pytest.mark.parametrize("side", [RIGHT, LEFT])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("before", [1, 2, 3, 6])
def test_a_gradient_that_moves_to_other_rows_and_columns_is_found(before, dtype, side, device):
    """Projections lose columns that are 0 within a few refreshes, to the last bit."""
    low_rank, known, shape = LowRank(side, 4), None, (64, 64)
    for step in range(before + 2):
        grad = torch.zeros(shape, dtype=dtype)
        if step < before:
            grad[:16, :16] = values((16, 16), step)
        else:
            grad[40:, 20] = values((24,), step)
        known = refreshed(scaled(grad.to(device)), low_rank, known, False, seed=3)
    assert_basis(known.cpu().numpy(), grad.float().numpy(), side, 1 - 1e-6)


@pytest.mark.parametrize("seed", range(8))
def test_a_first_gradient_of_equal_columns_is_found(seed):
    """Signs would not find it, of which a few may add up to 0."""
    grad, low_rank = torch.ones(6, 4) * torch.arange(1, 7)[:, None], LowRank(RIGHT, 1)
    found = refreshed(scaled(grad), low_rank, None, False, seed)
    assert_basis(found.numpy(), grad.numpy(), RIGHT, 1 - 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_power_of_two_shows_in_no_bit_of_a_projection(dtype, device):
    grad, low_rank = values((40, 30), 0).to(device, dtype), LowRank(RIGHT, 4)
    expected = refreshed(scaled(grad), low_rank, None, False, seed=0)
    for factor in (2.0**16, 2.0**-90, 2.0**100):
        grad_of_loss = scaled(grad * factor)
        assert_same_bits(refreshed(grad_of_loss, low_rank, None, False, seed=0), expected)


def test_sketches_are_orthonormal_also_of_few_numbers_and_differ_by_seed():
    for side, shape, rank in ((RIGHT, (9, 3), 2), (LEFT, (2, 90), 1), (RIGHT, (50, 40), 15)):
        for seed in range(20):
            low_rank = LowRank(side, rank)
            found = sketched(low_rank, torch.Size(shape), seed, torch.device("cpu"))
            assert found.shape == low_rank.projection_shape(shape)
            assert_basis(found.numpy(), np.eye(*shape), side, 0.0)
    others = [sketched(low_rank, torch.Size(shape), seed, torch.device("cpu")) for seed in (0, 1)]
    assert not torch.equal(*others)


def test_rows_that_depend_on_each_other_are_known():
    rows = values((3, 20), 0).double()
    found, is_basis = orthonormal(rows)
    assert bool(is_basis)
    eye = torch.eye(3, dtype=torch.float64)
    # in units of 2**-53: before the last step some 30 times the square of the longest combination
    # over the shortest, here 4, and behind it what is left of that, its third power; sums of 20
    # products in the step, and here, are off by 20 each. 50 of these are 5.6e-15
    torch.testing.assert_close(found @ found.mT, eye, rtol=0, atol=1e-14)
    near = rows.clone()
    near[2] = near[1] * (1 + 1e-6) + near[0] * 1e-6
    near[2, 3] += 1e-5
    # before the last step x, some 30 * 2**-53 times the square of the longest combination over the
    # shortest; (1 + x)^(-1/2) without its x^3 of 5 / 16 leaves twice that
    before = 30 * 2.0**-53 * float(torch.linalg.cond(near)) ** 2
    bound = 5 / 8 * before**3 + 50 * 2.0**-53
    assert before > 1e5 * bound
    found, is_basis = orthonormal(near)
    assert bool(is_basis)
    torch.testing.assert_close(found @ found.mT, eye, rtol=0, atol=bound)
    rows[2] = 0
    assert not bool(orthonormal(rows)[1])


def test_captured_energy_is_a_share_of_squares():
    grad, low_rank = values((40, 30), 0), LowRank(RIGHT, 4)
    basis = sketched(low_rank, grad.shape, 0, grad.device)
    true = (np.float64(grad) @ np.float64(basis).T) ** 2
    share = true.sum() / (np.float64(grad) ** 2).sum()
    # fp32 products of 30 numbers, and a quotient rounded to fp32
    assert abs(captured_energy(grad, low_rank, basis).item() - share) <= 30 * 2.0**-23 * share
    whole = basis.expand(2, 4, 30)[0]
    inside = values((40, 4), 1) @ whole
    # in units of 2**-24: products of 30 numbers by 4 columns are off by 30 * sqrt(4) of the whole's
    # norm, the basis, rounded, is orthonormal to 2 * 4, and what lies inside is rounded in sums of
    # 4; squares are off by twice that
    assert abs(captured_energy(inside, low_rank, basis).item() - 1) <= 2 * (60 + 8 + 4) * 2.0**-24
    assert captured_energy(grad * 0, low_rank, basis).isnan()
    assert captured_energy(inside, low_rank, basis * 1.001).item() == 1  # a little too long


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_no_setting_makes_a_product_less_than_fp32s(precision):
    some, others = values((64, 300), 0), values((300, 48), 1)
    expected, was = some @ others, torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision(precision)
        assert_same_bits(product(some, others), expected)
        assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision(was)
