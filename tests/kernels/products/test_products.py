"""Products of lists of matrices: the kernel's bits are the twin's, whatever lies beside them."""

import ctypes
import itertools
import mmap

import ml_dtypes
import numpy
import pytest
import torch
from bits import assert_same_bits
from product_cases import (
    DTYPES,
    SHAPES,
    added_to,
    assert_all_same,
    assert_kernel_is_twin,
    lists,
    odd,
    with_special_rows,
)

from megaopt.kernels.products.epilogue import finished_reference
from megaopt.kernels.products.launch import products, symmetric_products
from megaopt.kernels.products.tables import TILES, ProductTile, Tables

# Memory in two regions of the address space that are further apart than a descriptor's stride.
#
# A card's driver gives out such addresses now and then: on two H200s with NCCL 0x4a... and 0x7fb...

APART = 1 << 41
"""Bytes between the two, of which a stride has fewer than half as many at most."""
_addresses = itertools.count(1 << 44, 1 << 43)
"""Where host memory is asked for."""


def far_apart(like):
    """Two tensors of the shape, dtype and device of one, 2^40 bytes apart or more.

    Their memory stays until the process ends.
    """
    found = _on_card(like) if like.is_cuda else _on_host(like)
    assert found[1].data_ptr() - found[0].data_ptr() >= 1 << 40
    return found


def _on_host(like):
    first = next(_addresses)
    return [_mapped(address, like) for address in (first, first + APART)]


