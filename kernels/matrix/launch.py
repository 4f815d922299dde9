"""GaLore's step in launches over many matrices: project, Adam's step, project back and update."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from typing import Any

import numpy
import torch

from megaopt.kernels.backends import BACKENDS
from megaopt.kernels.calling import Replayed, call
from megaopt.kernels.chunks import rows as table_rows
from megaopt.kernels.chunks.batch import Buffers, Formats, Scalars
from megaopt.kernels.chunks.spec import KernelSpec
from megaopt.kernels.chunks.table import Chunks, DeviceTable, Geometry, addresses_of, stream_of
from megaopt.kernels.formats import NONE, WEIGHTS, Format
from megaopt.kernels.matrix import kernel
from megaopt.kernels.matrix.galore import LEFT, RIGHT, SLAB, LowRank, projected
from megaopt.kernels.matrix.plan import (
    FLOAT32,
    MatrixPlan,
    apply_formats,
    inner_formats,
    why_not_compiled,
)
from megaopt.kernels.matrix.products import BF16, IEEE, TF32, Product
from megaopt.kernels.matrix.shared import ALIGNED
from megaopt.kernels.optional_triton import INTERPRETED, set_allocator
from megaopt.kernels.place import Place, in_order
from megaopt.kernels.products.launch import SHARED_MEMORY, has_room, processors, scratch
from megaopt.kernels.rules import Rule
from megaopt.kernels.rules.galore import GALORE_APPLY, GALORE_DIRECTION
from megaopt.kernels.rules.matrix import PROJECTION, Work
from megaopt.kernels.step.launch import TritonPlan

# --- how large the tiles of the two launches are: it shows in no bit


def padded(rank: int) -> int:
    """Returns a rank, or the power of two above it, as Triton wants it; at least 16."""
    return max(16, 1 << (rank - 1).bit_length())


def part_of(most: int, rank: int) -> int:
    """Returns the part of a rank that a tile takes: `padded`, or a power of two that is less."""
    return min(most, padded(rank))


def operand_bytes(low_rank: LowRank) -> int:
    """Returns the size of a number that was rounded ahead, in bytes."""
    return 2 if low_rank.precision == BF16 else 4


@dataclass(frozen=True)
class ProjectTile:
    """The tile of a projected gradient [outer, rank], as kernel.project_kernel has it."""

    outer: int
    inner: int
    """Terms of the sum at a time."""
    ranks: int
    """Ranks of a tile at most; a smaller rank takes fewer."""
    warps: int
    stages: int


@dataclass(frozen=True)
class BackTile:
    """The tile of a matrix [rows, columns] that is projected back."""

    rows: int
    columns: int
    inner: int
    """Terms of the sum over the rank at a time, at most."""
    warps: int
    stages: int
    strip: int = 1
    """Tiles of a program, one beside another."""
    registers: int | None = None
    """The most that a thread may have; None: as many as the compiler takes."""

    @property
    def width(self) -> int:
        """Columns of a program."""
        return self.columns * self.strip


@dataclass(frozen=True)
class WholeTile:
    """The tile of matrices that have whole ones only, which come by descriptors."""

    rows: int
    columns: int
    warps: int
    stages: int
    """Tiles of which there is room at a time; by blocks, of the factors."""
    inner: int | None = None
    """Bytes of the rank at a time, by blocks; None: all of it, by strips."""
    at_once: int = 1
    """Programs of a processor."""

    def divides(self, shape: Sequence[int]) -> bool:
        """Checks that a matrix is of whole tiles."""
        return shape[0] % self.rows == 0 and shape[1] % self.columns == 0

    def counts(self, shapes: Sequence[torch.Size]) -> tuple[numpy.ndarray, numpy.ndarray]:
        """Returns the numbers of tiles of each matrix, one below another and one beside another."""
        heights, widths = numpy.array(shapes).T
        return heights // self.rows, widths // self.columns


@dataclass(frozen=True)
class ProjectionTiles:
    """The tiles of both launches; for matrices that have whole tiles only, and for others."""

    project: ProjectTile
    back: BackTile
    uneven_project: ProjectTile
    uneven_back: BackTile
    ahead: bool = False
    """Projections are rounded ahead, once for both launches, by another; not with ieee."""
    strip: WholeTile | None = None
    """The tile by strips, where there is room for it; None: there are no strips."""
    block: WholeTile | None = None
    """The tile by blocks, elsewhere; None: there are none."""


# Compiled for sm_90 the others' masks take so many registers that larger tiles spill.
UNEVEN_PROJECT, UNEVEN_BACK = ProjectTile(64, 32, 64, 8, 2), BackTile(64, 64, 32, 8, 1)

# 8 matrices of 4096 x 11008 at rank 128, projected on the left, ms of each launch; fp32 weights for
# tf32 (one H100, fused, whose copies take 0.55 and 0.96; torch.mm's projection 0.68), bf16 weights
# with fp32 masters for bf16 (one H200). No projecting tile of bf16 is more than a fifth slower than
# the best at ranks 32 to 512, 1 or 8 matrices, either side.
#
# | project, outer x inner, warps, stages | tf32 | bf16  | bf16, rounded ahead |
# |---|---|---|---|
# | 64 x 32, 4, 4                         | 1.04 |       |       |
# | the same, grouped                     | 0.72 |       |       |
# | 64 x 32, 4, 3                         | 1.03 |       |       |
# | 128 x 32, 8, 4                        | 1.03 |       |       |
# | 128 x 32, 4, 4: two sums spill        | 1.23 |       |       |
# | 128 x 64, 4, 4                        |      |       | 0.214 |
# | 64 x 64, 8, 3                         |      |       | 0.218 |
# | 128 x 64, 8, 3                        |      | 0.557 |       |
#
# | back, rows x columns x inner, warps, stages, strip, registers | tf32 | bf16, rounded ahead |
# |---|---|---|
# | 64 x 64 x 128, 4, 2, 4, 128           | 1.29 | 1.16 |
# | 64 x 32 x 128, 4, 2, 8                |      | 1.21 |
# | 128 x 64 x 128, 8, 2, 4, 128          | 1.64 | 1.24 |
# | 128 x 32 x 128, 8, 2, 8               |      | 1.31 |
# | 128 x 32 x 128, 8, 2, 8, 128          | 1.37 |      |
# | 64 x 64 x 32, 4, 3, 2                 | 1.41 |      |
# | 64 x 32 x 128, 4, 1, 8                | 1.50 |      |
# | 128 x 64 x 128, 8, 1, 1               | 1.46 |      |
# | 128 x 64 x 128, 8, 2, 1               |      | 1.36 |
#
# With slabs of 1,024 terms, which need two sums of a tile, bf16 takes 64 x 64 with 4 warps and 4
# stages: a step of these 8 matrices took an H100 1.90 ms, by 64 x 64, 8, 3 1.91, by 128 x 64, 8, 3
# 1.92, by 128 x 64, 4, 4 1.99; 8 of 4096 x 4096 on the right 0.700, 0.702, 0.706, 0.729. ieee, one
# of 4096 x 11008, back: 64 x 64 x 32 with 4 warps and 2 stages 0.327, with 8 and 3 0.374.

BACK_BF16 = BackTile(64, 64, 128, 4, 2, 4, 128)
BACK_TF32 = BackTile(128, 32, 128, 8, 2, 8, 128)
# Of ranks that are more than such a tile takes at a time, so that a strip does not share its rows.
HIGH_BACK_BF16 = BackTile(128, 64, 128, 8, 2)
HIGH_BACK_TF32 = BackTile(128, 64, 32, 4, 2, 2)
# Matrices of whole tiles go by strips. One H200, us a matrix of the last launch, bf16 weights with
# fp32 masters, rank 128; 9 of 4096 x 11008, 20 of 4096 x 4096: 124 and 45 in place of 147 and 55 by
# BACK_BF16, whose tiles load as much of the right factor as of the master; copies take 106 and 40.
# A prototype, 8 matrices:
#
# | tiles, warps, stages           | 4096 x 11008 | 4096 x 4096 |
# |---|---|---|
# | 64 x 128, 8, 3                 | 127          | 51          |
# | the same, 4 stages             | 127          | 50          |
# | the same, 4 warps              | 129          | 52          |
# | the same, stored by descriptors | 133         | 54          |
# | 64 x 64, 4, 3, two programs    | 135          | 51          |
# | 64 x 256, 8, 2                 | 163          | 60          |
# | 64 x 128, 8, 3, strips go across | 138        | 52          |
# | 128 x 64, 8, 3, strips go across | 142        | 55          |
#
# TF32, fused, 8 of 4096 x 11008 at ranks 32, 64, 128: 99, 103, 126, and by BACK_TF32 109, 123, 138;
# 64 x 64 with 8 warps 129, 128 x 64 with two stages 163. At 256 64 x 32 with two took 336,
# HIGH_BACK_TF32 245.
STRIP = WholeTile(64, 128, 8, 3)
# Of higher ranks by blocks, two programs a processor: one stores what it made while the other
# multiplies. One H200, us of a step, bf16 weights with fp32 masters, of 4096 x 11008 and 4096 x
# 4096; first by HIGH_BACK_BF16 and HIGH_BACK_TF32, those with a * by strips of 64 x 64:
#
# | tile, warps, stages, at once  | bf16, 512 | bf16, 256   | tf32, 256 | tf32, 512 | tf32, 128   |
# |---|---|---|---|---|---|
# | before                        | 400, 148  | 257*, 105*  | 485, 185  | 730       | 255*, 109*  |
# | 64 x 128, 4, 3, 2             | 329, 129  | 245, 107    | 368, 151  | 534       | 244, 111    |
# | the same, half the terms, 5   |           | 249, 109    | 380       |           | 254, 116    |
# | the same, twice the terms, 2  |           | 308, 134    | 473       |           | 306, 137    |
# | 64 x 64, 4, 3, 3              |           | 253, 110    | 377       |           | 253, 114    |
# | 128 x 64, 4, 3, 2             | 338, 134  | 252         | 375, 156  | 548       |             |
# | 128 x 128, 8, 4, 1            | 337, 134  | 261         | 378, 159  | 526       |             |
# | 128 x 256, 8, 3, 1: two parts | 338, 134  | 264         | 374, 155  | 520       |             |
# | 64 x 256, 8, 3, 1: two parts  | 375, 148  | 294         | 412, 171  | 580       |             |
BLOCK = WholeTile(64, 128, 4, 3, inner=128, at_once=2)
BARRIERS = 1024
"""Bytes of a program for barriers."""
TURN = 1.0
"""A strip's beginning, until its first tiles are there, in tiles."""
PARTS = (1, 2, 3, 4, 6, 8)
"""Numbers of strips, one below another, of which the highest matrix is cut into the fastest.

9 of 4096 x 11008 took 124 us each by whole columns, 130 by strips of 16 tiles.
"""


