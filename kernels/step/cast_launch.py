"""The plan of a step of fp8 weights: which launches, and what comes between them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy
import torch

from megaopt.kernels.calling import call
from megaopt.kernels.optional_triton import INTERPRETED
from megaopt.kernels.rules import Rule
from megaopt.kernels.step import rows as table_rows
from megaopt.kernels.step.batch import Buffers, Extent, Formats
from megaopt.kernels.step.cast import (
    TILE,
    cast_kernel,
    cast_tiles_kernel,
    tile_kernel,
)
from megaopt.kernels.step.cast_columns import cast_columns_kernel
from megaopt.kernels.step.launch import TritonPlan, launch
from megaopt.kernels.step.move_scales import move_scales_kernel
from megaopt.kernels.step.scale_invs import scale_invs_kernel
from megaopt.kernels.step.table import Chunks, DeviceTable, Geometry, to_device

KEPT = (
    "weight_scale",
    "weight_scale_inv",
    "weight_amax",
    "weight_columns",
    "weight_columns_scale_inv",
)
"""The buffers of which `cast` needs the tensors."""


class CastPlan(TritonPlan):
    """As TritonPlan; `step`, then the ranks put amaxes together, then `cast`.

    Delayed scaling is cast by the step. With a scale per tensor from its own amax the step finds
    that and `cast` reads the masters again. Blocks are cast by the step, but for those of which
    other ranks have a part. See Formats.casts_along for what cannot be had along with the step:
    then amaxes and codes take a pass each over the masters.

    Args:
        formats: with a cast.
        rule: the update rule.
        numels: elements of each tensor.
        groups: for each tensor, its row in the scalars.
        device: a CUDA device, or the CPU under Triton's interpreter.
        extents: what each tensor holds of its weight.
        geometry: for tests.
    """

    def __init__(
        self,
        formats: Formats,
        rule: Rule,
        numels: Sequence[int],
        groups: Sequence[int],
        device: torch.device,
        extents: Sequence[Extent],
        geometry: Geometry | None = None,
    ) -> None:
        super().__init__(formats, rule, numels, groups, device, geometry)
        assert formats.cast is not None
        self.recipe, self.extents = formats.cast.recipe, extents
        self.in_blocks = self.recipe.block is not None
        self.shared = any(extent.shared for extent in extents)
        self._rows[table_rows.WEIGHT_ROWS.value] = [extent.rows for extent in extents]
        self._rows[table_rows.WEIGHT_COLUMNS.value] = [extent.columns for extent in extents]
        self._rows[table_rows.WEIGHT_START.value] = [extent.start for extent in extents]
        self._tiles = torch.empty(0)
        if self.in_blocks:
            self._tiles = to_device(tile_table(numels, extents), device)
        self._stores_scale_invs = self.shared or (self.in_blocks and not formats.casts_along)
        if self._stores_scale_invs:
            shapes = [self.recipe.scale_shape(torch.Size(extent[:2])) for extent in extents]
            self._scale_chunks = Chunks([math.prod(shape) for shape in shapes], SCALES, device)
        self._buffers: Buffers = {}
        self._moved, self._columns = DeviceTable(device), DeviceTable(device)
        self._controls: torch.Tensor | None = None

    def look(self, buffers: Buffers) -> None:
        """Notes where the buffers lie, and keeps those that `cast` computes with."""
        super().look(buffers)
        self._buffers = {slot: buffers[slot] for slot in KEPT if slot in buffers}
        if self.in_blocks:
            strides = [scale_inv.stride(0) for scale_inv in buffers["weight_scale_inv"]]
            row = self._rows[table_rows.WEIGHT_SCALE_STRIDE.value]
            self.stale = self.stale or row.tolist() != strides
            row[:] = strides

    def step(
        self,
        scalars: Sequence[tuple[float, ...]] | torch.Tensor,
        controls: torch.Tensor | None = None,
    ) -> None:
        """As TritonPlan.step; raises the buffers of amaxes, and casts what it can."""
        self._controls = controls
        along = self.formats.casts_along
        if not (along and self.in_blocks):
            super().step(scalars, controls)
            if not along and self.recipe.scaling != "delayed":
                self._cast_all(only_amax=True)
            elif not along:
                self._cast_tensors(only_amax=True)
            return
        scalars = self.on_device(scalars)
        options = {"RULE": self.rule, "SHARDED": self.shared, **TILES[self.recipe.scaling]}
        self._launch_tiles(tile_kernel, (scalars,), (scalars.shape[1],), options)

    def cast(self) -> None:
        """Casts what the step could not, and stores scale_inv where other ranks made codes."""
        if not self.formats.casts_along:
            self._cast_all(only_amax=False)
        elif self.in_blocks and self.shared:
            options = {"ONLY_AMAX": False, "ALL": False, **CAST_TILES}
            self._launch_tiles(cast_tiles_kernel, (), (), options)
        elif self.recipe.scaling == "current":
            self._cast_tensors(only_amax=False)
        if self._stores_scale_invs:
            self._store_scale_invs()
        if "weight_columns" in self._buffers:
            self._cast_columns()

    def move_scales(self, histories: Sequence[torch.Tensor]) -> None:
        """Delayed scaling, after the ranks have put amaxes together: the next step's scales.

        Args:
            histories: of each weight, fp32, (amax_history_len,).
        """
        if not histories:
            return
        columns = (histories, self._buffers["weight_scale"], self._buffers["weight_amax"])
        rows = numpy.array([[tensor.data_ptr() for tensor in column] for column in columns])
        length = self.recipe.amax_history_len
        options: dict[str, object] = {
            "CODE_MAX": self.recipe.code_max,
            "MOST_RECENT": self.recipe.amax_compute_algo == "most_recent",
            "CONTROLLED": self._controls is not None,
            "PADDED": 1 << (length - 1).bit_length(),
            "num_warps": 4,
        }
        arguments = (self._moved.update(rows), self._controls, len(histories), length)
        call(move_scales_kernel, len(histories), arguments, options)

    def _cast_columns(self) -> None:
        """Codes along columns of whole weights that have them too, in a launch of their own."""
        codes = self._buffers["weight_columns"]
        scale_invs = self._buffers["weight_columns_scale_inv"]
        rows = [
            [tensor.data_ptr() for tensor in codes],
            [tensor.data_ptr() for tensor in scale_invs],
            [extent.rows for extent in self.extents],
            [extent.columns for extent in self.extents],
            [tensor.stride(0) for tensor in scale_invs],
        ]
        tiles = self._tiles.shape[1]
        if tiles == 0:
            return
        table = self._columns.update(numpy.array(rows, dtype=numpy.int64))
        buffers = (self.table(), self._tiles, table, self._controls)
        options = {"num_warps": 4, **self._constants()}
        call(cast_columns_kernel, tiles, (*buffers, len(codes), tiles), options)

    def _cast_all(self, only_amax: bool) -> None:
        if self.in_blocks:
            options = {"ONLY_AMAX": only_amax, "ALL": True, **CAST_TILES}
            self._launch_tiles(cast_tiles_kernel, (), (), options)
        else:
            self._cast_tensors(only_amax)

    def _cast_tensors(self, only_amax: bool) -> None:
        if self._chunks.count == 0:
            return
        arguments = (self.table(), self._chunks.table, self._controls, self._rows.shape[1])
        options = {"ONLY_AMAX": only_amax, **self._constants()}
        launch(cast_kernel, self._chunks.count, arguments, options, self.geometry)

    def _launch_tiles(
        self,
        function: object,
        tensors: tuple[torch.Tensor, ...],
        sizes: tuple[int, ...],
        options: Mapping[str, object],
    ) -> None:
        tiles = self._tiles.shape[1]
        if tiles == 0:
            return
        buffers = (self.table(), self._tiles, *tensors, self._controls)
        arguments = (*buffers, self._rows.shape[1], tiles, *sizes)
        call(function, tiles, arguments, {**options, **self._constants()})

    def _constants(self) -> dict[str, object]:
        return {"FORMATS": self.formats, "CONTROLLED": self._controls is not None}

    def _store_scale_invs(self) -> None:
        """Of whole weights, from the amaxes of all ranks."""
        chunks = self._scale_chunks
        if chunks.count == 0:
            return
        arguments = (self.table(), chunks.table, self._controls, self._rows.shape[1])
        options = {"BLOCK": SCALES.block, "SPAN": SCALES.span, "num_warps": SCALES.warps}
        call(scale_invs_kernel, chunks.count, arguments, {**options, **self._constants()})


# On an H200, percent of copy on set B for 27 bytes a parameter, by elements of a piece in the step
# and again in the cast, warps, and registers at most (fewer let more programs work at a time):
# 128 x 128: 512 512 4 -: 72.9; 512 2048 4 -: 78.9; 512 2048 4 96: 82.5; 1024 4096 8 -: 80.9;
# 1024 4096 8 80: 86.3; 1024 4096 8 64: 83.8; 1024 8192 8 64: 83.9; 2048 4096 8 -: 63.3
# 1 x 128: 512 4 -: 81.1; 1024 4 -: 83.9; 512 4 96: 87.6; 512 4 80: 90.5; 512 4 64: 89.7
# MXFP8: 512 4 -: 90.7; 1024 4 -: 91.7; 512 4 80: 90.7; 512 8 -: 63.2
TILES = {
    "block_128x128": {"PIECE": 1024, "PIECE_AGAIN": 4096, "num_warps": 8, "maxnreg": 80},
    "block_1x128": {"PIECE": 512, "PIECE_AGAIN": 512, "num_warps": 4, "maxnreg": 80},
    "mxfp8": {"PIECE": 1024, "PIECE_AGAIN": 1024, "num_warps": 4},
}
SCALES = Geometry(1024, 1)
"""How scales are dealt out where they are stored on their own."""
# Casting alone, which few tiles need.
CAST_TILES = {"PIECE": 512, "num_warps": 4}
if INTERPRETED:  # an interpreted operation costs some 15 microseconds whatever its size
    CAST_TILES = {"PIECE": 8192}
    TILES = {scaling: {**CAST_TILES, "PIECE_AGAIN": 8192} for scaling in TILES}


def tile_table(numels: Sequence[int], extents: Sequence[Extent]) -> numpy.ndarray:
    """int32 [3, tiles]: for each program its tensor, and row and column of the tile, in tiles.

    All tiles of the weight of which the tensor has elements.
    """
    size = TILE.value
    found = [numpy.zeros((3, 0), dtype=numpy.int64)]
    for index, (numel, extent) in enumerate(zip(numels, extents, strict=True)):
        if numel == 0:
            continue
        first, last = extent.start // extent.columns, (extent.start + numel - 1) // extent.columns
        rows = numpy.arange(first // size, last // size + 1)
        columns = numpy.arange(-(-extent.columns // size))
        row, column = (each.ravel() for each in numpy.meshgrid(rows, columns, indexing="ij"))
        found.append(numpy.stack([numpy.full_like(row, index), row, column]))
    return numpy.ascontiguousarray(numpy.concatenate(found, axis=1).astype(numpy.int32))