def _mapped(address, like):
    size = -(-like.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    place = libc.mmap(address, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    assert place not in (None, ctypes.c_void_p(-1).value), ctypes.get_errno()
    numbers = (ctypes.c_uint8 * size).from_address(place)
    return (
        torch.frombuffer(numbers, dtype=torch.uint8)[: like.nbytes]
        .view(like.dtype)
        .view(like.shape)
    )


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    """CUmemAllocationProp: memory of a card, pinned there."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("metadata", ctypes.c_void_p),
        ("flags", ctypes.c_uint8 * 8),
    )


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class _Numbers:
    def __init__(self, address, size):
        self.__cuda_array_interface__ = {
            "data": (address, False), "shape": (size,), "typestr": "|u1", "version": 3,
        }  # fmt: skip


def _on_card(like):
    """Addresses are reserved for all between the two, and memory for these alone."""
    driver, index = ctypes.CDLL("libcuda.so.1"), like.device.index or 0

    def call(name, *arguments):
        code = getattr(driver, name)(*arguments)
        assert code == 0, f"{name} says {code}"

    location = _Location(1, index)  # CU_MEM_LOCATION_TYPE_DEVICE
    properties = _Properties(1, 0, location, None)  # CU_MEM_ALLOCATION_TYPE_PINNED
    access = _Access(location, 3)  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    unit, first, zero = ctypes.c_size_t(), ctypes.c_uint64(), ctypes.c_uint64(0)
    call("cuMemGetAllocationGranularity", ctypes.byref(unit), ctypes.byref(properties), 0)
    size = ctypes.c_size_t(-(-like.nbytes // unit.value) * unit.value)
    whole = ctypes.c_size_t(APART + size.value)
    call("cuMemAddressReserve", ctypes.byref(first), whole, ctypes.c_size_t(0), zero, zero)
    found = []
    for address in (first.value, first.value + APART):
        place, handle = ctypes.c_uint64(address), ctypes.c_uint64()
        call("cuMemCreate", ctypes.byref(handle), size, ctypes.byref(properties), zero)
        call("cuMemMap", place, size, ctypes.c_size_t(0), handle, zero)
        call("cuMemSetAccess", place, size, ctypes.byref(access), ctypes.c_size_t(1))
        numbers = torch.as_tensor(_Numbers(address, like.nbytes), device=like.device)
        found.append(numbers.view(like.dtype).view(like.shape))
    return found


SMALL, SQUARE = ProductTile(32, 64, 4, 1), ProductTile(32, 32, 4, 1)
FEW = ((1, 1, 1), (33, 70, 40), (64, 64, 32), (24, 40, 72))
"""As SHAPES, of fewer tiles."""


@pytest.mark.sample(9)
@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_kernel_is_the_twin(dtype, out_dtype, device):
    left, right = lists(SHAPES, dtype, device=device)
    added = added_to(SHAPES, out_dtype, device=device)
    options = {"add": added, "alpha": -0.7, "beta": 1 / 3, "out_dtype": out_dtype}
    assert_kernel_is_twin(products, left, right, tile=SMALL, **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_how_matrices_lie_in_memory_shows_in_no_bit(dtype, device):
    """By tensor descriptors and by pointers, row by row and column by column."""
    shapes = [(48, 40, 72)] * 4
    left, right = lists(shapes, dtype, device=device)
    found = assert_kernel_is_twin(products, left, right, tile=SMALL)
    for change in (odd, torch.Tensor.contiguous, lambda each: each.mT.contiguous().mT):
        own = map(change, left), map(change, right)
        assert_all_same(products(*map(list, own), launches=True, tile=SMALL), found)


@pytest.mark.parametrize("place", ["left", "right", "out"])
def test_matrices_lie_in_two_regions_of_the_address_space(place, device):
    """Further apart than the stride of a tensor descriptor can say."""
    left, right = lists([(48, 40, 72)] * 8, torch.bfloat16, device=device)
    # pairs whose matrices lie one behind another
    matrices = {"left": torch.stack(left[::4]), "right": torch.stack(right[::4])}
    matrices = {name: list(pair.unbind()) for name, pair in matrices.items()}
    matrices["out"] = list(torch.empty(2, 48, 40, dtype=torch.bfloat16, device=device).unbind())
    products(**matrices, launches=False)
    expected = [each.clone() for each in matrices["out"]]
    apart = far_apart(matrices[place][0])
    matrices[place] = [new.copy_(old) for new, old in zip(apart, matrices[place], strict=True)]
    products(**matrices, launches=True, tile=SMALL)
    assert_all_same(matrices["out"], expected)


def test_the_tile_shows_in_no_bit(device):
    left, right = lists(SHAPES, torch.bfloat16, device=device)
    found = assert_kernel_is_twin(products, left, right, tile=SMALL)
    for tile in (SQUARE, TILES[-1], None):
        assert_all_same(products(left, right, launches=True, tile=tile), found)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_special_values_stay_in_their_rows(dtype, device):
    left, right = lists(FEW * 3, dtype, spread=20, device=device)
    plain = products(left, right, launches=True, tile=SMALL)
    special = with_special_rows(left)
    found = assert_kernel_is_twin(products, special, right, tile=SMALL)
    for index, (one, other) in enumerate(zip(plain, found, strict=True)):
        row = index % len(one)
        keep = [i for i in range(len(one)) if index % 3 == 0 or i != row]
        assert_same_bits(other[keep], one[keep], f"product {index}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_nan_of_a_result_is_one(dtype, device):
    """Those of matrices, of what is added, and those that infinities make."""
    one = torch.ones(16, 16, device=device)
    added = one.clone()
    payloads = torch.tensor([0x7F812345, -0x3EDCBB], dtype=torch.int32).view(torch.float32)
    added[0, :2] = payloads.to(device)
    added[1, 0] = -torch.inf
    left = one.clone()
    left[1, 0] = torch.inf
    options = {"add": [added], "out_dtype": dtype}
    (found,) = assert_kernel_is_twin(products, [left.bfloat16()], [one.bfloat16()], **options)
    wanted = 0x7FFFFFFF if dtype == torch.float32 else 0x7FFF
    patterns = found[found.isnan()].view(torch.int32 if found.element_size() == 4 else torch.int16)
    assert patterns.tolist() == [wanted] * 3


def test_a_list_in_another_order_has_the_same_bits(device):
    left, right = lists(SHAPES, torch.float16, spread=10, device=device)
    order = [3, 0, 5, 2, 4, 1]
    found = products([left[i] for i in order], [right[i] for i in order], launches=True, tile=SMALL)
    each = products(left, right, launches=True, tile=SMALL)
    assert_all_same(found, [each[i] for i in order])


# --- the epilogue


@pytest.mark.parametrize(
    ("dtype", "numbers"),
    [
        (torch.float32, numpy.float32),
        (torch.bfloat16, ml_dtypes.bfloat16),
        (torch.float16, numpy.float16),
    ],
)
def test_each_operation_of_the_epilogue_is_rounded_once(dtype, numbers):
    """As numpy and ml_dtypes round; nothing is contracted."""
    generator = numpy.random.default_rng(0)
    exponents = numpy.exp2(generator.integers(-30, 16, (2, 40_000))).astype(numpy.float32)
    total, added = generator.standard_normal((2, 40_000), numpy.float32) * exponents
    alpha, beta = 1.1, -0.3
    value = total * numpy.float32(alpha) + added * numpy.float32(beta)
    with numpy.errstate(over="ignore"):
        expected = value.astype(numbers).astype(numpy.float32)
    one, other = torch.from_numpy(total), torch.from_numpy(added)
    found = finished_reference(one, alpha, dtype, other, beta).float()
    assert_same_bits(found, torch.from_numpy(expected))


def test_what_is_added_may_be_where_results_go(device):
    left, right = lists(SHAPES[:4], torch.bfloat16, device=device)
    out = added_to(SHAPES[:4], torch.bfloat16, device=device)
    options = {"add": out, "beta": 0.5, "tile": SMALL}
    expected = assert_kernel_is_twin(products, left, right, **options)
    products(left, right, out, launches=True, **options)
    assert_all_same(out, expected)


def test_nothing_beside_a_result_is_written(device):
    """A part of a larger matrix, on whose rows tiles end, at whole 16 bytes and not."""
    left, right = lists([(40, 56, 24)], torch.bfloat16, device=device)
    (expected,) = assert_kernel_is_twin(products, left, right, tile=SMALL)
    for first in (8, 3):
        room = torch.full((60, 96), 7.0, dtype=torch.bfloat16, device=device)
        out = room[first : first + 40, first : first + 56]
        products(left, right, [out], launches=True, tile=SMALL)
        assert_same_bits(out, expected)
        out.fill_(7.0)
        assert bool((room == 7.0).all())


@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
def test_a_diagonal_and_a_factor_of_each_product(out_dtype, device):
    """Behind what is added, in this order, and before the only rounding to the result's dtype."""
    left, right = lists(SHAPES, torch.bfloat16, device=device)
    added = added_to(SHAPES, torch.bfloat16, device=device)
    scale = torch.tensor([0.3, 1e-3, 7.0, -1.1, 1.0, 3e38], device=device)
    options = {"alpha": 0.7, "beta": -1.3, "diagonal": 1 / 3}
    found = products(
        left, right, add=added, scale=scale, out_dtype=out_dtype, launches=True, tile=SMALL,
        **options,
    )  # fmt: skip
    wide = products(left, right, out_dtype=torch.float32, launches=False)
    for index, (one, total, other) in enumerate(zip(found, wide, added, strict=True)):
        unit = torch.eye(*total.shape, device=device)
        numbers = [torch.tensor(number) for number in options.values()]
        value = total * numbers[0] + other.float() * numbers[1]
        value = torch.where(unit == 1, value + numbers[2], value) * scale[index]
        assert_same_bits(one, value.to(out_dtype), f"product {index}")


# --- symmetric ones


@pytest.mark.sample(2)
@pytest.mark.parametrize("tile", [SQUARE, SMALL], ids=["square", "two squares"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_symmetric_products_are_products(dtype, tile, device):
    """Rows of special values too; they are symmetric to the bit, by the twin as by the kernel."""
    shapes = [(min(m, 64), min(m, 64), k) for m, _, k in SHAPES]
    matrices = with_special_rows(lists(shapes, dtype, spread=12, device=device)[0])
    added = [one + one.mT for one in added_to(shapes, dtype, device=device)]
    options = {"add": added, "alpha": 0.3, "beta": -1.7, "tile": tile}
    turned = [each.mT for each in matrices]
    whole = assert_kernel_is_twin(products, matrices, turned, **options)
    found = assert_kernel_is_twin(symmetric_products, matrices, **options)
    assert_all_same(found, whole)
    assert_all_same([each.mT for each in found], whole)


@pytest.mark.parametrize("size", [(40, 1), (1, 40), (1, 1)], ids=str)
def test_a_matrix_of_one_row_or_column(size, device):
    """Of which strides do not say how it lies in memory."""
    own = torch.arange(1.0, 1 + max(size)).view(size).to(device, torch.bfloat16)
    for matrix in (own, own.mT.contiguous().mT):
        assert_kernel_is_twin(symmetric_products, [matrix], tile=SQUARE)
        assert_kernel_is_twin(products, [matrix], [matrix.mT], tile=SMALL)


def test_a_polynomial_of_a_symmetric_matrix(device):
    """beta A + alpha A^2, where A is what is added, too, and lies in its own transposed memory."""
    (one,), _ = lists([(80, 80, 80)], torch.bfloat16, device=device)
    own = one + one.mT
    options = {"add": [own], "alpha": 0.25, "beta": 3.0, "tile": SQUARE}
    expected = assert_kernel_is_twin(products, [own], [own], **options)
    assert_all_same(symmetric_products([own], launches=True, **options), expected)


@pytest.mark.parametrize("tile", [SQUARE, SMALL], ids=["square", "two squares"])
def test_what_is_added_may_be_where_symmetric_results_go(tile, device):
    matrices, _ = lists([(72, 72, 24), (72, 72, 40)], torch.bfloat16, device=device)
    out = [one + one.mT for one in added_to([(72, 72, 24)] * 2, torch.bfloat16, device=device)]
    options = {"add": out, "beta": 0.5, "tile": tile}
    expected = assert_kernel_is_twin(symmetric_products, matrices, **options)
    symmetric_products(matrices, out, launches=True, **options)
    assert_all_same(out, expected)


@pytest.mark.parametrize("apart", [0, 3, 8])
def test_matrices_that_are_equally_far_apart(apart, device):
    """Of which one descriptor does, beside one that lies elsewhere, in any order."""
    shapes = [(24, 40, 56)] * 5
    left, right = lists(shapes, torch.bfloat16, device=device)
    room = torch.zeros(5, 24 * 56 + apart, dtype=torch.bfloat16, device=device)
    placed = [row[: 24 * 56].view(24, 56) for row in room]
    for own, each in zip(placed, left, strict=True):
        own.copy_(each)
    placed[3] = left[3].clone()
    stacked = list(torch.stack(right))
    found = assert_kernel_is_twin(products, left, right, tile=SMALL)
    for order in (range(5), (4, 2, 0, 1, 3)):
        own = ([placed[i] for i in order], [stacked[i] for i in order])
        again = products(*own, launches=True, tile=SMALL)
        assert_all_same(again, [found[i] for i in order])


@pytest.mark.parametrize("size", [1, 33, 96])
def test_what_is_below_the_diagonal_of_two_matrices_stands_above_it(size, device):
    """Whatever the tile: such products are not symmetric to the bit themselves."""
    left, right = lists([(size, size, size)] * 2, torch.float16, device=device)
    added = [one + one.mT for one in added_to([(size,) * 3] * 2, torch.float16, device=device)]
    options = {"add": added, "beta": 0.3, "diagonal": 1.7}
    whole = products(left, right, launches=True, tile=SMALL, **options)
    for tile in (SQUARE, TILES[-1]):
        found = symmetric_products(left, right=right, launches=True, tile=tile, **options)
        for one, other in zip(found, whole, strict=True):
            assert_same_bits(one, other.tril() + other.tril(-1).mT)
        assert_all_same(found, symmetric_products(left, right=right, launches=False, **options))
    assert size == 1 or not torch.equal(whole[0], whole[0].mT)


# --- tables, and what is refused


def test_tables_follow_matrices_that_move(device):
    tables, shapes = Tables(), SHAPES[1:4]
    for seed in (0, 4, 0):  # each lies in memory as the others do
        left, right = lists(shapes, torch.bfloat16, seed, device=device)
        found = products(left, right, tables=tables, launches=True, tile=SMALL)
        assert_all_same(found, assert_kernel_is_twin(products, left, right, tile=SMALL))


def test_an_empty_list_and_empty_matrices(device):
    assert products([], [], launches=True) == []
    assert symmetric_products([], launches=True) == []
    empty = torch.zeros(0, 5, device=device)
    (found,) = products([empty], [torch.zeros(5, 3, device=device)], launches=True)
    assert found.shape == (0, 3)


WRONG = {
    r"left\[1\] and right\[1\] must be \[m, k\] and \[k, n\], got \[4, 5\] and \[4, 5\]": {
        "right": [torch.zeros(5, 4), torch.zeros(4, 5)]
    },
    r"right\[0\] must be of dtype torch.float32, as the first is, got torch.bfloat16": {
        "right": [torch.zeros(5, 4).bfloat16(), torch.zeros(5, 4)]
    },
    r"out\[1\] must be \[4, 4\] with rows without gaps, got \[4, 5\] with strides \[5, 1\]": {
        "out": [torch.zeros(4, 4), torch.zeros(4, 5)]
    },
    r"scale must be torch.float32 \[2\], got torch.float32 \[3\]": {"scale": torch.ones(3)},
    r"add\[0\] must be of one of the dtypes .*, got torch.int32": {
        "add": [torch.zeros(4, 4).int()] * 2
    },
    r"add\[1\] must be a matrix, got None": {"add": [torch.zeros(4, 4), None]},
    r"add\[0\] must be a matrix, got None": {"add": [None, torch.zeros(4, 4)]},
    r"right must have 2 matrices, as left, got 1": {"right": [torch.zeros(5, 4)]},
    r"add must have 2 matrices, as left, got 3": {"add": [torch.zeros(4, 4)] * 3},
    r"out\[0\] must be \[4, 4\] with rows without gaps, got \[4, 4\] with strides \[1, 4\]": {
        "out": [torch.zeros(4, 4).mT] * 2
    },
    r"left\[0\] must be a matrix with a stride of 1, got \[4, 5\] with strides \[20, 2\]": {
        "left": [torch.zeros(4, 10, 2)[:, :5, 0]] * 2
    },
    r"right\[0\] must be a matrix with a stride of 1, got \[5\] with strides \[2\]": {
        "right": [torch.zeros(5, 2)[:, 0]] * 2,
        "out": [torch.zeros(4, 4)] * 2,
    },
    r"right\[0\] must be on left\[0\]'s device cpu, got meta": {
        "right": [torch.zeros(5, 4, device="meta")] * 2
    },
}


WRONG |= {
    r"out\[0\] must be \[4, 4\] with rows without gaps, got \[4, 4\] with strides \[0, 1\]": {
        "out": [torch.zeros(4).expand(4, 4)] * 2
    },
    r"out_dtype must be None beside out, got torch.float16": {
        "out": [torch.zeros(4, 4)] * 2,
        "out_dtype": torch.float16,
    },
}


@pytest.mark.parametrize("message", WRONG)
def test_other_matrices_are_refused(message):
    given = {"left": [torch.zeros(4, 5)] * 2, "right": [torch.zeros(5, 4)] * 2, **WRONG[message]}
    with pytest.raises(ValueError, match=message):
        products(given.pop("left"), given.pop("right"), **given)


@pytest.mark.parametrize("launches", [True, False])
def test_autograd_knows_what_is_written(launches, device):
    own = torch.ones(16, 16, device=device)
    out = torch.zeros(16, 16, device=device)
    products([own], [own], [out], launches=launches)
    assert out._version > 0
    with torch.inference_mode():
        made = torch.zeros(16, 16, device=device)
    with pytest.raises(ValueError, match="must be no inference tensor"):
        products([own], [own], [made], launches=launches)
    assert not made.any()


def test_a_cpu_that_makes_zeros_of_subnormal_numbers_is_refused():
    own = torch.ones(16, 16)
    torch.set_flush_denormal(True)
    try:
        for launches in (True, False):
            with pytest.raises(RuntimeError, match="subnormal numbers must count"):
                products([own], [own], launches=launches)
    finally:
        torch.set_flush_denormal(False)


def test_views_that_are_negative_are_multiplied_so(device):
    one, two = torch.eye(2, device=device), torch.full((2, 2), 3.0, device=device)
    negative = [torch._neg_view(each) for each in (one, two)]
    for launches in (True, False):
        (found,) = products([negative[0]], [one], add=[negative[1]], launches=launches)
        assert_same_bits(found, -one - two)


def test_subnormal_numbers_are_added(device):
    """All of bf16, times a power of two; no bit is lost."""
    added = torch.arange(256).to(torch.int16).view(16, 16).view(torch.bfloat16).to(device)
    own = torch.zeros(16, 4, device=device).bfloat16()
    options = {"add": [added], "beta": 2.0**20, "out_dtype": torch.float32}
    (found,) = assert_kernel_is_twin(products, [own], [own.mT], **options)
    assert_same_bits(found.double(), added.double() * 2.0**20)


@pytest.mark.parametrize("name", ["alpha", "beta", "diagonal"])
def test_numbers_above_fp32_are_infinities(name, device):
    """Without a warning of the host's; ns_coefficients may be any."""
    left = [torch.ones(33, 40, dtype=torch.bfloat16, device=device)]
    options = {"add": [torch.ones(33, 33, device=device)], "out_dtype": torch.float32, name: 1e39}
    (found,) = assert_kernel_is_twin(symmetric_products, left, tile=SQUARE, **options)
    assert bool(found.diagonal().isinf().all())