def tiles_of(low_rank: LowRank) -> ProjectionTiles:
    """Returns the tiles of matrices that are projected so."""
    # ieee products take the projections as they are
    ahead = low_rank.precision != IEEE
    # an interpreted operation takes long whatever its size: tiles are large
    if INTERPRETED:
        project, back = ProjectTile(128, 128, 128, 4, 1), BackTile(128, 64, 64, 4, 1, 2)
        whole = (WholeTile(32, 64, 4, 3), WholeTile(32, 64, 4, 3, inner=64))
        return ProjectionTiles(project, back, project, back, ahead, *whole)
    if low_rank.precision == IEEE:
        project, back = ProjectTile(128, 32, 128, 8, 3), BackTile(64, 64, 32, 4, 2)
    elif low_rank.precision == BF16:
        project = ProjectTile(64, 64, 128, 4, 4)
        # a strip of tiles shares the left factor where the tile has the whole rank
        back = BACK_BF16 if low_rank.rank <= BACK_BF16.inner else HIGH_BACK_BF16
    else:
        # two sums of 128 rows and more than 32 ranks spill
        project = ProjectTile(128 if low_rank.rank <= 32 else 64, 32, 128, 4, 4)
        back = BACK_TF32 if low_rank.rank <= BACK_TF32.inner else HIGH_BACK_TF32
    return ProjectionTiles(project, back, UNEVEN_PROJECT, UNEVEN_BACK, ahead, STRIP, BLOCK)


