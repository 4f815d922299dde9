"""Some matrices of GaLore's step in launches together: project, Adam's step, project back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import numpy
import torch

from megaopt.kernels.calling import call
from megaopt.kernels.chunks import rows as table_rows
from megaopt.kernels.chunks.batch import Formats
from megaopt.kernels.chunks.spec import KernelSpec
from megaopt.kernels.chunks.table import Chunks, DeviceTable, Geometry
from megaopt.kernels.formats import WEIGHTS, Format
from megaopt.kernels.galore import kernel
from megaopt.kernels.galore.products import BF16, IEEE, TF32, Product
from megaopt.kernels.galore.rule import LEFT, RIGHT, SLAB, LowRank, projected
from megaopt.kernels.galore.tiles import (
    BARRIERS,
    PARTS,
    TURN,
    ProjectionTiles,
    WholeTile,
    operand_bytes,
    padded,
    part_of,
)
from megaopt.kernels.matrix.exchange import ALIGNED
from megaopt.kernels.matrix.plan import (
    FLOAT32,
    apply_formats,
    inner_formats,
)
from megaopt.kernels.optional_triton import INTERPRETED, set_allocator
from megaopt.kernels.place import Place
from megaopt.kernels.products.tables import SHARED_MEMORY, has_room, processors, scratch
from megaopt.kernels.rules import Rule
from megaopt.kernels.rules.galore import GALORE_APPLY, GALORE_DIRECTION
from megaopt.kernels.rules.matrix import PROJECTION
from megaopt.kernels.step.launch import TritonPlan

BY_SHAPE = "by shape"
"""Fused or grouped, whichever is faster."""
FUSED_ON_LEFT = 256
"""Tiles, below which a launch of bf16 on the left is fused; others always are.

One H100, tf32 at rank 128, ms of all launches, grouped and fused: one matrix of 4096 x 11008 on the
left 0.393 and 0.340, eight, in waves of 344 tiles, 2.285 and 2.425; one of 4096 x 4096 on the right
0.257 and 0.172, eight 0.922 and 0.825. bf16, 112 of Llama-7B's: 16.82 and 16.78. One H200, by
strips, tf32, one of 4096 x 11008 on the left at ranks 64, 128, 256: 0.213 and 0.208, 0.260 and
0.254, 0.570 and 0.479, as fused launches alone turn the direction.
"""
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


@dataclass(frozen=True)
class How:
    """The settings that all matrices of a batch share."""

    formats: Formats
    low_rank: LowRank
    kernel: str
    """The kernel, one of LAUNCHED, or BY_SHAPE."""
    tiles: ProjectionTiles

    # made of these fields
    grouped: bool = field(init=False, compare=False)
    """The gradients are projected by one launch, not by torch."""
    fused: bool = field(init=False, compare=False)
    """The launch that projects takes Adam's step."""
    direction: Formats = field(init=False, compare=False)
    """The formats of Adam's step, which writes the direction rounded for the last product."""
    projection: Format = field(init=False, compare=False)
    """The format in which the launches find the projections."""
    turns: bool = field(init=False, compare=False)
    """The launches find right factors turned: tensor cores take TF32 in no other order."""
    turned: bool = field(init=False, compare=False)
    """The last launch finds its right factor turned."""
    shares_low: bool = field(init=False, compare=False)
    """The direction takes the place of the projected gradient."""

    def __post_init__(self) -> None:
        side, precision, fused = self.low_rank.side, self.low_rank.precision, self.kernel == "fused"
        ahead, is_bf16 = self.tiles.ahead, precision == BF16
        formats = replace(self.formats, writes_grad=False)  # a projected one, which nobody reads
        direction = inner_formats(formats, WEIGHTS["bfloat16"] if is_bf16 else FLOAT32)
        turns = ahead and precision == TF32
        vars(self).update(
            grouped=self.kernel != "hybrid" or precision != IEEE,
            fused=fused,
            direction=direction,
            projection=WEIGHTS["bfloat16"] if ahead and is_bf16 else FLOAT32,
            turns=turns,
            turned=turns and (fused or side == RIGHT),
            shares_low=direction.weight is FLOAT32 and not (fused and turns and side == LEFT),
        )

    def low_numel(self, shape: torch.Size) -> int:
        """Returns the numbers of a projected gradient."""
        return torch.Size(self.low_rank.low_shape(shape)).numel()

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


