"""Products on a card: tensor cores' bits are the twin's, and cuBLAS's where it does not split K."""

import random

import pytest
import torch
from bits import assert_same_bits
from product_cases import (
    DTYPES,
    added_to,
    assert_all_same,
    assert_kernel_is_twin,
    lists,
    odd,
    with_special_rows,
)

from megaopt.kernels.products.launch import products, symmetric_products
from megaopt.kernels.products.tables import TILES, Tables

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0),
        reason="the bits are those of Hopper",
    ),
]
SPREADS = (0, 2, 5, 10, 20, 40)


def random_shape(chance, most=512):
    """Every second one of whole 16 bytes, for tensor descriptors."""
    unit = chance.choice((1, 8))
    return tuple(unit * chance.randint(1, most // unit) for _ in range(3))


def case(number, count):
    """A list of matrices of random shapes, a spread, special rows, and what else goes with it."""
    chance = random.Random(number)
    dtype = DTYPES[number % 3]
    shapes = [random_shape(chance) for _ in range(count)]
    left, right = lists(shapes, dtype, number, chance.choice(SPREADS), "cuda")
    if number % 2:
        left = with_special_rows(left, number)
    if number % 5 == 0:
        right = [odd(each) for each in right]
    # few kinds of launches: each is compiled
    out_dtype = (dtype, torch.float32, torch.bfloat16)[number // 3 % 3]
    options = {"alpha": chance.choice((1.0, -0.7, 2.0**-20)), "out_dtype": out_dtype}
    if number // 3 % 3 == 0:
        options |= {"add": added_to(shapes, out_dtype, number, "cuda"), "beta": 1 / 3}
    return left, right, options


@pytest.mark.parametrize("number", range(200))
def test_a_random_product_is_the_twins(number):
    left, right, options = case(number, 1)
    assert_kernel_is_twin(products, left, right, **options)


@pytest.mark.parametrize("number", range(1000, 1060))
def test_a_random_list_is_the_twins(number):
    left, right, options = case(number, 2 + number % 7)
    assert_kernel_is_twin(products, left, right, **options)


@pytest.mark.parametrize("number", range(2000, 2060))
def test_random_symmetric_products_are_the_twins(number):
    left, _, options = case(number, 1 + number % 4)
    options.pop("add", None)
    assert_kernel_is_twin(symmetric_products, left, **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_tile_makes_the_twins_bits(dtype):
    """More tiles than processors, of several matrices: descriptors are made anew in between.

    Three lie equally far apart, and share theirs.
    """
    shapes = [(2048, 1536, 96), (1000, 2056, 64), *[(1032, 1536, 160)] * 3]
    left, right = lists(shapes, dtype, device="cuda")
    left[2:], right[2:] = torch.stack(left[2:]), torch.stack(right[2:])
    out = {"out_dtype": torch.bfloat16}
    full = assert_kernel_is_twin(products, left, right, **out)
    symmetric = assert_kernel_is_twin(symmetric_products, left, **out)
    for tile in TILES:
        assert_all_same(products(left, right, tile=tile, **out), full)
        if tile.columns in (tile.rows, 2 * tile.rows):
            assert_all_same(symmetric_products(left, tile=tile, **out), symmetric)


def test_the_same_bits_on_every_run():
    left, right = lists([(4096, 4096, 512)] * 3, torch.bfloat16, device="cuda")
    first = products(left, right)
    for _ in range(20):
        for pair in zip(products(left, right), first, strict=True):
            assert torch.equal(*pair)


def test_a_graph_replays_them():
    shapes, tables = [(512, 256, 128), (96, 264, 512)], Tables()
    left, right = lists(shapes, torch.bfloat16, device="cuda")
    out = products(left, right, tables=tables)
    expected = [each.clone() for each in out]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        products(left, right, out, tables=tables)
        with pytest.raises(ValueError, match="tables must be given"):
            products(left, right, out)
    products(*lists(shapes, torch.bfloat16, 4, device="cuda"), tables=tables)  # the graph's stay
    for each in out:
        each.zero_()
    graph.replay()
    assert_all_same(out, expected)


# of which cuBLAS splits no K: a wave of its tiles and more, or seen on an H200
CUBLAS = (
    (4096, 4096, 4096), (4096, 4096, 14336), (1024, 1024, 4096), (768, 768, 3072), (768, 768, 768),
    (2048, 1408, 1408), (4096, 14336, 4096), (14336, 4096, 4096), (4096, 11008, 4096),
    (11008, 4096, 4096), (2048, 8192, 2048), (8192, 2048, 2048), (4096, 4096, 1024),
    (3072, 3072, 768), (8192, 8192, 1024),
)  # fmt: skip


@pytest.mark.parametrize("shape", CUBLAS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_cublas_has_the_same_bits(dtype, shape):
    m, n, k = shape
    left, right = lists([shape], dtype, seed=4, device="cuda")
    assert left[0].is_contiguous()
    assert right[0].is_contiguous()
    (found,) = products(left, right, out_dtype=torch.float32)
    assert_same_bits(found, torch.mm(left[0], right[0], out_dtype=torch.float32), f"{m}x{n}x{k}")
