"""Launches of products of lists of matrices, and the tables that they read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy
import torch

from megaopt.kernels.calling import Again
from megaopt.kernels.chunks.table import DeviceTable
from megaopt.kernels.optional_triton import set_allocator, tl
from megaopt.kernels.products import kernel
from megaopt.kernels.products.epilogue import Factors, ProductCoefficients

# --- how large the tiles are: it shows in no bit


@dataclass(frozen=True)
class ProductTile:
    """The part of a result that a program makes at a time."""

    rows: int
    columns: int
    warps: int
    stages: int
    rate: float = 1.0
    """The speed at which a processor makes results by such tiles; 1 with the fastest."""
    programs: int = 1
    """The number that run on a processor at a time."""


UNEVEN = ProductTile(64, 64, 4, 4, 0.2, 2)
"""Without tensor descriptors: larger ones spill registers."""
# The rates are those of an H100, 4096 x 4096 @ 4096 x 14336 in bf16: 0.627, 0.706, 0.914, 1.26 ms.
# Symmetric results of 12 of 4096 x 14336 took 3.89 and 4.63 ms by the first two; single squares
# where half of a wide tile lies above the diagonal 3.81, but 64 of 1408 x 2048 then 0.475 in place
# of 0.459, as their operands were read once more.
TILES = (
    ProductTile(128, 256, 8, 3),
    ProductTile(128, 128, 8, 4, 0.89),
    ProductTile(64, 128, 4, 3, 0.69, 2),
    ProductTile(64, 64, 4, 4, 0.5, 2),
)
GROUP = 8
"""Rows of tiles that are made one beside another, whose operands stay in the cache.

An H100, 8 of 4096^3, of torch.bmm's speed: 8 rows 1.02, 16 0.95, all 0.95.
"""
INNER_BYTES = 128
"""The bytes of K that are loaded at a time: 64 numbers of 16 bits, 32 of TF32."""
PROCESSORS = 132
"""The processors of an H100, and of an H200, for which tiles are chosen on any card."""
SHARED_MEMORY = 227 * 1024
"""Bytes that the programs of an H100's processor may have."""
MARGIN = 2048
"""Bytes of a program for barriers, and that the system takes."""
OVERHEAD = 128
"""Steps of K that a tile's beginning and end take as long as."""


@dataclass(frozen=True)
class ProductRun:
    """Products of one shape, of which each matrix lies equally far from the next one's."""

    count: int
    m: int
    n: int
    k: int


@lru_cache(maxsize=1024)
def tile_of(runs: tuple[ProductRun, ...], kind: kernel.ProductKind) -> ProductTile:
    """The tile by which products take the least time."""
    if not kind.described:
        return UNEVEN
    fitting = [tile for tile in TILES if _fits(tile, kind)]
    return min(fitting, key=lambda tile: _time(runs, kind.mirrored, tile))


def _fits(tile: ProductTile, kind: kernel.ProductKind) -> bool:
    """Checks that mirrored results have squares, and that three stages have room."""
    squares = not kind.mirrored or tile.columns in (tile.rows, 2 * tile.rows)
    return squares and _stages(tile, kind) >= min(tile.stages, 3)


def _parts(tile: ProductTile, kind: kernel.ProductKind) -> int:
    """Returns the number of parts in which a tile is stored.

    They are squares of mirrored results, and no larger than memory has room for.
    """
    if kind.mirrored:
        return tile.columns // tile.rows
    return 2 if _stored_bytes(kind) * tile.rows * tile.columns > 2 * 128 * 256 else 1


