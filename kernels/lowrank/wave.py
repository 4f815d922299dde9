"""The three launches over a few matrices, as many as a small workspace has room for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy
import torch

from megaopt.kernels.calling import call
from megaopt.kernels.formats import WEIGHTS, Format
from megaopt.kernels.lowrank import kernel, project, tables
from megaopt.kernels.lowrank.formats import apply_formats
from megaopt.kernels.lowrank.how import FLOAT32, How
from megaopt.kernels.lowrank.operands import BF16
from megaopt.kernels.lowrank.product import Product
from megaopt.kernels.lowrank.products import projected
from megaopt.kernels.lowrank.spec import LEFT
from megaopt.kernels.lowrank.tiles import PROGRAMS
from megaopt.kernels.optional_triton import INTERPRETED
from megaopt.kernels.rules.galore import GALORE_APPLY, GALORE_DIRECTION
from megaopt.kernels.step import rows as table_rows
from megaopt.kernels.step.batch import Buffers
from megaopt.kernels.step.draws import Place
from megaopt.kernels.step.launch import TritonPlan
from megaopt.kernels.step.table import Chunks, DeviceTable, Geometry

ONE_TILE = Geometry(1, 1, span=4 if INTERPRETED else 32)
"""Chunks of one tile each."""
ADDED = 1024
"""Numbers that a program adds from slabs."""
UNIT = 128
"""Matrices begin in the workspace at multiples of so many numbers."""


class Wave:
    """Steps some matrices of a batch, all with as many slabs and of even shape, or not.

    Args:
        how: as of all of the batch.
        device: a CUDA device, or the CPU under Triton's interpreter.
        shapes: of the wave's own matrices.
        groups: for each, its row in the scalars that `step` is given.
        places: of each matrix in its parameter, for random bits.
    """

    def __init__(
        self,
        how: How,
        device: torch.device,
        shapes: Sequence[torch.Size],
        groups: Sequence[int],
        places: Sequence[Place],
    ) -> None:
        self.how, self.shapes, self.device = how, shapes, device
        self._casts = how.casts
        self.projection = WEIGHTS["bfloat16"] if self._casts else FLOAT32
        """The format in which the launches find the projections."""
        sizes = [how.low_numel(shape) for shape in shapes]
        padded = [-(-size // UNIT) * UNIT for size in sizes]
        self._firsts, self._numel = numpy.cumsum([0, *padded[:-1]]), sum(padded)
        pairs = zip(places, shapes, strict=True)
        low_places = [how.low_rank.low_place(place, shape) for place, shape in pairs]
        own = (how.direction, GALORE_DIRECTION, sizes, groups, device, None, low_places)
        self._direction, self._apply = TritonPlan(*own), apply_formats(how.formats)
        tiles = [how.project_count(shape) for shape in shapes]
        self._slabs, self._even = how.slabs(shapes[0]), how.even(shapes[0])
        self._apart = self._slabs > 1 and sum(tiles) < PROGRAMS
        if self._apart:
            tiles = [count * self._slabs for count in tiles]
        self._project_tiles = Chunks(tiles, ONE_TILE, device)
        self._back_tiles = Chunks([how.back_count(shape) for shape in shapes], ONE_TILE, device)
        self._table, self._rows = DeviceTable(device), _rows(shapes, groups, places)

    def step(
        self,
        buffers: Buffers,
        projections: Sequence[torch.Tensor],
        scalars: Sequence[tuple[float, ...]] | torch.Tensor,
        controls: torch.Tensor | None,
    ) -> None:
        """One step; buffers, projections: of the wave's matrices."""
        projections = self._cast(projections) if self._casts else projections
        low = self._new(torch.float32)
        direction = low if self.how.direction.weight is FLOAT32 else self._new(torch.bfloat16)
        self._note(buffers, projections, low, direction)
        if self.how.grouped:
            self._project(low)
        else:
            self._project_by_torch(low, buffers["grad"], projections)
        scalars = self._direction.on_device(scalars)
        self._step_low(buffers, low, direction, scalars, controls)
        self._back_project(scalars, controls)

    def _cast(self, projections: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """As bf16, one behind another."""
        sizes = [-(-each.numel() // UNIT) * UNIT for each in projections]
        room = torch.empty(sum(sizes), dtype=torch.bfloat16, device=self.device)
        pairs = zip(torch.split(room, sizes), projections, strict=True)
        cast = [own[: each.numel()].view(each.shape) for own, each in pairs]
        torch._foreach_copy_(cast, list(projections))
        return cast

    def _new(self, dtype: torch.dtype, count: int = 1) -> torch.Tensor:
        return torch.empty(count * self._numel, dtype=dtype, device=self.device)

    def _addresses(self, whole: torch.Tensor) -> numpy.ndarray:
        """Of each matrix's part of a workspace."""
        found: numpy.ndarray = whole.data_ptr() + self._firsts * whole.element_size()
        return found

    def _note(
        self,
        buffers: Buffers,
        projections: Sequence[torch.Tensor],
        low: torch.Tensor,
        direction: torch.Tensor,
    ) -> None:
        """Writes all addresses into the table."""
        for slot in self._apply.slots:
            self._rows[self._apply.rows[slot]] = list(map(_address, buffers[slot]))
        self._rows[tables.PROJECTION.value] = list(map(_address, projections))
        self._rows[tables.LOW.value] = self._addresses(low)
        self._rows[tables.DIRECTION.value] = self._addresses(direction)

    def _project_by_torch(
        self, low: torch.Tensor, grads: Sequence[torch.Tensor], projections: Sequence[torch.Tensor]
    ) -> None:
        precision, side = self.how.precision, self.how.low_rank.side
        own = zip(self._firsts.tolist(), grads, projections, strict=True)
        for first, grad, projection in own:
            if precision != BF16 or grad.dtype != torch.bfloat16:
                grad = self.how.formats.grad.decode_reference(grad)
            found = projected(grad, projection, side, precision)
            low[first : first + found.numel()] = found.view(-1)

    def _project(self, low: torch.Tensor) -> None:
        how, own = self.how, self.how.project_tile(self.shapes[0])
        options = {
            "PRODUCT": self._product(how.formats.grad, self._even[0]),
            "SPAN": ONE_TILE.span,
            "SLABS": self._slabs,
            "APART": self._apart,
            "OUTER": own.outer,
            "INNER": own.inner,
            "RANKS": own.ranks_of(how.low_rank.rank),
            "num_warps": own.warps,
            "num_stages": own.stages,
        }
        slabs = self._new(torch.float32, self._slabs) if self._apart else low
        self._rows[tables.LOW.value] = self._addresses(slabs)
        arguments = (self._updated(), self._project_tiles.table, len(self.shapes), self._numel)
        call(project.project_kernel, self._project_tiles.count, arguments, options)
        if self._apart:
            options = {"SLABS": self._slabs, "BLOCK": ADDED}
            programs = -(-self._numel // ADDED)
            call(project.add_slabs_kernel, programs, (slabs, low, self._numel), options)

    def _step_low(
        self,
        buffers: Buffers,
        low: torch.Tensor,
        direction: torch.Tensor,
        scalars: torch.Tensor,
        controls: torch.Tensor | None,
    ) -> None:
        """Adam's step of the projected gradients; their direction goes where the weight is."""
        plan = self._direction
        moments = [slot for slot in plan.formats.slots if slot not in ("grad", "weight")]
        found: dict[str, Any] = {slot: list(map(_address, buffers[slot])) for slot in moments}
        found |= {"grad": self._addresses(low), "weight": self._addresses(direction)}
        for slot, row in plan.addresses.items():
            row[:] = found[slot]
        plan.stale = True
        plan.step(scalars, controls)

    def _back_project(self, scalars: torch.Tensor, controls: torch.Tensor | None) -> None:
        how, own = self.how, self.how.back_tile(self.shapes[0])
        product = self._product(how.direction.weight, self._even[1])
        options = {
            "PRODUCT": product,
            "SPAN": ONE_TILE.span,
            "FORMATS": self._apply,
            "RULE": GALORE_APPLY,
            "CONTROLLED": controls is not None,
            "ROWS": own.rows,
            "COLUMNS": own.columns,
            "STRIP": own.strip,
            "AHEAD": own.ahead and product.even,
            "INNER": own.inner_of(how.low_rank.rank),
            "num_warps": own.warps,
            "num_stages": own.stages,
        }
        if own.registers is not None and torch.version.hip is None:
            options["maxnreg"] = own.registers
        sizes = (len(self.shapes), scalars.shape[1])
        arguments = (self._updated(), self._back_tiles.table, scalars, controls, *sizes)
        call(kernel.back_project_kernel, self._back_tiles.count, arguments, options)

    def _updated(self) -> torch.Tensor:
        return self._table.update(self._rows)

    def _product(self, form: Format, even: bool) -> Product:
        """A launch's; form: of the matrix; even: whether all shapes are."""
        used = [*self._apply.rows.values(), tables.PROJECTION.value]
        aligned = not bool((numpy.bitwise_or.reduce(self._rows[used], None) & 15).any())
        low_rank, precision = self.how.low_rank, self.how.precision
        on_left, even = low_rank.side == LEFT, even and aligned
        return Product(form, self.projection, precision, on_left, even, low_rank.rank)


def _address(tensor: torch.Tensor) -> int:
    return tensor.data_ptr()


def _rows(
    shapes: Sequence[torch.Size], groups: Sequence[int], places: Sequence[Place]
) -> numpy.ndarray:
    """The table without addresses."""
    rows = numpy.zeros((tables.ROW_COUNT, len(shapes)), dtype=numpy.int64)
    rows[table_rows.WEIGHT_ROWS.value] = [shape[0] for shape in shapes]
    rows[table_rows.WEIGHT_COLUMNS.value] = [shape[1] for shape in shapes]
    rows[table_rows.GROUP.value] = groups
    rows[table_rows.NUMBER.value] = [place.number for place in places]
    rows[table_rows.FIRST_ELEMENT.value] = [place.first for place in places]
    return rows