# --- the plan

LAUNCHED = ("hybrid", "grouped", "fused")
"""Kernels that are Triton's."""
BY_SHAPE = "by shape"
"""Fused or grouped, whichever is faster."""
AUTO = {"ieee": "hybrid", "tf32": BY_SHAPE, "bf16": BY_SHAPE}
"""The kernel that "auto" takes on a GPU for each precision.

One H200, ms, torch's projection and Triton's: bf16, 8 matrices of 4096 x 11008 on the left at rank
128 0.270 and 0.214, at 512 0.676 and 0.574; 8 of 4096 x 4096 on the right at 128 0.141 and 0.090.
"""
FUSED_ON_LEFT = 256
"""Tiles, below which a launch of bf16 on the left is fused; others always are.

One H100, tf32 at rank 128, ms of all launches, grouped and fused: one matrix of 4096 x 11008 on the
left 0.393 and 0.340, eight, in waves of 344 tiles, 2.285 and 2.425; one of 4096 x 4096 on the right
0.257 and 0.172, eight 0.922 and 0.825. bf16, 112 of Llama-7B's: 16.82 and 16.78. One H200, by
strips, tf32, one of 4096 x 11008 on the left at ranks 64, 128, 256: 0.213 and 0.208, 0.260 and
0.254, 0.570 and 0.479, as fused launches alone turn the direction.
"""
ROOM = 2**25
"""Bytes of a workspace, or, where that is more, PART of the weights' bytes."""
PART = 0.009
ONE_TILE = Geometry(1, 1, span=4 if INTERPRETED else 32)
"""Chunks of one tile each."""
FEW = 128
"""With fewer tiles each slab has a program of its own: an H200 has 132 processors."""
ADDED = 1024
"""Numbers that a program adds from slabs."""
STEPPED = 2**16 if INTERPRETED else 2048
"""Numbers of a tile that a fused launch steps at a time: 16 or 8 a thread."""
ROUNDED = 64
"""Rows and columns of a tile of a projection that is rounded ahead."""
UNIT = 128
"""Matrices begin in the workspace at multiples of so many numbers."""


def is_fused(moments: Sequence[Format]) -> bool:
    """Checks that the launch that projects can step moments of these formats, tile by tile."""
    return not any(form.has_scale for form in moments)


def why_not_kernel(kernel: str, device: torch.device) -> str | None:
    """Returns the reason why a kernel does not step matrices on a device; None where it does."""
    if kernel == "compiled":
        return why_not_compiled(device)
    return BACKENDS["triton"].why_not(device) if kernel in LAUNCHED else None


def launched_plan(
    formats: Formats,
    shapes: Sequence[torch.Size],
    groups: Sequence[int],
    device: torch.device,
    places: Sequence[Place] | None = None,
    kernel: str = "hybrid",
    tiles: ProjectionTiles | None = None,
) -> MatrixPlan:
    """Makes the plan of launches over many matrices, of GALORE's formats, masters without scales.

    kernel: "hybrid" has torch project gradients, with precision "ieee"; "grouped" a launch; "fused"
    the same that steps the moments, where `is_fused`; BY_SHAPE. tiles: for tests.
    """
    assert formats.matrix is not None
    low_rank: LowRank = formats.matrix.how
    how = How(formats, low_rank, kernel, tiles or tiles_of(low_rank))
    # by default every matrix is a whole parameter of its own
    places = places or in_order(len(shapes))
    launches = GaLoreLaunches(how, device, shapes, groups, places)
    return MatrixPlan(formats, groups, places, launches=launches)


