"""The step of low rank in three parts: torch's product, the step's launch, one launch for the rest.

All matrices of a batch go through each launch together.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy
import torch

from megaopt.kernels.calling import call
from megaopt.kernels.formats import NONE
from megaopt.kernels.lowrank import kernel
from megaopt.kernels.lowrank.formats import apply_formats, direction_formats
from megaopt.kernels.lowrank.parts import WHOLE, Parts
from megaopt.kernels.lowrank.products import projected
from megaopt.kernels.lowrank.reference import refreshed_with_energy
from megaopt.kernels.lowrank.spec import RIGHT
from megaopt.kernels.optional_triton import INTERPRETED
from megaopt.kernels.rules.galore import GALORE_APPLY, GALORE_DIRECTION
from megaopt.kernels.step import rows as table_rows
from megaopt.kernels.step.batch import Buffers, Formats
from megaopt.kernels.step.draws import Place, in_order
from megaopt.kernels.step.launch import TritonPlan
from megaopt.kernels.step.table import Chunks, DeviceTable, Geometry

TILE = (128, 128, 32) if INTERPRETED else (64, 64, 32)
"""Rows and columns of a tile, and of the rank at a time."""
# Compiled for sm_90, with fp32 masters and with remainders: 188 and 193 registers with 8 warps, and
# nothing spilled; with 4 warps 255, and 496 and 224 bytes. Not measured on a GPU yet.
WARPS = 8
ONE_TILE = Geometry(1, 1, span=4 if INTERPRETED else 32)
"""Chunks of one tile each."""


class HybridPlan:
    """Steps the matrices of one combination of formats, side and rank.

    Args:
        formats: of every buffer; `low_rank` is set, and no master has a scale.
        refresh: "subspace" or "svd", how projections are made.
        shapes: of the matrices.
        groups: for each matrix, its row in the scalars that `step` is given.
        device: a CUDA device, or the CPU under Triton's interpreter.
        places: of each matrix in its parameter, for random bits.
        tile: for tests.
    """

    def __init__(
        self,
        formats: Formats,
        refresh: str,
        shapes: Sequence[torch.Size],
        groups: Sequence[int],
        device: torch.device,
        places: Sequence[Place] | None = None,
        tile: tuple[int, int, int] = TILE,
    ) -> None:
        assert formats.low_rank is not None
        self.formats, self.low_rank = formats, formats.low_rank
        self.by_svd, self.tile = refresh == "svd", tile
        self.addresses: dict[str, numpy.ndarray] = {}  # gradients are projected by torch
        self.stale = True
        self.projections: Sequence[torch.Tensor] = ()
        """Of each matrix, for the coming step."""
        self._buffers: Buffers = {}
        places = places or in_order(len(shapes))
        pairs = zip(places, shapes, strict=True)
        low_places = [self.low_rank.low_place(place, shape) for place, shape in pairs]
        sizes = [shape.numel() for shape in shapes]
        low_sizes = [torch.Size(self.low_rank.low_shape(shape)).numel() for shape in shapes]
        low = direction_formats(formats)
        own = (low_sizes, groups, device, None, low_places)
        self._direction = TritonPlan(low, GALORE_DIRECTION, *own)
        measured = Formats(formats.grad, formats.weight, NONE, (), ())
        self._measured = TritonPlan(measured, GALORE_APPLY, sizes, groups, device)
        self._apply = apply_formats(formats)
        tiles = [-(-rows // tile[0]) * -(-columns // tile[1]) for rows, columns in shapes]
        self._tiles = Chunks(tiles, ONE_TILE, device)
        self._table, self._rows = DeviceTable(device), _rows(shapes, groups, places)

    def look(self, buffers: Buffers) -> None:
        """Notes the buffers for the step."""
        self._buffers = buffers
        self._measured.look({slot: buffers[slot] for slot in ("grad", "weight")})

    def accumulate(self, bins: torch.Tensor) -> None:
        """Adds the squares of the whole gradients to the bins of megaopt.kernels.norm."""
        self._measured.accumulate(bins)

    def refreshed(
        self, index: int, known: torch.Tensor | None, seed: int, parts: Parts = WHOLE
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As LowRankReferencePlan.refreshed."""
        how = (self.by_svd, seed, parts)
        return refreshed_with_energy(self._grad(index), self.low_rank, known, *how)

    def step(
        self,
        scalars: Sequence[tuple[float, ...]] | torch.Tensor,
        controls: torch.Tensor | None = None,
    ) -> None:
        """One step, by `projections`; arguments as megaopt.kernels.backends.Plan has them."""
        side, own = self.low_rank.side, enumerate(self.projections)
        low = [projected(self._grad(index), projection, side) for index, projection in own]
        slots = {"grad": low, "weight": low}  # the direction takes the gradient's place
        needed = self._direction.formats.slots
        self._direction.look({slot: slots.get(slot) or self._buffers[slot] for slot in needed})
        rows = self._direction.on_device(scalars)
        self._direction.step(rows, controls)
        self._back_project(low, rows, controls)
        self._buffers = {}  # gradients may go

    def _grad(self, index: int) -> torch.Tensor:
        return self.formats.grad.decode_reference(self._buffers["grad"][index])

    def _back_project(
        self, low: list[torch.Tensor], scalars: torch.Tensor, controls: torch.Tensor | None
    ) -> None:
        for slot in self._apply.slots[1:]:
            self._rows[self._apply.rows[slot]] = list(map(_address, self._buffers[slot]))
        factors = (low, self.projections)
        left, right = factors if self.low_rank.side == RIGHT else factors[::-1]
        self._rows[kernel.LEFT_FACTOR.value] = list(map(_address, left))
        self._rows[kernel.RIGHT_FACTOR.value] = list(map(_address, right))
        table, sizes = self._table.update(self._rows), (self._rows.shape[1], scalars.shape[1])
        options = {
            "FORMATS": self._apply,
            "RULE": GALORE_APPLY,
            "CONTROLLED": controls is not None,
            "RANK": self.low_rank.rank,
            **dict(zip(("ROWS", "COLUMNS", "INNER"), self.tile, strict=True)),
            "SPAN": ONE_TILE.span,
            "num_warps": WARPS,
        }
        arguments = (table, self._tiles.table, scalars, controls, *sizes)
        if self._tiles.count:
            call(kernel.back_project_kernel, self._tiles.count, arguments, options)

    def cast(self) -> None:
        """Nothing: these weights are stored with the step."""

    def move_scales(self, histories: Sequence[torch.Tensor]) -> None:
        """Nothing: these weights have no scales."""


def _address(tensor: torch.Tensor) -> int:
    return tensor.data_ptr()


def _rows(
    shapes: Sequence[torch.Size], groups: Sequence[int], places: Sequence[Place]
) -> numpy.ndarray:
    """The table without addresses."""
    rows = numpy.zeros((kernel.ROW_COUNT, len(shapes)), dtype=numpy.int64)
    rows[table_rows.WEIGHT_ROWS.value] = [shape[0] for shape in shapes]
    rows[table_rows.WEIGHT_COLUMNS.value] = [shape[1] for shape in shapes]
    rows[table_rows.GROUP.value] = groups
    rows[table_rows.NUMBER.value] = [place.number for place in places]
    rows[table_rows.FIRST_ELEMENT.value] = [place.first for place in places]
    return rows
