"""Products of lists of matrices: one launch on a GPU, the twin elsewhere, to the same bits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy
import torch

from megaopt.kernels.calling import Again
from megaopt.kernels.chunks.table import DeviceTable, is_capturing
from megaopt.kernels.optional_triton import set_allocator, tl
from megaopt.kernels.products import kernel
from megaopt.kernels.products.epilogue import (
    OUTS,
    Factors,
    ProductCoefficients,
    products_with_epilogue,
)
from megaopt.kernels.products.reference import OPERANDS
from megaopt.kernels.subnormals import check_subnormals

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

    def launch(
        self,
        products: Sequence[Factors],
        symmetry: tuple[bool, bool],
        numbers: ProductCoefficients,
        tile: ProductTile | None,
    ) -> None:
        """Makes products, in one launch for each way in which their matrices lie in memory."""
        for launch, runs in self.prepared(products, symmetry, numbers, tile):
            launch(runs, numbers)

    def prepared(
        self,
        products: Sequence[Factors],
        symmetry: tuple[bool, bool],
        numbers: ProductCoefficients,
        tile: ProductTile | None = None,
    ) -> list[tuple[_Launch, numpy.ndarray]]:
        """Returns the launches, and the runs that each is given.

        symmetry: whether results are symmetric, and right matrices the left ones, turned.
        """
        # what a launch's kernel is compiled for: dtypes, symmetry, what is added
        first = products[0]
        dtypes = tuple(None if matrix is None else matrix.dtype for matrix in first)
        flags = (*symmetry, bool(numbers.diagonal), first.scale is not None)
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
        for way, rows in by_way.items():
            kind = _kind(dtypes, *way, *flags)
            sizes = [0 if dtype is None else dtype.itemsize for dtype in dtypes]
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


def _kind(
    dtypes: Sequence[torch.dtype | None],
    left_turned: bool,
    right_turned: bool,
    described: bool,
    mirrored: bool,
    *flags: bool,
) -> kernel.ProductKind:
    left, _, added, out = (None if dtype is None else ELEMENTS[dtype] for dtype in dtypes[:4])
    fields = (left, added, out, left_turned, right_turned, mirrored, described)
    return kernel.ProductKind(*fields, *flags)


# --- what others call


@torch.no_grad()
def products(
    left: Sequence[torch.Tensor],
    right: Sequence[torch.Tensor],
    out: Sequence[torch.Tensor] | None = None,
    *,
    add: Sequence[torch.Tensor] | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    diagonal: float = 0.0,
    scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    tables: Tables | None = None,
    launches: bool | None = None,
    tile: ProductTile | None = None,
) -> list[torch.Tensor]:
    """Makes scale[i] (alpha left[i] @ right[i] + beta add[i] + diagonal I).

    With the bits of docs/numbers.md's "Products". alpha, beta and diagonal are rounded to fp32. The
    sum times alpha, add times beta, the sum of both, that and diagonal, and that times scale are
    rounded once each to fp32, and the last once to the result's dtype. NaNs are 0x7FFFFFFF, or
    0x7FFF.

    Args:
        left: [m, k] of any shapes, all bf16, all fp16, or all fp32 on one device; products cut fp32
            to TF32. Rows or columns lie in memory without gaps between numbers.
        right: [k, n], likewise.
        out: fp32, bf16 or fp16 [m, n], all alike; rows without gaps. They may be what is added,
            and share no memory otherwise. None: new ones.
        add: likewise.
        alpha: of the products.
        beta: of what is added.
        diagonal: what is added to the results' diagonals.
        scale: fp32 [products] on the matrices' device; None: no factors.
        out_dtype: of new results; None: left's.
        tables: what to keep for further calls; None: nothing, which no CUDA graph can capture.
        launches: whether to launch the kernel, or have the twin compute; None: on a GPU.
        tile: for tests.

    Raises:
        ValueError: lists are not of one length, matrices not of such shapes, dtypes or strides,
            out_dtype is given beside out, out is an inference tensor outside of inference mode, or
            tables is None within a capture.
        RuntimeError: this thread of a CPU makes zeros of subnormal numbers.
    """
    factors = factors_of(left, right, out, add, scale, out_dtype)
    numbers = ProductCoefficients(alpha, beta, diagonal)
    return _multiply(factors, (False, False), numbers, tables, launches, tile)


@torch.no_grad()
def symmetric_products(
    matrices: Sequence[torch.Tensor],
    out: Sequence[torch.Tensor] | None = None,
    *,
    right: Sequence[torch.Tensor] | None = None,
    add: Sequence[torch.Tensor] | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    diagonal: float = 0.0,
    scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    tables: Tables | None = None,
    launches: bool | None = None,
    tile: ProductTile | None = None,
) -> list[torch.Tensor]:
    """Makes scale (alpha A A^T + beta add + diagonal I) of each matrix A [m, k].

    In little more than half of the time of `products`, whose bits and arguments it has. Where A is
    symmetric A A^T is A^2. add is symmetric to the bit, which is not looked at.

    right: [k, m], in the place of A^T. Of such a product the numbers on and below the diagonal are
    made, and stand above it, too: for products that are symmetric but for roundings, as those of
    polynomials of one symmetric matrix are.
    """
    turned = [matrix.mT for matrix in matrices] if right is None else right
    factors = factors_of(matrices, turned, out, add, scale, out_dtype)
    numbers = ProductCoefficients(alpha, beta, diagonal)
    return _multiply(factors, (True, right is None), numbers, tables, launches, tile)


def factors_of(
    left: Sequence[torch.Tensor],
    right: Sequence[torch.Tensor],
    out: Sequence[torch.Tensor] | None,
    add: Sequence[torch.Tensor] | None,
    scale: torch.Tensor | None,
    out_dtype: torch.dtype | None = None,
) -> list[Factors]:
    """The factors of each product, as `products` takes them; raises its ValueErrors."""
    if out is not None and out_dtype is not None:
        raise ValueError(f"out_dtype must be None beside out, got {out_dtype}")
    if out is None:
        dtype = out_dtype or (left[0].dtype if left else None)
        pairs = zip(left, right, strict=False)  # lengths are looked at below
        out = [a.new_empty(a.shape[0], b.shape[1], dtype=dtype) for a, b in pairs]
    # from here on lists of one length; None where nothing is added
    added: Sequence[Any] = [None] * len(left) if add is None else add
    lists: dict[str, Sequence[Any]] = {"left": left, "right": right, "add": added, "out": out}
    for name, matrices in lists.items():
        if len(matrices) != len(left):
            raise ValueError(f"{name} must have {len(left)} matrices, as left, got {len(matrices)}")
        for index, matrix in enumerate(matrices):
            if not isinstance(matrix, torch.Tensor) and not (name == "add" and add is None):
                raise ValueError(f"{name}[{index}] must be a matrix, got {matrix!r}")
    # one factor a product, each a view of shape ()
    factors: Sequence[Any] = [None] * len(left)
    if scale is not None:
        if scale.dtype != torch.float32 or scale.shape != (len(left),):
            description = f"{scale.dtype} {list(scale.shape)}"
            raise ValueError(f"scale must be torch.float32 [{len(left)}], got {description}")
        factors = scale.unbind()
    products = [
        # what a view has in a bit of its own, as its sign, a kernel does not see
        Factors(a.resolve_neg(), b.resolve_neg(), None if c is None else c.resolve_neg(), d, e)
        for a, b, c, d, e in zip(*lists.values(), factors, strict=True)
    ]
    for index, product in enumerate(products):
        _check(index, product, products[0])
    return products


def _multiply(
    products: Sequence[Factors],
    symmetry: tuple[bool, bool],
    numbers: ProductCoefficients,
    tables: Tables | None,
    launches: bool | None,
    tile: ProductTile | None,
) -> list[torch.Tensor]:
    results = [product.out for product in products]
    if not products:
        return results
    device, (is_mirrored, is_squared) = products[0].out.device, symmetry
    # tensor cores count subnormal numbers, and so must the twin
    if device.type != "cuda":
        check_subnormals()
    # autograd learns that results are written in place
    torch.autograd.graph.increment_version(results)
    # the twin; a square is symmetric by itself, other symmetric products are mirrored
    if not (device.type == "cuda" if launches is None else launches):
        products_with_epilogue(products, numbers, is_mirrored and not is_squared)
        return results
    # within a capture tables must outlive this call, as replays read them
    if tables is None and is_capturing(device):
        raise ValueError("tables must be given within the capture of a CUDA graph, got None")
    (tables or Tables()).launch(products, symmetry, numbers, tile)
    return results


def _check(index: int, product: Factors, first: Factors) -> None:
    left, right, added, out, _ = product
    (m, k), (terms, n) = _matrix(f"left[{index}]", left), _matrix(f"right[{index}]", right)
    if k != terms:
        shapes = f"{[m, k]} and {[terms, n]}"
        raise ValueError(
            f"left[{index}] and right[{index}] must be [m, k] and [k, n], got {shapes}"
        )
    # operands are all of one dtype, results too, and what is added
    _check_dtype(f"left[{index}]", left, first.left.dtype, OPERANDS)
    _check_dtype(f"right[{index}]", right, first.left.dtype, OPERANDS)
    for name, matrix, like in (("out", out, first.out), ("add", added, first.added)):
        if matrix is None or like is None:
            continue
        _check_dtype(f"{name}[{index}]", matrix, like.dtype, OUTS)
        # rows of results must not lie over each other
        overlaps = name == "out" and m > 1 and matrix.stride(0) < n
        if matrix.shape != (m, n) or matrix.stride(1) != 1 or overlaps:
            layout = f"{list(matrix.shape)} with strides {list(matrix.stride())}"
            raise ValueError(
                f"{name}[{index}] must be {[m, n]} with rows without gaps, got {layout}"
            )
    if out.is_inference() and not torch.is_inference_mode_enabled():
        raise ValueError(f"out[{index}] must be no inference tensor outside of inference mode")
    names = ("left", "right", "add", "out", "scale")
    for name, matrix in zip(names, product, strict=True):
        if matrix is not None and matrix.device != first.left.device:
            place = f"on left[0]'s device {first.left.device}"
            raise ValueError(f"{name}[{index}] must be {place}, got {matrix.device}")


def _matrix(name: str, matrix: torch.Tensor) -> torch.Size:
    if matrix.dim() != 2 or 1 not in matrix.stride():
        layout = f"{list(matrix.shape)} with strides {list(matrix.stride())}"
        raise ValueError(f"{name} must be a matrix with a stride of 1, got {layout}")
    return matrix.shape


def _check_dtype(
    name: str, matrix: torch.Tensor, first_dtype: torch.dtype, dtypes: Iterable[torch.dtype]
) -> None:
    if matrix.dtype not in dtypes:
        allowed = ", ".join(map(str, dtypes))
        raise ValueError(f"{name} must be of one of the dtypes {allowed}, got {matrix.dtype}")
    if matrix.dtype != first_dtype:
        raise ValueError(
            f"{name} must be of dtype {first_dtype}, as the first is, got {matrix.dtype}"
        )
