"""The plan of a step of fp8 weights: which launches, and what comes between them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy
import torch

from megaopt.kernels.calling import call
from megaopt.kernels.chunks import rows as table_rows
from megaopt.kernels.chunks.batch import Buffers, Extent, Formats, Scalars
from megaopt.kernels.chunks.spec import KernelSpec
from megaopt.kernels.chunks.table import Chunks, DeviceTable, Geometry, to_device
from megaopt.kernels.optional_triton import INTERPRETED
from megaopt.kernels.place import Place
from megaopt.kernels.quantizers import Left
from megaopt.kernels.quantizers.cast import cast_kernel, scale_invs_kernel, values_kernel
from megaopt.kernels.quantizers.mxfp8 import cast_columns_kernel
from megaopt.kernels.quantizers.tiles import (
    TILE,
    cast_tiles_kernel,
    tile_kernel,
    values_tiles_kernel,
)
from megaopt.kernels.rules import Rule
from megaopt.kernels.step.launch import TritonPlan


class CastPlan:
    """A TritonPlan steps; then the ranks put amaxes together, then `cast`.

    Formats.store says what the step stores of weights, and what is left to `cast`. `extents` says
    what each tensor holds of its weight.
    """

    many_calls = False

    def __init__(
        self,
        formats: Formats,
        rule: Rule,
        numels: Sequence[int],
        groups: Sequence[int],
        device: torch.device,
        extents: Sequence[Extent],
        places: Sequence[Place] | None = None,
    ) -> None:
        assert formats.cast is not None
        self.formats, self.rule, self.stale = formats, rule, True
        self._steps = TritonPlan(formats, rule, numels, groups, device, None, places)
        self.addresses = self._steps.addresses
        self.accumulate, self.ready = self._steps.accumulate, self._steps.ready
        self.recipe, self.extents = formats.cast.recipe, extents
        self.in_blocks = self.recipe.block is not None
        self.shared = any(extent.shared for extent in extents)
        # beside the step's rows of the table: what each tensor holds of its weight
        rows = self._steps.rows
        rows[table_rows.WEIGHT_ROWS.value] = [extent.rows for extent in extents]
        rows[table_rows.WEIGHT_COLUMNS.value] = [extent.columns for extent in extents]
        rows[table_rows.WEIGHT_START.value] = [extent.start for extent in extents]
        # int32 [3, tiles] by blocks, else no tiles
        self._tiles = torch.empty(3, 0, dtype=torch.int32, device=device)
        if self.in_blocks:
            # for each program its tensor, and row and column of the tile, in tiles
            size, tiles = TILE.value, [numpy.zeros((3, 0), dtype=numpy.int64)]
            for index, (numel, extent) in enumerate(zip(numels, extents, strict=True)):
                if numel == 0:
                    continue
                # the weight's first and last row of which the tensor has elements
                first, end = extent.start // extent.columns, extent.start + numel - 1
                # in tiles; a part of a row takes all tiles across
                grid = numpy.meshgrid(
                    numpy.arange(first // size, end // extent.columns // size + 1),
                    numpy.arange(-(-extent.columns // size)),
                    indexing="ij",
                )
                row, column = (places.ravel() for places in grid)
                tiles.append(numpy.stack([numpy.full_like(row, index), row, column]))
            table = numpy.concatenate(tiles, axis=1).astype(numpy.int32)
            self._tiles = to_device(numpy.ascontiguousarray(table), device)
        # scales that `cast` stores in a launch of their own, because the step cannot:
        shapes: list[tuple[int, ...]] = []
        # what others make codes of, a pass over masters, or codes that were read until now
        later = self.in_blocks and formats.store.left is Left.ALL
        if self.shared or later or (formats.in_place and not self.in_blocks):
            shapes = [self.recipe.scale_shape(torch.Size(extent[:2])) for extent in extents]
        self._scale_chunks = Chunks([math.prod(shape) for shape in shapes], SCALES, device)
        # tables of launches after the step, and what was uploaded of them
        self._tables = {slots: DeviceTable(device) for slots in (MOVED, COLUMNS)}
        self._uploaded: dict[tuple[str, ...], torch.Tensor] = {}
        self.fills = formats.cast.exact and not formats.in_place
        self._controls: torch.Tensor | None = None
        self._step_scalars = torch.empty(0, 0, dtype=torch.float32, device=device)

    def look(self, buffers: Buffers) -> None:
        """Notes where the buffers lie, those too that come after the step."""
        self._steps.look(buffers)
        for slots, table in self._tables.items():
            if slots[0] in buffers:
                self._uploaded[slots] = table.update(self._rows_of(slots, buffers))
        # the step's table, too, has how far apart rows of scale_inv lie
        if self.in_blocks:
            strides = [scale_inv.stride(0) for scale_inv in buffers["weight_scale_inv"]]
            row = self._steps.rows[table_rows.WEIGHT_SCALE_STRIDE.value]
            self._steps.stale = self._steps.stale or row.tolist() != strides
            row[:] = strides

    def _rows_of(self, slots: Sequence[str], buffers: Buffers) -> numpy.ndarray:
        """int64: the addresses of these buffers; with sizes of codes along columns, or groups."""
        rows = [[tensor.data_ptr() for tensor in buffers[slot]] for slot in slots]
        if slots is COLUMNS:
            rows.append([extent.rows for extent in self.extents])
            rows.append([extent.columns for extent in self.extents])
            rows.append([scale_inv.stride(0) for scale_inv in buffers[slots[1]]])
        else:
            rows.append(self._steps.rows[table_rows.GROUP.value].tolist())
        return numpy.array(rows, numpy.int64)

    def step(self, scalars: Scalars, controls: torch.Tensor | None = None) -> None:
        """Steps as TritonPlan does; raises the buffers of amaxes, and casts what it can."""
        self._controls, scalars = controls, self._steps.on_device(scalars)
        self._step_scalars = scalars
        # launches follow each other on the current stream: values of codes, the step, amaxes
        if self.fills:
            self._fill()
        store = self.formats.store
        # chunk by chunk, or tile by tile
        if store.tile is None:
            self._steps.step(scalars, controls)
        else:
            tiles = self._tiles.shape[1]
            spec = KernelSpec(self.formats, self.rule, controls is not None)
            options = {"SPEC": spec, "SHARDED": self.shared, **store.tile_options}
            sizes = (len(self.extents), tiles, scalars.shape[1])
            if tiles:
                arguments = (self._steps.table(), self._tiles, scalars, controls, *sizes)
                call(tile_kernel, tiles, arguments, options)
        # stores that leave everything: the step has found no amaxes
        if store.left is Left.ALL:
            self._pass_over_masters(only_amax=True)

    def cast(self) -> None:
        """Casts what the step could not, and stores scale_inv where other ranks made codes."""
        left = self.formats.store.left
        if left in (Left.ALL, Left.CODES) or (left is Left.SHARED and self.shared):
            self._pass_over_masters(only_amax=False)
        # behind the codes, scale_inv of whole weights
        scales, count = self._scale_chunks, len(self.extents)
        arguments = (scales.table, self._controls, count)
        self._launch(scale_invs_kernel, scales.count, arguments, dealt_out(SCALES))
        # behind that, codes along columns of whole weights that have them too
        if COLUMNS in self._uploaded:
            tiles, values = self._tiles.shape[1], self._step_scalars
            tables = (self._tiles, self._uploaded[COLUMNS], self._controls, values)
            options = {"RULE": self.rule, "num_warps": 4}
            arguments = (*tables, count, tiles, values.shape[1])
            self._launch(cast_columns_kernel, tiles, arguments, options)

    def move_scales(self) -> None:
        """Makes the next step's scales, after the ranks have put amaxes together."""
        move = self.recipe.quantizer.move
        assert move is not None
        move(self._uploaded[MOVED], self.recipe, self._controls)

    def _fill(self) -> None:
        """Makes the values of codes, which last for a step, before it."""
        count, table, tiles = len(self.extents), self._steps.table(), self._tiles.shape[1]
        # tile by tile, as scales are, or chunk by chunk
        if self.in_blocks and tiles:
            options: dict[str, object] = {"FORMATS": self.formats, **CAST_TILES}
            call(values_tiles_kernel, tiles, (table, self._tiles, count, tiles), options)
        elif not self.in_blocks and self._steps.chunks.count:
            options = {"FORMATS": self.formats, "ITERATIONS": self._steps.geometry.iterations}
            arguments = (table, self._steps.chunks.table, count)
            options |= dealt_out(self._steps.geometry)
            call(values_kernel, self._steps.chunks.count, arguments, options)

    def _pass_over_masters(self, only_amax: bool) -> None:
        options: dict[str, object] = {"ONLY_AMAX": only_amax, "RULE": self.rule}
        count, scalars = len(self.extents), self._step_scalars
        # without ALL the pass takes only blocks that ranks share
        if self.in_blocks:
            options |= {"ALL": self.formats.store.left is not Left.SHARED, **CAST_TILES}
            tiles = self._tiles.shape[1]
            arguments = (self._tiles, self._controls, scalars, count, tiles, scalars.shape[1])
            self._launch(cast_tiles_kernel, tiles, arguments, options)
        else:
            geometry = self._steps.geometry
            options |= {"ITERATIONS": geometry.iterations, **dealt_out(geometry)}
            arguments = (self._steps.chunks.table, self._controls, scalars, count, scalars.shape[1])
            self._launch(cast_kernel, self._steps.chunks.count, arguments, options)

    def _launch(
        self, function: Any, programs: int, arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        """A kernel over chunks or tiles; arguments: those behind the table."""
        if programs:
            constants = {"FORMATS": self.formats, "CONTROLLED": self._controls is not None}
            call(function, programs, (self._steps.table(), *arguments), {**options, **constants})


def dealt_out(geometry: Geometry) -> dict[str, object]:
    """The constants of a kernel over chunks."""
    return {"BLOCK": geometry.block, "SPAN": geometry.span, "num_warps": geometry.warps}


MOVED = ("weight_amax_history", "weight_scale", "weight_amax")
COLUMNS = ("weight_columns", "weight_columns_scale_inv")
"""Buffers of which launches after the step have tables of their own."""
SCALES = Geometry(1024, 1)
"""The geometry of scales that are stored on their own."""
# Casting alone, which few tiles need.
CAST_TILES = {"PIECE": 512, "num_warps": 4}
if INTERPRETED:  # an interpreted operation costs some 15 microseconds whatever its size
    CAST_TILES = {"PIECE": 8192}
