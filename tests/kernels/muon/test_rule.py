"""Muon's rule for one matrix: the twin beside an oracle, errors against fp64, what is refused."""

import itertools
import math
from functools import cache
from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
import tensor_core_model
import torch
from bits import assert_same_bits
from muon_cases import FORMS, SIMPLE, how_of
from norm_oracle import oracle_counts, oracle_norm
from oracle import F32, add, divide, multiply, root
from torch.optim._muon import _zeropower_via_newtonschulz

from megaopt.kernels.muon.newton_schulz import begun, iterated, orthogonal, room_of
from megaopt.kernels.muon.normuon import normalized
from megaopt.kernels.muon.orthogonal import COEFFICIENTS, Orthogonal, coefficients_of
from megaopt.kernels.muon.rule import MUON
from megaopt.kernels.place import Place
from megaopt.kernels.products import launch
from megaopt.kernels.rules.matrix import Work

# An independent oracle of Muon's iteration: docs/numbers.md's "Muon" in numpy.
#
# Products are tensor_core_model's, of Python's integers; each other operation is oracle's, fp64
# rounded to fp32 once. Nothing of megaopt is used.

DTYPES = {"bf16": ("bfloat16", ml_dtypes.bfloat16), "fp16": ("float16", np.float16)}


class Numbers:
    """Products and roundings of a precision."""

    def __init__(self, precision):
        self.kind, self.dtype = DTYPES[precision]

    def rounded(self, value):
        with np.errstate(all="ignore"):
            own = np.ascontiguousarray(value.astype(self.dtype))
        own.view(np.uint16)[np.isnan(value)] = 0x7FFF
        return own

    def product(self, left, right):
        own = [np.ascontiguousarray(each).view(np.uint16) for each in (left, right)]
        oracle_begun = np.zeros((len(left), right.shape[1]), np.uint32)
        return tensor_core_model.product(*own, oracle_begun, self.kind).view(F32)

    def made(self, left, right, alpha=1.0, added=None, beta=1.0, diagonal=None, scale=None):
        value = multiply(self.product(left, right), F32(alpha))
        if added is not None:
            value = add(value, multiply(added.astype(F32), F32(beta)))
        if diagonal is not None:
            value = np.where(np.eye(len(value)) == 1, add(value, F32(diagonal)), value)
        return self.rounded(value if scale is None else multiply(value, scale))

    def symmetric(self, left, right, **others):
        """What is below the diagonal, above it too."""
        own = self.made(left, right, **others)
        return np.where(np.tri(len(own)) == 1, own, own.T)


def norm_of(values, eps):
    own = F32(oracle_norm(oracle_counts(torch.from_numpy(values.astype(F32).flatten()))))
    return max(own, F32(eps))


def oracle_begun(u, precision, eps):
    """What the iteration begins with, and its norm."""
    if precision == "bf16":
        x = u.astype(ml_dtypes.bfloat16)
        return x, norm_of(x, eps)
    norm = norm_of(u, eps)
    power = F32(2.0 ** (14 - np.floor(np.log2(np.float64(norm)))))
    return multiply(u, power).astype(np.float16), multiply(norm, power)


def oracle_orthogonal(u, form, precision, coefficients, eps, ratio, restarts):
    """O of u, fp32 [m, n]."""
    numbers = Numbers(precision)
    x, norm = oracle_begun(u, precision, eps)
    tall = len(x) > x.shape[1]
    x = x.T if tall else x
    inverse = divide(F32(1), norm)
    first, last = inverse, F32(ratio)
    make = gram if form == "gram" else standard
    made = make(numbers, x, coefficients, multiply(inverse, inverse), first, last, restarts)
    return made.T if tall else made


def standard(numbers, x, coefficients, square, first, last, restarts):
    for step, (a, b, c) in enumerate(coefficients):
        is_first, is_last = step == 0, step == len(coefficients) - 1
        A = numbers.made(x, x.T, scale=square if is_first else None)
        scale = factor(first, last, is_first, is_last)
        if c:
            B = numbers.made(A, A, c, A, b)
            x = numbers.made(B, x, added=x, beta=a, scale=scale)
        else:
            x = numbers.made(A, x, b, x, a, scale=scale)
    return x


