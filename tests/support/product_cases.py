"""Lists of matrices of many shapes, spreads and strides, for tests of products."""

import itertools

import torch
from bits import assert_same_bits

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SHAPES = ((1, 1, 1), (16, 16, 16), (33, 70, 129), (128, 128, 64), (72, 200, 40), (8, 5, 0))
"""(m, n, k): edges of tiles in every dimension, whole tiles, no terms."""
SPECIAL = (torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 3e38, 1e-45, 2.0**-130)


def matrix(rows, columns, dtype, generator, spread=2, turned=False, device="cpu"):
    """Random numbers of `spread` binades around 1; turned: columns lie one behind another."""
    if turned:
        return matrix(columns, rows, dtype, generator, spread, False, device).mT
    exponents = torch.rand(rows, columns, generator=generator) * spread - spread / 2
    values = torch.randn(rows, columns, generator=generator) * exponents.floor().exp2()
    return values.to(dtype).to(device)


def odd(value):
    """The same numbers, as no tensor descriptor can have them: rows are not of whole 16 bytes."""
    rows, columns = value.shape if value.stride(1) == 1 else value.shape[::-1]
    room = value.new_empty(rows * (columns + 3) + 1)[1:].view(rows, columns + 3)[:, :columns]
    own = room if value.stride(1) == 1 else room.mT
    return own.copy_(value)


def lists(shapes, dtype, seed=0, spread=2, device="cpu"):
    """Left and right matrices, each way of lying in memory."""
    generator = torch.Generator().manual_seed(seed)
    ways = list(itertools.product((False, True), repeat=2))
    found = [], []
    for index, (m, n, k) in enumerate(shapes):
        sizes = (m, k), (k, n)
        for own, size, turned in zip(found, sizes, ways[(index + seed) % 4], strict=True):
            own.append(matrix(*size, dtype, generator, spread, turned, device))
    return found


def added_to(shapes, dtype, seed=1, device="cpu"):
    """Matrices of the products' shapes."""
    generator = torch.Generator().manual_seed(seed)
    return [matrix(m, n, dtype, generator, device=device) for m, n, _ in shapes]


def with_special_rows(matrices, first=0):
    """The same list, in which each matrix has a row of one special value, but for every third."""
    found = [each.clone(memory_format=torch.preserve_format) for each in matrices]
    for number, each in enumerate(found, first):
        if number % 3 and each.shape[0]:
            each[number % each.shape[0]] = SPECIAL[number % len(SPECIAL)]
    return found


def assert_kernel_is_twin(function, *lists, add=None, tile=None, **options):
    """Returns what the kernel made, the bits of the twin, which is made on the CPU."""
    found = function(*lists, add=add, launches=True, tile=tile, **options)
    own = [[each.cpu() for each in some] for some in lists]
    added = None if add is None else [each.cpu() for each in add]
    assert_all_same(found, function(*own, add=added, launches=False, **options))
    return found


def assert_all_same(found, expected):
    """Each product has the bits of the other."""
    for index, pair in enumerate(zip(found, expected, strict=True)):
        assert_same_bits(*pair, f"product {index}")