class WholeLaunch:
    """The last launch over matrices of whole tiles, by strips or by blocks."""

    def __init__(
        self, tile: WholeTile, shapes: Sequence[torch.Size], low_rank: LowRank, device: torch.device
    ) -> None:
        # int64 [matrices], tiles one below another and one beside another
        heights, widths = (numpy.array(shapes) // (tile.rows, tile.columns)).T
        # the programs that have room on the card at a time
        most = tile.at_once * processors(device)
        self._options: dict[str, object] = {"ROWS": tile.rows, "COLUMNS": tile.columns}
        self._options |= {"num_warps": tile.warps, "num_stages": tile.stages}
        self._numbers: tuple[int, ...] = ()
        if tile.inner is not None:
            # by blocks each tile is one piece of work
            self._name, tiles = "back_blocks_kernel", heights * widths
            self._options["INNER"] = tile.inner // operand_bytes(low_rank)
        else:
            # rounds of strips, times what the longest strip takes
            def time(down: int) -> float:
                strips = int((-(-heights // down) * widths).sum())
                return -(-strips // most) * (down + TURN)

            # of a few lengths that which takes the least time, where no program is done early
            down = min((-(-int(heights.max()) // parts) for parts in PARTS), key=time)
            self._name, tiles = "back_strips_kernel", -(-heights // down) * widths
            self._options |= {"RANKS": padded(low_rank.rank), "STAGES": tile.stages}
            self._numbers = (down,)
        self._chunks = Chunks(tiles.tolist(), ONE_TILE, device)
        self._programs = min(self._chunks.count, most)

    def __call__(self, arguments: tuple[Any, ...], options: dict[str, object]) -> None:
        """Launches it; arguments, options: those that it has in common with back_project_kernel."""
        set_allocator(scratch)  # for descriptors
        (table, *rest), all_options = arguments, {**options, **self._options}
        everything = (table, self._chunks.table, *rest, *self._numbers)
        call(getattr(kernel, self._name), self._programs, everything, all_options)


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
            # fused, where that is the faster kernel of a launch of so many tiles
            few = how.turns or how.low_rank.side == RIGHT or sum(tiles) < FUSED_ON_LEFT
            fused = few and is_fused(how.formats.moments)
            how = replace(how, kernel="fused" if fused else "grouped")
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
        self._whole = None
        if tile and all(m % tile.rows == 0 and n % tile.columns == 0 for m, n in shapes):
            self._whole = WholeLaunch(tile, shapes, how.low_rank, device)

        # tiles of the projections, and how many numbers each copy takes
        projection_shapes = [how.low_rank.projection_shape(shape) for shape in shapes]
        rounds = [
            -(-rows // ROUNDED) * -(-columns // ROUNDED) for rows, columns in projection_shapes
        ]
        self._round_tiles = Chunks(rounds, ONE_TILE, device)
        self._copies = [-(-torch.Size(shape).numel() // UNIT) * UNIT for shape in projection_shapes]
        # int64 [ROW_COUNT, matrices]; addresses come with each step
        self._table, self._rows = DeviceTable(device), _rows(shapes, groups, places)

        self.rounded_numel = (2 if how.turns else 1) * sum(self._copies) * how.tiles.ahead
        """Numbers of `how.projection` that `round` makes."""
        self.slabs_numel = self.numel * self._slabs * self._apart
        """fp32 numbers of slabs, which are added up behind the launch; 0 where it does this."""

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
        # Adam's step takes a projected gradient as gradient, a direction as weight
        plan = self._direction
        low_addresses = {"grad": products.addresses(low), "weight": products.addresses(direction)}
        for slot, row in plan.addresses.items():
            row[:] = {**addresses, **low_addresses}[slot]
        plan.stale = True
        # one launch over all matrices, which may also take Adam's step; or torch, one by one
        if how.grouped:
            step = (plan, scalars, controls) if how.fused else ()
            products.project(low, slabs if slabs.numel() else low, *step)
        else:
            # where each projected gradient begins, in numbers
            firsts = (products.addresses(low) - low.data_ptr()) // low.element_size()
            for first, grad, projection in zip(firsts.tolist(), grads, projections, strict=True):
                grad = how.formats.grad.decode_reference(grad)
                low_grad = projected(grad, projection, how.low_rank.side)
                low[first : first + low_grad.numel()] = low_grad.view(-1)
        # reads the projected gradients, writes directions
        if not how.fused:
            plan.step(scalars, controls)
        products.project_back(scalars, controls)


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