@dataclass(frozen=True)
class How:
    """The settings that all matrices of a batch share."""

    formats: Formats
    low_rank: LowRank
    kernel: str
    """The kernel, one of LAUNCHED, or BY_SHAPE."""
    tiles: ProjectionTiles

    def by_shape(self, tiles: int) -> str:
        """Returns the faster kernel of a launch of so many tiles of projected gradients."""
        few = self.turns or self.low_rank.side == RIGHT or tiles < FUSED_ON_LEFT
        return "fused" if few and is_fused(self.formats.moments) else "grouped"

    @property
    def grouped(self) -> bool:
        """The gradients are projected by one launch, not by torch."""
        return self.kernel != "hybrid" or self.low_rank.precision != IEEE

    @property
    def fused(self) -> bool:
        """The launch that projects takes Adam's step."""
        return self.kernel == "fused"

    @property
    def direction(self) -> Formats:
        """The formats of Adam's step, which writes the direction rounded for the last product."""
        formats = replace(self.formats, writes_grad=False)  # a projected one, which nobody reads
        is_bf16 = self.low_rank.precision == BF16
        return inner_formats(formats, WEIGHTS["bfloat16"] if is_bf16 else FLOAT32)

    def low_numel(self, shape: torch.Size) -> int:
        """Returns the numbers of a projected gradient."""
        return torch.Size(self.low_rank.low_shape(shape)).numel()

    @property
    def projection(self) -> Format:
        """The format in which the launches find the projections."""
        is_cast = self.tiles.ahead and self.low_rank.precision == BF16
        return WEIGHTS["bfloat16"] if is_cast else FLOAT32

    @property
    def turns(self) -> bool:
        """The launches find right factors turned: tensor cores take TF32 in no other order."""
        return self.tiles.ahead and self.low_rank.precision == TF32

    def workspace_bytes(self, shape: torch.Size) -> int:
        """Returns the bytes that a step takes for a while.

        They are those of the projected gradient, its direction, and the projection.
        """
        low, projection = (
            self.low_numel(shape),
            torch.Size(self.low_rank.projection_shape(shape)).numel(),
        )
        # the direction is rounded already: 2 bytes a number with bf16, else 4
        direction = 0 if self.shares_low else self.direction.dtype("weight").itemsize * low
        # bytes a number: one copy in bf16, or two in fp32, straight and turned
        copies = self.tiles.ahead * (8 if self.turns else 2)
        return 4 * low + direction + copies * projection

    @property
    def shares_low(self) -> bool:
        """The direction takes the place of the projected gradient."""
        is_turned = self.fused and self.turns and self.low_rank.side == LEFT
        return self.direction.weight is FLOAT32 and not is_turned

    def outer_and_terms(self, shape: Sequence[int]) -> tuple[int, int]:
        """Returns the dimension of a gradient that stays, and the one along which sums go."""
        rows, columns = shape
        return (columns, rows) if self.low_rank.side == LEFT else (rows, columns)

    def even(self, shape: torch.Size) -> tuple[bool, bool]:
        """Checks for each launch that a matrix has whole tiles only, of rows of whole 16 bytes."""
        (outer, terms), rank = self.outer_and_terms(shape), self.low_rank.rank
        project, back, wide = self.tiles.project, self.tiles.back, shape[1] % 16
        # the first launch cuts the gradient, the last one the matrix; both cut the rank
        first = (outer % project.outer, terms % project.inner, rank % part_of(project.ranks, rank))
        last = (shape[0] % back.rows, shape[1] % back.width, rank % part_of(back.inner, rank))
        return not any((*first, wide)), not any((*last, wide))

    @property
    def turned(self) -> bool:
        """The last launch finds its right factor turned."""
        return self.turns and (self.fused or self.low_rank.side == RIGHT)

    def whole_tile(self, device: torch.device, apply: Formats) -> WholeTile | None:
        """Returns the tile of matrices that have whole ones only; None where there is none.

        Left factors come as tensor cores take them, in rows of whole 16 bytes. Of weights and
        masters a stage less is held: the results take its room. By blocks right factors too.

        apply: the formats of what the last launch writes.
        """
        low_rank, strip = self.low_rank, self.tiles.strip
        is_projection = low_rank.side == LEFT
        is_rounded = low_rank.precision == BF16 or self.fused or is_projection
        # other matrices go by pointers and masks
        if (
            not (self.tiles.ahead and is_rounded)
            or low_rank.rank % 8
            or apply.in_place
            or not has_room(device)
        ):
            return None
        # bytes of what an update reads, for each number of the matrix
        slots = ["master"] * apply.master.present + ["weight"] * apply.reads_weight
        param = sum(apply.dtype(slot).itemsize for slot in slots)
        # a strip holds its right factor once, and for each stage a left factor and what is read
        if strip is not None:
            factor = operand_bytes(low_rank) * padded(low_rank.rank)
            one = strip.rows * (factor + param * strip.columns)
            if factor * strip.columns + strip.stages * one + BARRIERS <= SHARED_MEMORY:
                return strip
        block = self.tiles.block if low_rank.precision == BF16 or self.turned else None
        if block is not None and apply.draws:
            # which takes registers: 72 to 544 bytes would be spilled, where it is up to 56
            block = replace(block, columns=block.columns // 2)
        return block

    def slabs(self, shape: torch.Size) -> int:
        """Returns the number of slabs into which a matrix's sums are cut."""
        _, terms = self.outer_and_terms(shape)
        return -(-terms // SLAB)


class GaLoreLaunches:
    """The launches of a batch, in waves of as many matrices as a small workspace has room for.

    For each matrix `groups` is its row in the scalars that `step` is given, and `places` where it
    lies in its parameter, for random bits.
    """

    many_calls = False

    def __init__(
        self,
        how: How,
        device: torch.device,
        shapes: Sequence[torch.Size],
        groups: Sequence[int],
        places: Sequence[Place],
    ) -> None:
        formats, sizes = how.formats, [shape.numel() for shape in shapes]
        # bytes of the workspace that a wave may take
        room = max(ROOM, PART * sum(sizes) * formats.dtype("weight").itemsize)
        self._waves = []
        # a wave is some of the batch's matrices, which are launched over together
        for indices in waves(how, shapes, room):
            of_matrices: Any = (
                [sequence[i] for i in indices] for sequence in (shapes, groups, places)
            )
            self._waves.append((indices, ProjectionWave(how, device, *of_matrices)))

        # a plan of the whole gradients, for their norm alone
        measured = Formats(formats.grad, formats.weight, NONE, (), ())
        self._measured = TritonPlan(measured, GALORE_APPLY, sizes, groups, device)
        self._device, self._replayed = device, Replayed(device)
        # without products by torch a step is the same launches each time
        self._by_launches = all(wave.how.grouped for _, wave in self._waves)
        self._workspace_bytes = max((wave.workspace_bytes for _, wave in self._waves), default=0)

    def accumulate(self, buffers: Buffers, bins: torch.Tensor) -> None:
        """Adds the squares of the whole gradients to the bins of megaopt.kernels.norm."""
        self._measured.look({slot: buffers[slot] for slot in ("grad", "weight")})
        self._measured.accumulate(bins)

    def step(
        self, buffers: Buffers, works: Sequence[Work], scalars: Scalars, controls: Any
    ) -> None:
        """Takes one step of every matrix, by its projection."""
        scalars = self._measured.on_device(scalars)
        # kernels take projections without gaps: others are copied
        state_projections = [work.kept[PROJECTION] for work in works]
        projections = [projection.contiguous() for projection in state_projections]
        # uint8, taken anew in each step; waves use it one after another, on one stream
        workspace = torch.empty(self._workspace_bytes, dtype=torch.uint8, device=self._device)
        # int64 [matrices] for each slot
        addresses = addresses_of({**buffers, PROJECTION: projections})
        numbers = (scalars, controls)

        def launches() -> None:
            # a wave is given the rows of its own matrices
            for places, wave in self._waves:
                rows = {slot: row[places] for slot, row in addresses.items()}
                grads = [buffers["grad"][place] for place in places]
                wave.step(rows, grads, [projections[i] for i in places], workspace, *numbers)

        # torch's products, and copies of projections, take other memory in each step
        if not self._by_launches or any(map(operator.is_not, projections, state_projections)):
            return launches()
        # the graph is replayed while all addresses and the stream stay
        state: list[Any] = [row.tobytes() for row in addresses.values()]
        state += [None if tensor is None else tensor.data_ptr() for tensor in (workspace, *numbers)]
        self._replayed((stream_of(self._device), state), launches)


def waves(how: How, shapes: Sequence[torch.Size], room: float) -> Iterator[list[int]]:
    """Returns the places of matrices that are stepped together, as many as there is room for."""

    # slabs and evenness are constants of a kernel: a wave has matrices of one kind
    def kind(index: int) -> Any:
        return how.slabs(shapes[index]), how.even(shapes[index])

    indices = [index for index, shape in enumerate(shapes) if shape.numel()]  # a rank may have none
    for _, alike in groupby(sorted(indices, key=kind), kind):
        wave: list[int] = []
        used = 0
        for index in alike:
            # a matrix too large for the room has a wave of its own
            needed = how.workspace_bytes(shapes[index])
            if wave and used + needed > room:
                yield wave
                wave, used = [], 0
            wave.append(index)
            used += needed
        yield wave


@dataclass(frozen=True)
class WholeLaunch:
    """The last launch over matrices of whole tiles."""

    name: str
    """The kernel's name."""
    chunks: Chunks
    """Strips, or tiles."""
    programs: int
    numbers: tuple[int, ...]
    """The kernel's last arguments."""
    options: dict[str, object]

    def __call__(self, arguments: tuple[Any, ...], options: dict[str, object]) -> None:
        """Launches it; arguments, options: those that it has in common with back_project_kernel."""
        set_allocator(scratch)  # for descriptors
        (table, *rest), all_options = arguments, {**options, **self.options}
        everything = (table, self.chunks.table, *rest, *self.numbers)
        call(getattr(kernel, self.name), self.programs, everything, all_options)


def whole_launch(
    tile: WholeTile, shapes: Sequence[torch.Size], low_rank: LowRank, device: torch.device
) -> WholeLaunch:
    """Makes the launch by strips, or by blocks."""
    # most: the programs that have room on the card at a time
    (heights, widths), most = tile.counts(shapes), tile.at_once * processors(device)
    options: dict[str, object] = {"ROWS": tile.rows, "COLUMNS": tile.columns}
    options |= {"num_warps": tile.warps, "num_stages": tile.stages}
    # by blocks each tile is one piece of work
    if tile.inner is not None:
        options["INNER"] = tile.inner // operand_bytes(low_rank)
        tiles = Chunks((heights * widths).tolist(), ONE_TILE, device)
        return WholeLaunch("back_blocks_kernel", tiles, min(tiles.count, most), (), options)

    # int64 [matrices], how many strips each is cut into
    def strips(down: int) -> numpy.ndarray:
        counts: numpy.ndarray = -(-heights // down) * widths
        return counts

    # rounds of strips, times what the longest strip takes
    def time(down: int) -> float:
        return -(-int(strips(down).sum()) // most) * (down + TURN)

    # of a few lengths that which takes the least time, where no program is done early
    down = min((-(-int(heights.max()) // parts) for parts in PARTS), key=time)
    chunks = Chunks(strips(down).tolist(), ONE_TILE, device)
    options |= {"RANKS": padded(low_rank.rank), "STAGES": tile.stages}
    return WholeLaunch("back_strips_kernel", chunks, min(chunks.count, most), (down,), options)


class Products:
    """The launches of the two products of some matrices: project, and project back and update.

    Args:
        how: what all matrices have in common.
        apply: the formats of what the last launch reads and writes.
        rule: its rule, of the update that was projected back, in the gradient's place.
        device: of all.
        shapes, groups, places: of the matrices, all with as many slabs and of even shape, or not.
    """

    def __init__(
        self,
        how: How,
        apply: Formats,
        rule: Rule,
        device: torch.device,
        shapes: Sequence[torch.Size],
        groups: Sequence[int],
        places: Sequence[Place],
    ) -> None:
        self._shapes, self._device, self._apply, self._rule = shapes, device, apply, rule
        # where each projected gradient begins in the workspace, int64 [matrices], in numbers
        self._firsts, self.numel = places_of([how.low_numel(shape) for shape in shapes])
        # the matrices are alike: the first one speaks for all
        self._slabs, self._even = how.slabs(shapes[0]), how.even(shapes[0])
        tile_set, rank = how.tiles, how.low_rank.rank
        self._project_tile = first = tile_set.project if self._even[0] else tile_set.uneven_project
        self._back_tile = last = tile_set.back if self._even[1] else tile_set.uneven_back

        # the tiles of each matrix: of its projected gradient, and of itself, side by side in strips
        outers = [-(-how.outer_and_terms(shape)[0] // first.outer) for shape in shapes]
        tiles = [outer * -(-rank // part_of(first.ranks, rank)) for outer in outers]
        backs = [-(-rows // last.rows) * -(-columns // last.width) for rows, columns in shapes]
        if how.kernel == BY_SHAPE:
            how = replace(how, kernel=how.by_shape(sum(tiles)))
        self.how, self._apart = how, self._slabs > 1 and sum(tiles) < FEW
        # with few tiles of many slabs each slab has a program, so that all processors have work
        if self._apart:
            tiles = [count * self._slabs for count in tiles]
        self._project_tiles = Chunks(tiles, ONE_TILE, device)
        # int32, one count a tile; zeros before and behind each launch
        arrivals = sum(tiles) // self._slabs if self._apart and how.fused else 0
        self._arrived = torch.zeros(arrivals, dtype=torch.int32, device=device)
        self._back_tiles = Chunks(backs, ONE_TILE, device)

        # the last launch goes by descriptors where all matrices are of whole tiles
        tile = how.whole_tile(device, apply)
        is_whole = tile is not None and all(tile.divides(shape) for shape in shapes)
        self._whole = (
            whole_launch(tile, shapes, how.low_rank, device) if tile and is_whole else None
        )

        # tiles of the projections, and how many numbers each copy takes
        projection_shapes = [how.low_rank.projection_shape(shape) for shape in shapes]
        rounds = [
            -(-rows // ROUNDED) * -(-columns // ROUNDED) for rows, columns in projection_shapes
        ]
        self._round_tiles = Chunks(rounds, ONE_TILE, device)
        self._copies = [-(-torch.Size(shape).numel() // UNIT) * UNIT for shape in projection_shapes]
        # int64 [ROW_COUNT, matrices]; addresses come with each step
        self._table, self._rows = DeviceTable(device), _rows(shapes, groups, places)

    @property
    def rounded_numel(self) -> int:
        """Numbers of `how.projection` that `round` makes."""
        return (2 if self.how.turns else 1) * sum(self._copies) * self.how.tiles.ahead

    @property
    def slabs_numel(self) -> int:
        """fp32 numbers of slabs, which are added up behind the launch; 0 where it does this."""
        return self.numel * self._slabs * self._apart

    def addresses(self, whole: torch.Tensor) -> numpy.ndarray:
        """Returns the addresses of projected gradients or directions in a workspace of `numel`."""
        begins: numpy.ndarray = whole.data_ptr() + self._firsts * whole.element_size()
        return begins

    def look(self, tensors: Mapping[str, Any], projections: Any, direction: torch.Tensor) -> None:
        """Notes the addresses of tensors, by the slots of what the last launch writes.

        The gradients are among them. projections: addresses; direction: the directions' workspace.
        """
        for slot in self._apply.slots:
            self._rows[self._apply.rows[slot]] = tensors[slot]
        # until `round` has made copies the factors are the projections themselves
        for row in (kernel.PROJECTION, kernel.FIRST_FACTOR, kernel.LAST_FACTOR):
            self._rows[row.value] = projections
        self._rows[kernel.DIRECTION.value] = self.addresses(direction)

    def round(self, room: torch.Tensor) -> None:
        """Makes the projections as products take them, one behind another, in a room for them."""
        how, count, size = self.how, 2 if self.how.turns else 1, room.element_size()
        # straight copies of all projections, then, for tf32, the turned ones
        straight = room.data_ptr() + size * numpy.cumsum([0, *self._copies[:-1]])
        turned = straight + size * (count - 1) * sum(self._copies)
        # terms lie one behind another: for one launch straight, for the other turned
        first, last = (straight, turned) if how.low_rank.side == RIGHT else (turned, straight)
        self._rows[kernel.FIRST_FACTOR.value], self._rows[kernel.LAST_FACTOR.value] = first, last
        # not even: the last tiles of a projection may not be whole
        options = {"PRODUCT": self._product(how.formats.grad, False), "BLOCK": ROUNDED}
        tables = (self._table.update(self._rows), self._round_tiles.table)
        arguments, launch_options = (*tables, len(self._shapes)), {"SPAN": ONE_TILE.span}
        call(kernel.round_kernel, self._round_tiles.count, arguments, {**options, **launch_options})

    def project(
        self,
        low: torch.Tensor,
        slabs: torch.Tensor,
        plan: TritonPlan | None = None,
        scalars: torch.Tensor | None = None,
        controls: torch.Tensor | None = None,
    ) -> None:
        """Projects the gradients into a workspace; plan: of Adam's step that the launch takes.

        slabs: of `slabs_numel`, or `low` where that is 0.
        """
        how, tile, even = self.how, self._project_tile, self._even[0]
        # without a plan the launch only stores sums
        step_table, step, count = None, None, 0
        if plan is not None and scalars is not None:
            step_table, count = plan.table(), scalars.shape[1]
            step = KernelSpec(plan.formats, plan.rule, controls is not None)
            # moments have to be aligned, too
            even = even and bool(plan.rows[table_rows.ALIGNED.value].all())
        options: dict[str, object] = {
            "PRODUCT": replace(self._product(how.formats.grad, even), turned=how.turns),
            "STEP": step,
            "SPAN": ONE_TILE.span,
            "SLAB": SLAB,
            "SLABS": self._slabs,
            "APART": self._apart,
            "OUTER": tile.outer,
            "INNER": tile.inner,
            "RANKS": part_of(tile.ranks, how.low_rank.rank),
            "PIECE": STEPPED,
            "num_warps": tile.warps,
            "num_stages": tile.stages,
        }
        # with slabs apart the sums go to the slabs' workspace
        self._rows[kernel.LOW.value] = self.addresses(slabs)
        tables = (self._table.update(self._rows), self._project_tiles.table, step_table)
        numbers = (len(self._shapes), self.numel, count)
        arguments = (*tables, scalars, controls, self._arrived, *numbers)
        call(kernel.project_kernel, self._project_tiles.count, arguments, options)
        # behind it, on the same stream, the slabs become the projected gradients
        if self._apart and step is None:
            options = {"SLABS": self._slabs, "BLOCK": ADDED}
            programs = -(-self.numel // ADDED)
            call(kernel.add_slabs_kernel, programs, (slabs, low, self.numel), options)

    def project_back(self, scalars: torch.Tensor, controls: torch.Tensor | None) -> None:
        """Projects the directions back, and updates."""
        how, whole = self.how, self._whole
        # fused, Adam's step has rounded the directions already
        product = self._product(how.direction.weight, whole is not None or self._even[1])
        options: dict[str, object] = {
            "PRODUCT": replace(product, turned=how.turned, form_rounded=how.fused),
            "FORMATS": self._apply,
            "RULE": self._rule,
            "CONTROLLED": controls is not None,
        }
        table, numbers = self._table.update(self._rows), (len(self._shapes), scalars.shape[1])
        if whole is not None and product.even:  # else something is not aligned
            whole((table, scalars, controls, *numbers), options)
            return
        # else by pointers, a strip of tiles a program
        tile = self._back_tile
        options |= {
            "SPAN": ONE_TILE.span,
            "ROWS": tile.rows,
            "COLUMNS": tile.columns,
            "STRIP": tile.strip,
            "INNER": part_of(tile.inner, how.low_rank.rank),
            "num_warps": tile.warps,
            "num_stages": tile.stages,
        }
        # a limit for NVIDIA's GPUs alone
        if tile.registers is not None and torch.version.hip is None:
            options["maxnreg"] = tile.registers
        arguments = (table, self._back_tiles.table, scalars, controls, *numbers)
        call(kernel.back_project_kernel, self._back_tiles.count, arguments, options)

    def _product(self, form: Format, even: bool) -> Product:
        """Returns a launch's product; form: of the matrix; even: whether all shapes are."""
        # one address that is not of whole 16 bytes makes the launch go by masks
        used = [*self._apply.rows.values(), kernel.FIRST_FACTOR.value, kernel.LAST_FACTOR.value]
        aligned = not bool((numpy.bitwise_or.reduce(self._rows[used], None) & 15).any())
        low_rank, precision = self.how.low_rank, self.how.low_rank.precision
        on_left, even = low_rank.side == LEFT, even and aligned
        arguments = (form, self.how.projection, precision, on_left, even, low_rank.rank)
        return Product(*arguments, projection_rounded=self.how.tiles.ahead)


class ProjectionWave:
    """Steps some matrices of a batch, all with as many slabs and of even shape, or not."""

    def __init__(
        self,
        how: How,
        device: torch.device,
        shapes: Sequence[torch.Size],
        groups: Sequence[int],
        places: Sequence[Place],
    ) -> None:
        self._device = device
        # the last launch applies updates in place, by the weights' and masters' formats
        arguments = (apply_formats(how.formats), GALORE_APPLY, device, shapes, groups, places)
        self._products = Products(how, *arguments)
        self.how = how = self._products.how
        assert how.formats.matrix is not None
        # Adam's step of the projected gradients, each at its place in the parameter's draws
        sizes = [how.low_numel(shape) for shape in shapes]
        low_places = list(map(how.formats.matrix.low_place, places, shapes))
        low = (how.direction, GALORE_DIRECTION, sizes, groups, device, None, low_places)
        self._direction = TritonPlan(*low)
        # the workspace's four areas, one behind another
        products, wide = self._products, how.direction.dtype("weight")
        assert how.projection.dtype is not None
        self._dtypes = (torch.float32, wide, how.projection.dtype, torch.float32)
        # what is projected, directions if not in its place, rounded projections, slabs
        numels = [products.numel, 0 if how.shares_low else products.numel]
        numels += [products.rounded_numel, products.slabs_numel if how.grouped else 0]
        sizes = [n * dtype.itemsize for n, dtype in zip(numels, self._dtypes, strict=True)]
        self._areas, self.workspace_bytes = areas_of(sizes)

    def step(
        self,
        addresses: Mapping[str, numpy.ndarray],
        grads: Sequence[torch.Tensor],
        projections: Sequence[torch.Tensor],
        workspace: torch.Tensor,
        scalars: torch.Tensor,
        controls: torch.Tensor | None,
    ) -> None:
        """Takes one step of the wave's matrices; addresses: of their tensors, by slot."""
        # fp32 sums, directions as the last product takes them, rounded projections, fp32 slabs
        how, products = self.how, self._products
        low, direction, rounded, slabs = (
            workspace[area].view(dtype)
            for area, dtype in zip(self._areas, self._dtypes, strict=True)
        )
        direction = low if how.shares_low else direction
        # all launches follow each other on the current stream
        products.look(addresses, addresses[PROJECTION], direction)
        if how.tiles.ahead:
            products.round(rounded)
        self._look_low(addresses, low, direction)
        # one launch over all matrices, which may also take Adam's step; or torch, one by one
        if how.grouped:
            step = (self._direction, scalars, controls) if how.fused else ()
            products.project(low, slabs if slabs.numel() else low, *step)
        else:
            self._project_by_torch(low, grads, projections)
        # reads the projected gradients, writes directions
        if not how.fused:
            self._direction.step(scalars, controls)
        products.project_back(scalars, controls)

    def _project_by_torch(
        self, low: torch.Tensor, grads: Sequence[torch.Tensor], projections: Sequence[torch.Tensor]
    ) -> None:
        # where each projected gradient begins, in numbers
        firsts = (self._products.addresses(low) - low.data_ptr()) // low.element_size()
        for first, grad, projection in zip(firsts.tolist(), grads, projections, strict=True):
            grad = self.how.formats.grad.decode_reference(grad)
            low_grad = projected(grad, projection, self.how.low_rank.side)
            low[first : first + low_grad.numel()] = low_grad.view(-1)

    def _look_low(
        self, addresses: Mapping[str, Any], low: torch.Tensor, direction: torch.Tensor
    ) -> None:
        """Tells Adam's step where things lie; the direction goes where the weight is."""
        plan, products = self._direction, self._products
        # Adam's step takes a projected gradient as gradient, a direction as weight
        low_addresses = {"grad": products.addresses(low), "weight": products.addresses(direction)}
        everything = {**addresses, **low_addresses}
        for slot, row in plan.addresses.items():
            row[:] = everything[slot]
        plan.stale = True


def areas_of(sizes: Sequence[int], begin: int = 0) -> tuple[list[slice], int]:
    """Returns areas of so many bytes in a memory, one behind another, and where the last ends."""
    ends = list(accumulate((-(-size // ALIGNED) * ALIGNED for size in sizes), initial=begin))
    return [slice(first, first + size) for first, size in zip(ends, sizes, strict=False)], ends[-1]


def places_of(sizes: Sequence[int]) -> tuple[numpy.ndarray, int]:
    """Returns where matrices of so many numbers begin in a workspace, and how many these take."""
    padded = [-(-size // UNIT) * UNIT for size in sizes]
    return numpy.cumsum([0, *padded[:-1]]), sum(padded)


def _rows(
    shapes: Sequence[torch.Size], groups: Sequence[int], places: Sequence[Place]
) -> numpy.ndarray:
    """Makes the table without addresses."""
    rows = numpy.zeros((kernel.ROW_COUNT, len(shapes)), dtype=numpy.int64)
    rows[table_rows.WEIGHT_ROWS.value] = [shape[0] for shape in shapes]
    rows[table_rows.WEIGHT_COLUMNS.value] = [shape[1] for shape in shapes]
    rows[table_rows.GROUP.value] = groups
    # of the random words: which parameter, and where in it the matrix begins
    rows[table_rows.NUMBER.value] = [place.number for place in places]
    rows[table_rows.FIRST_ELEMENT.value] = [place.first for place in places]
    return rows