def factor(first, last, is_first, is_last):
    if is_first and is_last:
        return multiply(first, last)
    return first if is_first else last if is_last else None


def gram(numbers, x, coefficients, square, first, last, restarts):
    is_begun, count, R, Q = False, len(coefficients), None, None
    for step, (a, b, c) in enumerate(coefficients):
        is_new = step == 0 or step in restarts
        if is_new and step:
            x = numbers.made(Q, x, scale=None if is_begun else first)
            is_begun = True
        if is_new:
            R = numbers.made(x, x.T, scale=None if step else square)
        W = numbers.symmetric(R, R, alpha=c, added=R, beta=b, diagonal=a)
        Q = W if is_new else numbers.symmetric(Q, W)
        if step + 1 < count and step + 1 not in restarts:
            R = numbers.symmetric(W, numbers.symmetric(R, W))
    return numbers.made(Q, x, scale=factor(first, last, not is_begun, True))


def lane_sum(values):
    """The sums of the last dimension, by 256 lanes."""
    padded = np.zeros((*values.shape[:-1], -(-values.shape[-1] // 256) * 256), F32)
    padded[..., : values.shape[-1]] = values
    lanes = np.zeros((*values.shape[:-1], 256), F32)
    for block in np.split(padded, max(padded.shape[-1] // 256, 1), axis=-1):
        lanes = add(lanes, block)
    while lanes.shape[-1] > 1:
        lanes = add(lanes[..., 0::2], lanes[..., 1::2])
    return lanes[..., 0]


def normuon(update, v, beta2, ratio):
    """The update of second moments, of the update's dtype, and the new v."""
    wide = update.astype(F32)
    s = lane_sum(multiply(wide, wide))
    t = divide(s, F32(update.shape[1]))
    v = add(multiply(v, F32(beta2)), multiply(t, F32(1.0 - beta2)))
    r = add(root(v), F32(1e-8))
    w, y = root(lane_sum(s)), root(lane_sum(divide(s, multiply(r, r))))
    z = multiply(divide(w, max(y, F32(1e-8))), F32(ratio))
    return multiply(wide, divide(z, r)[:, None]).astype(update.dtype), v


SHAPES = [(5, 20), (20, 5), (7, 7), (1, 17), (17, 1)]


def random(shape, seed=0, scale=1e-3):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def updated(matrix, how, kept=None):
    """What the rule makes of a direction."""
    return MUON.after.run(matrix, Work(how, Place(0), kept or {}))


# --- bits


@pytest.mark.sample(7)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_the_twin_is_the_oracle(form, shape):
    method, precision = form.split()
    for seed, (steps, name) in enumerate(
        [(1, "simple"), (2, "cubic"), (5, "quintic"), (8, "cans")]
    ):
        polynomials = [(3.0, -3.0, 0.0)] * 2 if name == "cubic" else name
        coefficients = coefficients_of(polynomials, steps)
        how = how_of(form, coefficients=coefficients, adjust=1.5, eps=1e-3 if seed == 2 else 1e-7)
        direction = random(shape, seed, 10.0 ** (4 * seed - 7))
        own = (method, precision, coefficients, how.eps, 1.5, how.restarts)
        expected = oracle_orthogonal(direction.numpy(), *own).astype(np.float32)
        found = orthogonal(direction, how).float()
        assert_same_bits(found, torch.from_numpy(np.ascontiguousarray(expected)), f"{name}")


@pytest.mark.parametrize("form", FORMS)
def test_small_numbers_beside_large_ones(form):
    """Numbers that fp16 has only of a norm that is brought to [2**14, 2**15)."""
    direction = random((4, 24), 3) * 10.0 ** (-torch.arange(24.0) / 4)
    method, precision = form.split()
    how = how_of(form, coefficients=SIMPLE[:2], adjust=1.0)
    own = (method, precision, SIMPLE[:2], how.eps, 1.0, how.restarts)
    expected = oracle_orthogonal(direction.numpy(), *own).astype(np.float32)
    assert_same_bits(orthogonal(direction, how).float(), torch.from_numpy(expected))


@pytest.mark.parametrize(
    ("steps", "products"), [(1, {False: 3, True: 3}), (5, {False: 15, True: 18})]
)
def test_how_many_products_there_are(steps, products):
    """Of five steps 18 in Gram's form, of which 14 are of the shorter side alone."""
    for form in FORMS:
        how, is_gram = how_of(form, coefficients=SIMPLE[:1] * steps), form.startswith("gram")
        first, scales = begun(random((6, 10)), how)
        counted = Counted()
        iterated(room_of([first], is_gram), scales, how, is_gram, counted)
        assert counted.count == products[is_gram]


class Counted:
    """Counts the products that it makes."""

    count = 0

    def products(self, *matrices, **options):
        self.count += 1
        launch.products(*matrices, **options)

    def symmetric_products(self, *matrices, **options):
        self.count += 1
        launch.symmetric_products(*matrices, **options)


def test_second_moments_are_the_oracles():
    for dtype, numbers in ((torch.bfloat16, ml_dtypes.bfloat16), (torch.float16, np.float16)):
        for shape in ((3, 600), (600, 3), (1, 1)):
            update, v = random(shape, 1, 0.1).to(dtype), random(shape[:1], 2).abs()
            own = update.float().numpy().astype(numbers)
            expected, after = normuon(own, v.numpy(), 0.9, 0.2)
            found = normalized(update, v, 0.9, 0.2)
            wanted = torch.from_numpy(expected.astype(np.float32)).to(dtype)
            assert_same_bits(found, wanted, f"{dtype} {shape}")
            assert_same_bits(v, torch.from_numpy(after), f"{dtype} {shape}")


@pytest.mark.parametrize("form", FORMS)
def test_a_tall_matrix_is_the_wide_one_turned(form):
    how = how_of(form, adjust=1.0)
    matrix = random((24, 70))
    assert_same_bits(updated(matrix.mT.contiguous(), how), updated(matrix, how).mT)


@pytest.mark.parametrize("shape", [(24, 22), (2, 24, 22), (24, 2, 11, 1), (8, 22)])
def test_sizes_that_come_again_are_pieces_put_together(shape):
    """As q, k and v of each query group in turn."""
    how, alone = how_of(split_sizes=(5, 1, 2), adjust="original"), how_of(adjust="original")
    matrix, firsts = random(shape), (0, 5, 6, 8)
    found = updated(matrix, how).view(-1, 22)
    per_matrix = 8 if shape[0] == 8 else 24
    pieces, count = how.pieces(shape), matrix.numel() // 22 // per_matrix
    assert len(pieces) == 3 * count
    for number, own in enumerate(matrix.view(count, per_matrix, 22)):
        for place, (begin, end) in enumerate(pairwise(firsts)):
            rows = [r for r in range(per_matrix) if begin <= r % 8 < end]
            assert pieces[3 * number + place] == (len(rows), 22)
            update = found[[number * per_matrix + r for r in rows]]
            assert_same_bits(update, updated(own[rows], alone))


@pytest.mark.parametrize("second_moment", [None, "normuon"])
def test_pieces_are_matrices_alone(second_moment):
    """Batches of three dimensions, convolutions of four, rows split in each."""
    how = how_of(split_sizes=(4, 9), second_moment=second_moment, adjust="match_rms_adamw")
    alone = how_of(second_moment=second_moment, adjust="match_rms_adamw")
    for shape, count in (((13, 22), 1), ((3, 13, 22), 3), ((13, 2, 11, 1), 1)):
        matrix, kept = random(shape), torch.rand(13 * count)
        before = kept.clone()
        found = updated(matrix, how, {"variance_neuron": kept})
        assert found.shape == shape
        rows = 0
        for piece, own in zip(
            matrix.view(-1, 22).split([4, 9] * count),
            found.view(-1, 22).split([4, 9] * count),
            strict=True,
        ):
            moment = before[rows : rows + len(piece)].clone()
            rows += len(piece)
            assert_same_bits(own, updated(piece, alone, {"variance_neuron": moment}))
            if second_moment:
                assert_same_bits(kept[rows - len(piece) : rows], moment)


def test_a_ratio_is_in_the_last_product_alone():
    """A power of two changes exponents alone."""
    for form in FORMS:
        one, other = (updated(random((12, 20)), how_of(form, adjust=r)) for r in (1.0, 4.0))
        assert_same_bits(one * 4, other)
    for name, ratio in (("original", math.sqrt(1.25)), ("spectral", math.sqrt(20))):
        matrix = random((20, 16))
        assert_same_bits(
            updated(matrix, how_of(adjust=name)), updated(matrix, how_of(adjust=ratio))
        )


# --- numbers


def in_fp64(matrix, coefficients):
    own = matrix.double()
    own = own.mT if len(own) > own.shape[1] else own
    own = own / own.norm()
    for a, b, c in coefficients:
        gram = own @ own.mT
        own = a * own + (b * gram + c * gram @ gram) @ own
    return own.mT if len(matrix) > matrix.shape[1] else own


def decaying(shape, decades, seed=0):
    """A matrix whose singular values span so many decades."""
    left, _, right = torch.linalg.svd(random(shape, seed), full_matrices=False)
    return left @ torch.diag(10.0 ** torch.linspace(0, -decades, min(shape))) @ right


PARTS = {"standard bf16": 1.0, "standard fp16": 1 / 8, "gram fp16": 1.0}
"""fp16 rounds to three bits more than bf16, an eighth of the error."""


@cache
def beside_torch(seed, shape, decades):
    """A matrix, its update in fp64, and the square of the error of torch's, relative."""
    matrix = decaying(shape, decades, seed) if decades else random(shape, seed)
    wanted = in_fp64(matrix, SIMPLE)
    torchs = _zeropower_via_newtonschulz(matrix, SIMPLE[0], 5, 1e-7)
    return matrix, wanted, relative_square(torchs, wanted)


def relative_square(found, wanted):
    return float((found.double() - wanted).square().sum() / wanted.square().sum())


@pytest.mark.sample(3)
@pytest.mark.parametrize(("decades", "count"), [(None, 40), (4, 10)], ids=["random", "decaying"])
@pytest.mark.parametrize("form", FORMS)
def test_errors_against_fp64(form, decades, count):
    """In the mean of squares over matrices, at most those of torch.optim.Muon's own iteration, or
    the part of these that the precision has.

    Both round after each product, torch also the norm and what it divides by it: so ours are less
    in the mean, of one matrix they may be more.
    """
    shapes, own, theirs = [(64, 96), (96, 64), (40, 160), (72, 72)], 0.0, 0.0
    for seed, shape in itertools.product(range(count), shapes):
        matrix, wanted, torchs = beside_torch(seed, shape, decades)
        own += relative_square(updated(matrix, how_of(form, adjust=1.0)), wanted)
        theirs += torchs
    assert own <= PARTS[form] ** 2 * theirs


@pytest.mark.parametrize("form", FORMS)
def test_edges(form):
    """Zeros, and what is beside: a number, a row, a column, one direction, eps."""
    how = how_of(form, adjust=1.0)
    assert not updated(torch.zeros(9, 20), how).any()
    (scale,) = in_fp64(torch.ones(1, 1), SIMPLE).view(-1).tolist()
    for shape in ((1, 1), (1, 30), (30, 1)):
        matrix = random(shape)
        own = updated(matrix, how)
        wanted = matrix / matrix.norm() * scale
        # five steps of a few roundings of 2**-9 each, of which the last count most
        assert (own - wanted).norm() <= 0.05 * wanted.norm()
    one = torch.outer(random((12,), 1), random((20,), 2))
    largest = torch.linalg.svdvals(updated(one, how).double())[0]
    assert abs(largest - scale) <= 0.05
    small = random((6, 10), scale=1e-12)
    # x is rounded at first and after each step, in bf16 by a part of 2**-8 at most; what a step
    # adds to a x, up to 2e-4 of it, takes some away, as b < 0, and is off by a part of 2**-7
    grown = (3.4445 * (1 + 2**-8) * (1 + 2e-6)) ** 5 * (1 + 2**-8)
    assert updated(small, how).norm() <= grown * small.norm() / how.eps


def test_no_number_of_fp16_overflows_and_few_are_lost():
    for scale in (1e-6, 1.0, 1e30):
        for form in ("standard fp16", "gram fp16"):
            matrix = random((20, 40), scale=scale)
            own = updated(matrix, how_of(form, adjust=1.0)).double()
            wanted = in_fp64(matrix, SIMPLE)
            assert (own - wanted).norm() <= 0.02 * wanted.norm()


@pytest.mark.parametrize("form", FORMS)
def test_nan_and_infinities(form):
    for value in (math.nan, math.inf):
        matrix = random((6, 10))
        matrix[2, 3] = value
        assert updated(matrix, how_of(form)).isnan().any()


# --- what is chosen, and what is refused


def test_auto_goes_by_shape_and_precision():
    cases = {(256, 4096): False, (257, 4096): True, (4096, 1024): True, (1000, 1499): False}
    for shape, is_gram in cases.items():
        assert Orthogonal(SIMPLE, precision="fp16").is_gram(shape) == is_gram
        assert not Orthogonal(SIMPLE).is_gram(shape)


def test_coefficients():
    assert coefficients_of((1, 2, 3), 2) == ((1.0, 2.0, 3.0),) * 2
    assert coefficients_of([(1, 2, 3), (4, 5, 6), (7, 8, 9)], 2) == ((1, 2, 3), (4, 5, 6))
    for name in ("polar_express", "cans", "deepseekv4"):
        own = COEFFICIENTS[name]
        assert coefficients_of(name, len(own) + 2) == (*own, own[-1], own[-1])
    assert coefficients_of("quintic", 7) == (*COEFFICIENTS["quintic"], *COEFFICIENTS["quintic"][:2])


REFUSED = {
    "ns_steps must be a whole number from 1 to 99, got 100": lambda: coefficients_of("simple", 100),
    "ns_steps must be 5 with ns_coefficients='cubic5', got 4": lambda: coefficients_of("cubic5", 4),
    "ns_coefficients must be numbers or one of .*, got 'aol'": lambda: coefficients_of("aol", 5),
    "ns_coefficients must have a triple for each of 3 steps, got 1": (
        lambda: coefficients_of([(1, 2, 3)], 3)
    ),
    "ns_coefficients must be triples of numbers": lambda: coefficients_of([(1, 2)], 1),
    "method='gram' must have precision='fp16'": lambda: how_of(method="gram"),
    "eps must be from 1e-30 to 1, got 0": lambda: how_of(eps=0),
    "adjust_lr_fn must be one of None, 'original'": lambda: how_of(adjust="muon"),
    "adjust_lr_fn must be one of None, 'original', .* number >= 0, got -1": lambda: how_of(
        adjust=-1
    ),
    "adjust_lr_fn must be from .* with precision='fp16'": (
        lambda: how_of("standard fp16", adjust=1e-3)
    ),
    "split_sizes must add up to 9 rows, or to a part": (
        lambda: how_of(split_sizes=(4, 4)).pieces((9, 3))
    ),
    "split_sizes must add up to 8 rows with second_moment='normuon'": (
        lambda: how_of(split_sizes=(3, 1), second_moment="normuon").pieces((8, 3))
    ),
    r"must have two dimensions or more, got \[9\]": lambda: how_of().pieces((9,)),
    "precision must be 'bf16' with contract='torch', got 'fp16'": (
        lambda: how_of("standard fp16", contract="torch")
    ),
    "adjust_lr_fn must be one of None, 'original', 'match_rms_adamw' with con": (
        lambda: how_of(adjust="spectral", contract="torch")
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refusals(message):
    with pytest.raises(ValueError, match=message):
        REFUSED[message]()
