"""The twin of a product beside a model that was written from docs/numbers.md alone."""

import numpy
import pytest
import torch
from tensor_core_model import KINDS, product

from megaopt.kernels.products.reference import product_reference

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "tf32": torch.float32}
SPECIAL = [0.0, -0.0, float("inf"), -float("inf"), float("nan")]


def spread(shape, binades, generator):
    """Normal numbers times powers of two."""
    own = torch.randn(shape, generator=generator, dtype=torch.float64)
    return own * torch.exp2(torch.randint(-binades, binades + 1, shape, generator=generator))


def with_special(values, generator, share=0.02):
    chosen = torch.tensor(SPECIAL)[
        torch.randint(0, len(SPECIAL), values.shape, generator=generator)
    ]
    return torch.where(torch.rand(values.shape, generator=generator) < share, chosen, values)


def patterns(kind, shape, generator):
    """Any bits."""
    bits = 8 * numpy.dtype(KINDS[kind][0]).itemsize
    own = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), shape, generator=generator)
    return own.to(torch.int16 if bits == 16 else torch.int32).view(DTYPES[kind])


def bits_of(value):
    is_wide = value.dtype == torch.float32
    own = value.contiguous().view(torch.int32 if is_wide else torch.int16).numpy()
    return own.view(numpy.uint32 if is_wide else numpy.uint16)


def assert_model(kind, left, right, total):
    bits = [bits_of(each) for each in (left, right, total)]
    expected = torch.from_numpy(product(*bits, kind).view(numpy.int32))
    found = product_reference(left, right, total).view(torch.int32)
    assert torch.equal(found, expected), int((found != expected).sum())


@pytest.mark.parametrize("binades", [0, 3, 10, 40])
@pytest.mark.parametrize("kind", KINDS)
def test_random_numbers(kind, binades):
    generator = torch.Generator().manual_seed(binades)
    for terms in (1, 8, 16, 17, 40):
        left, right = (spread(shape, binades, generator) for shape in ((9, terms), (terms, 11)))
        total = spread((9, 11), 3 * binades, generator)
        for special in (0.0, 0.03):
            own = [with_special(each, generator, special) for each in (left, right, total)]
            assert_model(kind, own[0].to(DTYPES[kind]), own[1].to(DTYPES[kind]), own[2].float())


@pytest.mark.parametrize("kind", KINDS)
def test_random_patterns(kind):
    generator = torch.Generator().manual_seed(7)
    for terms in (1, 8, 16, 40):
        left, right = (patterns(kind, shape, generator) for shape in ((20, terms), (terms, 20)))
        assert_model(kind, left, right, patterns("tf32", (20, 20), generator))
        finite = [torch.where(each.isfinite(), each, 1) for each in (left, right)]
        assert_model(kind, *finite, torch.zeros(20, 20))


@pytest.mark.parametrize("kind", ["bfloat16", "tf32"])
def test_products_below_all_normal_numbers(kind):
    """Where the exponent that terms are aligned to is -133 at the least."""
    generator = torch.Generator().manual_seed(3)
    for low in range(-76, -66):
        left, right = (
            torch.ldexp(spread(shape, 3, generator), torch.tensor(low)).to(DTYPES[kind])
            for shape in ((40, 16), (16, 40))
        )
        assert_model(kind, left, right, torch.zeros(40, 40))


def test_cases_of_a_hair():
    """A sum that only the floor of -133 cuts to 0; a subnormal fp16 number's exponent."""
    sixteen = torch.bfloat16
    left = torch.tensor([[255 / 128 * 2.0**-73, *[2.0**-80] * 3]]).to(sixteen)
    right = torch.tensor([[2.0**-77], [2.0**-78], [2.0**-79], [2.0**-79]]).to(sixteen)
    assert_model("bfloat16", left, right, torch.zeros(1, 1))
    assert float(product_reference(left, right)) == 0.0
    left, right = torch.full((1, 2), 2.0**-24).half(), torch.tensor([[1.0], [-1.0]]).half()
    assert_model("float16", left, right, torch.full((1, 1), 2.0**-40))
    assert float(product_reference(left, right, torch.full((1, 1), 2.0**-40))) == 0.0


def test_no_terms_are_what_was_there():
    total = torch.tensor([[-0.0, float("nan"), 1.0]])
    own = torch.empty(1, 0).bfloat16(), torch.empty(0, 3).bfloat16()
    found = product_reference(*own, total)
    assert torch.equal(found.view(torch.int32), total.view(torch.int32))