def _stages(tile: ProductTile, kind: kernel.ProductKind) -> int:
    """Returns the tile's stages, or as many as memory has room for beside a part of the results."""
    stored = _stored_bytes(kind) * tile.rows * tile.columns // _parts(tile, kind)
    one = (tile.rows + tile.columns) * INNER_BYTES
    return min(tile.stages, (SHARED_MEMORY // tile.programs - stored - MARGIN) // one)


def _stored_bytes(kind: kernel.ProductKind) -> int:
    """Bytes of an element of the results, and of what is added."""
    elements = (kind.out, kind.added)
    return sum(element.primitive_bitwidth // 8 for element in elements if element is not None)


def _time(runs: Sequence[ProductRun], mirrored: bool, tile: ProductTile) -> float:
    """The work of the first program, which takes the longest of each round of tiles."""
    # tiles of each run, and the steps of K that each of them takes; the longest first
    counts = [run.count * len(_corners(run.m, run.n, mirrored, tile)[0]) for run in runs]
    steps = -numpy.sort(-numpy.repeat([run.k + OVERHEAD for run in runs], counts))
    # how many programs a processor runs at a time
    together = min(tile.programs, -(-len(steps) // PROCESSORS))
    steps_of_first = int(steps[:: PROCESSORS * max(together, 1)].sum())
    return steps_of_first * tile.rows * tile.columns * together / tile.rate


def _corners(
    m: int, n: int, mirrored: bool, tile: ProductTile
) -> tuple[numpy.ndarray, numpy.ndarray]:
    """The rows and columns at which a product's tiles begin, in their order."""
    # all tiles, then ordered: in bands of GROUP rows of tiles, column by column
    rows, columns = numpy.divmod(
        numpy.arange(-(-m // tile.rows) * -(-n // tile.columns)), max(-(-n // tile.columns), 1)
    )
    rows, columns = rows * tile.rows, columns * tile.columns
    order = numpy.lexsort((rows, columns, rows // (GROUP * tile.rows)))
    rows, columns = rows[order], columns[order]
    # of symmetric results only those that reach the diagonal or lie below it
    mask = columns <= rows if mirrored else slice(None)
    return rows[mask], columns[mask]


# --- the launches

ELEMENTS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class Tables:
    """Tables on a device, which launches of products keep from call to call, by runs of products.

    They are needed within the capture of a CUDA graph, and as long as the graph is replayed.
    """

    def __init__(self) -> None:
        self._launches: dict[Any, _Launch] = {}

    def prepared(
        self,
        products: Sequence[Factors],
        symmetry: tuple[bool, bool],
        numbers: ProductCoefficients,
        tile: ProductTile | None = None,
    ) -> list[tuple[_Launch, numpy.ndarray]]:
        """Returns launches, one for each way in which matrices lie, and the runs each is given.

        symmetry: whether results are symmetric, and right matrices the left ones, turned.
        """
        # what a launch's kernel is compiled for: dtypes, symmetry, what is added
        first = products[0]
        sizes = [0 if matrix is None else matrix.dtype.itemsize for matrix in first]
        elements = (None if matrix is None else ELEMENTS[matrix.dtype] for matrix in first[:4])
        operand, _, added_element, out_element = elements
        is_mirrored, is_squared = symmetry
        flags = (is_squared, bool(numbers.diagonal), first.scale is not None)
        # int64 rows as runs_of takes them: m, n, k, then address and stride of each matrix
        by_way: dict[tuple[bool, bool, bool], list[tuple[int, ...]]] = {}
        for left, right, added, out, scale in products:
            places = [_place(left), _place(right), _place(added), _place(out)]
            way = places[0].turned, places[1].turned, all(place.described for place in places)
            where = (number for place in places for number in place[:2])
            factor = 0 if scale is None else scale.data_ptr()
            row = (*out.shape, left.shape[1], *where, factor, 0)
            by_way.setdefault(way, []).append(row)
        # each way in which matrices lie in memory has a launch of its own
        launches = []
        for (left_turned, right_turned, described), rows in by_way.items():
            ways = (left_turned, right_turned, is_mirrored, described)
            kind = kernel.ProductKind(operand, added_element, out_element, *ways, *flags)
            runs, columns = runs_of(numpy.array(rows, numpy.int64), sizes)
            key = (kind, runs, tile, first.out.device)
            # the table of tiles is made once for each list of runs
            if key not in self._launches:
                self._launches[key] = _Launch(*key)
            launches.append((self._launches[key], columns))
        return launches


SHAPE = slice(0, 3)
ADDRESSES, STRIDES = slice(3, None, 2), slice(4, None, 2)
APART = (16, 16, 16, 16, 4)
"""Bytes of which the steps from a matrix to the next are multiples; of a factor's at last."""
STRIDE_LIMIT = 2**40
"""Strides of a tensor descriptor are below so many bytes (CUDA's cuTensorMapEncodeTiled).

A larger one is cut off without a word, and the launch reads elsewhere. Two tensors of one card lie
further apart than that where its driver has given out addresses of two regions: on two H200s with
NCCL, 0x4a... and 0x7fb...
"""


def runs_of(
    products: numpy.ndarray, sizes: Sequence[int]
) -> tuple[tuple[ProductRun, ...], numpy.ndarray]:
    """The runs, those that take longest first, and the rows of each that are not of tiles.

    Args:
        products: int64, for each m, n, k, and the addresses and strides of its matrices, and of its
            factor.
        sizes: bytes of an element of each of these; 0 where there is none.
    """
    alike = [*range(3), *range(4, products.shape[1], 2)]  # SHAPE, STRIDES
    # the longest sums first; products of one shape and layout follow each other
    order = numpy.lexsort((*products[:, alike].T, -products[:, 2]))
    products = products[order]
    # bytes from each matrix to that of the next product
    apart = numpy.diff(products[:, ADDRESSES], axis=0)
    # a product can follow the one before: same shape, and steps that descriptors can take
    follows = (products[1:, alike] == products[:-1, alike]).all(1)
    is_step = (apart > 0) & (apart < STRIDE_LIMIT) & (apart % APART == 0)
    follows &= (is_step | (numpy.array(sizes) == 0)).all(1)
    # a run goes on while all its steps are equal
    firsts = [0]
    for index in range(1, len(products)):
        longer = index - firsts[-1] > 1
        even = not longer or (apart[index - 1] == apart[firsts[-1]]).all()
        if not (follows[index - 1] and even):
            firsts.append(index)
    # products of each run, and the first one's numbers
    counts = numpy.diff([*firsts, len(products)])
    first_products = products[firsts]
    steps = first_products[:, STRIDES].copy()  # of one product alone any step does
    several = counts > 1
    divisors = numpy.maximum(sizes, 1)
    steps[several] = apart[numpy.array(firsts)[several]] // divisors
    # [runs, 5 matrices, (address, stride, step)], strides and steps in elements
    places = numpy.stack(
        [first_products[:, ADDRESSES], first_products[:, STRIDES], steps], 2
    ).reshape(len(first_products), -1)
    rows = zip(counts.tolist(), first_products[:, SHAPE].tolist(), strict=True)
    runs = tuple(ProductRun(count, *shape) for count, shape in rows)
    return runs, numpy.concatenate([counts[:, None], first_products[:, SHAPE], places], 1)


def moved(runs: numpy.ndarray, shift: int) -> numpy.ndarray:
    """The same runs, whose matrices and factors all lie so many bytes further."""
    moved_runs: numpy.ndarray = runs.copy()
    addresses: Any = moved_runs[:, 4::3]
    addresses[addresses != 0] += shift
    return moved_runs


class _Launch:
    """The launch of products of one kind and of these runs."""

    def __init__(
        self,
        kind: kernel.ProductKind,
        runs: tuple[ProductRun, ...],
        tile: ProductTile | None,
        device: torch.device,
    ) -> None:
        # cards with less shared memory take the small tiles
        tile = tile or (tile_of(runs, kind) if has_room(device) else UNEVEN)
        assert _fits(tile, kind)
        # int32 [3, tiles] as kernel.products_kernel has it, and at which every run's begin
        parts, firsts = [], [0]
        for run in runs:
            rows, columns = _corners(run.m, run.n, kind.mirrored, tile)
            places = numpy.arange(run.count).repeat(len(rows))
            # each product of the run has the same tiles: place in the run, row, column
            starts = (numpy.tile(corner, run.count) for corner in (rows, columns))
            parts.append(numpy.stack([places, *starts]))
            firsts.append(firsts[-1] + len(places))
        tiles = numpy.concatenate(parts, axis=1).astype(numpy.int32)
        self._firsts, self._count = numpy.array(firsts), tiles.shape[1]
        # the tiles stay on the device, the table of runs is written anew where it changes
        self._tiles, self._table = DeviceTable(device), DeviceTable(device)
        self._tiles.update(tiles)
        options: dict[str, object] = {
            "KIND": kind,
            "ROWS": tile.rows,
            "COLUMNS": tile.columns,
            "INNER": INNER_BYTES * 8 // kind.operand.primitive_bitwidth,
            "PARTS": _parts(tile, kind),
            "num_warps": tile.warps,
            "num_stages": _stages(tile, kind) if kind.described else tile.stages,
        }
        # as many programs as run at a time; they take tiles in turns
        programs = min(self._count, tile.programs * processors(device))
        self._again = Again(kernel.products_kernel, programs, options)

    def __call__(self, runs: numpy.ndarray, numbers: ProductCoefficients) -> None:
        """Launches the kernel; runs: as runs_of gives them."""
        self.begin(self._table.update(self.rows(runs)), numbers)

    def rows(self, runs: numpy.ndarray) -> numpy.ndarray:
        """Returns the kernel's table, int64 [ROW_COUNT, runs]."""
        tiles = (self._firsts[:-1], self._firsts[1:])
        return numpy.stack([*runs.T[: kernel.FIRST_TILE.value], *tiles, *runs.T[4:]])

    def begin(self, table: torch.Tensor, numbers: ProductCoefficients) -> None:
        """Launches the kernel; table: `rows` on the device."""
        if self._count:
            set_allocator(scratch)  # for descriptors
            self._again(self._arguments(table, numbers))

    def compile(self, table: torch.Tensor, numbers: ProductCoefficients) -> None:
        """Compiles the kernel, within calling.compiling_together."""
        if self._count:
            self._again.compile(self._arguments(table, numbers))

    def _arguments(self, table: torch.Tensor, numbers: ProductCoefficients) -> tuple[object, ...]:
        tables = (table, self._tiles.kept(), table.shape[1], self._count)
        return (*tables, *map(float, numbers))


def has_room(device: torch.device) -> bool:
    """Checks that a program may have as much shared memory as on an H100."""
    if device.type == "cpu":
        return True
    properties: Any = torch.cuda.get_device_properties(device)  # whose types lack this one
    return bool(properties.shared_memory_per_block_optin >= SHARED_MEMORY)


@cache
def processors(device: torch.device) -> int:
    if device.type == "cpu":
        return 2
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def scratch(size: int, alignment: int, stream: int | None) -> torch.Tensor:
    """Memory of the current device that a launch takes for a while."""
    return torch.empty(size, dtype=torch.int8, device="cuda")


class MatrixLayout(NamedTuple):
    """The place of a matrix in memory."""

    address: int
    stride: int
    """The distance between its rows in elements; of a turned one, between its columns."""
    turned: bool
    """Columns, not rows, lie there one behind another."""
    described: bool
    """A tensor descriptor can describe it."""


def _place(matrix: torch.Tensor | None) -> MatrixLayout:
    """Returns a matrix's place; for None one that changes nothing."""
    if matrix is None:
        return MatrixLayout(0, 0, False, True)
    (rows, columns), (stride, along), address = matrix.shape, matrix.stride(), matrix.data_ptr()
    turned = along != 1
    # as it lies in memory: rows without gaps
    if turned:
        rows, columns, stride = columns, rows, along
    # descriptors need addresses and rows of whole 16 bytes, and no empty matrix
    whole = (address | stride * matrix.element_size()) % 16 == 0
    return MatrixLayout(address, stride, turned, whole and rows > 0 and 0 < columns <= stride)
