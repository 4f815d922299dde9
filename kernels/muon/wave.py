"""A wave of Muon's step: matrices that are stepped together, in one workspace.

An `Iteration` makes their updates of directions. Which products it makes, and where their matrices
lie in the workspace, is noted at its first step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy
import torch

from megaopt.kernels.calling import call
from megaopt.kernels.chunks import rows as table_rows
from megaopt.kernels.chunks.batch import Formats
from megaopt.kernels.chunks.table import OWN as GEOMETRY
from megaopt.kernels.chunks.table import Chunks, DeviceTable, Geometry, to_device
from megaopt.kernels.formats import GRADS, WEIGHTS
from megaopt.kernels.matrix.launch import PartLaunch
from megaopt.kernels.matrix.plan import apply_formats, inner_formats
from megaopt.kernels.muon import kernel
from megaopt.kernels.muon.layout import Layout
from megaopt.kernels.muon.newton_schulz import (
    Matrices,
    MatrixScales,
    iterated,
)
from megaopt.kernels.muon.normuon import numbers_of
from megaopt.kernels.norm.launch import NormPlan
from megaopt.kernels.place import Place
from megaopt.kernels.products.epilogue import ProductCoefficients
from megaopt.kernels.products.launch import factors_of
from megaopt.kernels.products.tables import ELEMENTS, Tables, moved
from megaopt.kernels.rules.matrix import SECOND_MOMENT

ONE_ROW = Geometry(1, 1)
"""Chunks of a row each."""


# --- products that are noted


class NotedLaunch:
    """A launch of products in a workspace, which may have moved when it is launched again."""

    def __init__(
        self, launch: Any, runs: numpy.ndarray, numbers: ProductCoefficients, device: torch.device
    ) -> None:
        self._launch, self._runs, self._numbers = launch, runs, numbers
        # the kernel's table has addresses in the workspace: it is uploaded again where that moves
        self._table, self._shift = DeviceTable(device), 0
        self._table.update(launch.rows(runs))

    def __call__(self, shift: int) -> None:
        """Launches the products; shift: bytes from where the workspace was noted to where it is."""
        # all addresses of the launch are in the workspace, and move together
        if shift != self._shift:
            self._table.update(self._launch.rows(moved(self._runs, shift)))
            self._shift = shift
        self._launch.begin(self._table.kept(), self._numbers)

    def compile(self) -> None:
        """Compiles the kernel, within calling.compiling_together."""
        self._launch.compile(self._table.kept(), self._numbers)


class Notes:
    """Notes products in the place of kernels.products.launch, which makes them."""

    def __init__(self, tables: Tables, device: torch.device) -> None:
        self._tables, self._device, self.launches = tables, device, list[NotedLaunch]()

    def products(self, left: Matrices, right: Matrices, out: Matrices, **options: Any) -> None:
        """Notes products."""
        # neither the result is symmetric, nor is the right matrix the left one, turned
        self._note((False, False), left, right, out, **options)

    def symmetric_products(
        self, left: Matrices, out: Matrices, right: Matrices | None = None, **options: Any
    ) -> None:
        """Notes symmetric products."""
        turned = [matrix.mT for matrix in left] if right is None else right
        # without `right` products are X X^T
        self._note((True, right is None), left, turned, out, **options)

    def _note(
        self,
        symmetry: tuple[bool, bool],
        left: Matrices,
        right: Matrices,
        out: Matrices,
        add: Matrices | None = None,
        scale: torch.Tensor | None = None,
        **numbers: float,
    ) -> None:
        launch_numbers = ProductCoefficients(**numbers)
        # one launch for each way in which matrices lie in memory
        launches = self._tables.prepared(
            factors_of(left, right, out, add, scale), symmetry, launch_numbers
        )
        self.launches += [NotedLaunch(*pair, launch_numbers, self._device) for pair in launches]


# --- the launches


class DirectionTable:
    """The table of launches over directions in a workspace, as a step's: int64 [10, directions]."""

    def __init__(self, numels: Sequence[int], device: torch.device) -> None:
        self.chunks, self._table = Chunks(numels, GEOMETRY, device), DeviceTable(device)
        self._rows = numpy.zeros((int(table_rows.ALIGNED) + 1, len(numels)), dtype=numpy.int64)
        self._rows[int(table_rows.NUMEL)] = numels

    def lie(self, directions: numpy.ndarray, casts: numpy.ndarray) -> None:
        """Hears where directions and their casts lie, in bytes from the workspace on."""
        self._places = numpy.stack([directions, casts])

    def update(self, workspace: torch.Tensor) -> torch.Tensor:
        """Returns the table on the device, where the workspace may lie elsewhere than before."""
        places = workspace.data_ptr() + self._places
        self._rows[[int(table_rows.GRAD), int(table_rows.WEIGHT)]] = places
        # 1 where both begin at a multiple of 16 bytes
        self._rows[int(table_rows.ALIGNED)] = numpy.bitwise_or.reduce(places) & 15 == 0
        return self._table.update(self._rows)


def cast(table: torch.Tensor, chunks: Chunks, scales: torch.Tensor, dtype: torch.dtype) -> None:
    """Casts fp32 directions to 16 bits, each times its power of two.

    table: int64, as a step's: GRAD has the directions, WEIGHT where they go. scales: fp32 [factors,
    directions], in the order of newton_schulz.MatrixScales.
    """
    options: dict[str, object] = {
        "SOURCE": WEIGHTS[torch.float32],
        "TARGET": WEIGHTS[dtype],
        "BLOCK": GEOMETRY.block,
        "ITERATIONS": GEOMETRY.iterations,
        "SPAN": GEOMETRY.span,
        "num_warps": GEOMETRY.warps,
    }
    arguments = (table, chunks.table, scales, table.shape[1])
    call(kernel.cast_kernel, chunks.count, arguments, options)


def scales_by_norms(
    bins: torch.Tensor, ratios: torch.Tensor, scales: torch.Tensor, eps: float, is_scaled: bool
) -> None:
    """Launches `scales_reference`: fp32 [factors, matrices] of bins of each matrix's norm."""
    count, options = len(ratios), dict[str, object](IS_SCALED=is_scaled, num_warps=1)
    call(kernel.scales_kernel, count, (bins, ratios, scales, count, eps), options)


class SecondMoments:
    """NorMuon's launches over the rows of a wave's updates."""

    def __init__(self, layout: Layout, groups: Sequence[int], ratios: torch.Tensor) -> None:
        self._how, self._ratios, device = layout.how, ratios, ratios.device
        # of each matrix: its parameter, the rows of that before it, its rows and columns
        params, firsts, shapes, _ = zip(*layout.pieces, strict=True)
        heights, widths = zip(*shapes, strict=True)
        self._params, self._firsts = list(params), numpy.array(firsts)
        # a chunk a row: the kernels have a program for each row of all matrices
        self._chunks, self._table = Chunks(heights, ONE_ROW, device), DeviceTable(device)
        self._rows = numpy.zeros((kernel.ROW_COUNT, len(heights)), dtype=numpy.int64)
        self._rows[int(kernel.COLUMNS)] = widths
        self._rows[int(kernel.HEIGHT)] = heights
        self._rows[int(kernel.GROUP)] = [groups[param] for param in params]
        self._rows[int(kernel.FIRST_ROW)] = numpy.cumsum([0, *heights[:-1]])

    def step(
        self, updates: numpy.ndarray, seconds: numpy.ndarray, left_out: torch.Tensor | None
    ) -> None:
        """Makes rows alike; updates: each matrix's address; seconds: each parameter's."""
        # int64 [matrices], addresses: updates, and the fp32 number of each one's first row
        self._rows[int(kernel.UPDATE)] = updates
        self._rows[int(kernel.SECOND)] = seconds[self._params] + 4 * self._firsts

        table, ratios = self._table.update(self._rows), self._ratios
        count, rows, dtype = len(ratios), self._chunks.count, self._how.dtype
        # fp32 [rows of all matrices] each, and fp32 [matrices]: one launch leaves them for the next
        squares, roots = ratios.new_empty((2, rows)).unbind()
        factors, (keeps, rest, eps) = torch.empty_like(ratios), numbers_of(self._how.beta2)

        tables: tuple[object, ...] = (table, self._chunks.table)
        options = {"ELEMENT": ELEMENTS[dtype], "SPAN": ONE_ROW.span, "num_warps": 2}
        # each row: its sum of squares, its second moment, and the root of that
        arguments = (*tables, left_out, squares, roots, count, keeps, rest, eps)
        controlled = {**options, "CONTROLLED": left_out is not None}
        call(kernel.row_squares_kernel, rows, arguments, controlled)
        # each matrix: the factor by which its norm stays, times the ratio
        arguments = (table, ratios, squares, roots, factors, count, eps)
        call(kernel.row_factors_kernel, count, arguments, {"num_warps": 2})
        # each row again: updates are written over themselves
        call(kernel.row_scale_kernel, rows, (*tables, roots, factors, count), options)


class PartLaunches:
    """The elementwise launches of parts: what steps momenta, and what updates weights.

    Args:
        formats: of every buffer; `matrix` is set.
        wide: the dtype of directions.
        params: for each part its parameter, by its place in the batch.
        firsts: how many numbers of the parameter's tensors lie before the part.
        sizes: how many numbers it has.
        groups, places: of the batch's parameters.
        device: of all.
    """

    def __init__(
        self,
        formats: Formats,
        wide: torch.dtype,
        params: Sequence[int],
        firsts: Sequence[int],
        sizes: Sequence[int],
        groups: Sequence[int],
        places: Sequence[Place],
        device: torch.device,
    ) -> None:
        assert formats.matrix is not None
        # two elementwise launches over the same parts: one before the iteration and one behind it
        how, rule = formats.matrix.how, formats.matrix.rule
        parts = (params, firsts, sizes, groups, places, device)
        # one writes directions as if they were weights, the other reads updates as gradients
        inner, apply = (
            inner_formats(formats, WEIGHTS[wide]),
            apply_formats(formats, GRADS[how.dtype]),
        )
        self._direction = PartLaunch(inner, rule.inner, *parts)
        self._apply = PartLaunch(apply, rule.apply, *parts)

    def look(
        self,
        addresses: dict[str, numpy.ndarray],
        directions: numpy.ndarray,
        updates: numpy.ndarray,
    ) -> None:
        """Tells the launches where all lies.

        addresses: of each parameter's tensors; directions, updates: where those of each part lie.
        """
        self._direction.look(addresses, weight=directions)
        self._apply.look(addresses, grad=updates)

    def direct(self, scalars: torch.Tensor, controls: torch.Tensor | None) -> None:
        """Steps momenta, and leaves directions."""
        self._direction.step(scalars, controls)

    def apply(self, scalars: torch.Tensor, left_out: torch.Tensor | None) -> None:
        """Steps weights and masters by the updates; left_out: controls of the update."""
        self._apply.step(scalars, left_out)


class Iteration:
    """Makes the updates of a layout's matrices of their directions; groups: of the parameters."""

    def __init__(self, layout: Layout, groups: Sequence[int], device: torch.device) -> None:
        self.layout, how = layout, layout.how
        # fp32 [matrices], factors of the updates
        ratios = numpy.array([how.ratio(piece.shape) for piece in layout.pieces], numpy.float32)
        self._ratios, self._second = to_device(ratios, device), None
        if how.second_moment:  # behind which the ratios come
            self._second = SecondMoments(layout, groups, self._ratios)
            self._ratios = torch.ones_like(self._ratios)
        self._tables, self._products = Tables(), list[NotedLaunch]()
        # made where nobody else has made the factors
        self._directions: DirectionTable | None = None
        # where the workspace lies when products are noted
        self._noted_at, self.result = 0, layout.first
        """The area in which the updates are."""

    def scale(self, workspace: torch.Tensor) -> None:
        """Makes the factors of directions in the workspace by their norms, and casts fp16 ones."""
        layout = self.layout
        if self._directions is None:
            sizes = [math.prod(piece.shape) for piece in layout.pieces]
            self._directions = DirectionTable(sizes, workspace.device)
            self._directions.lie(layout.places(layout.wide), layout.places(layout.first))
        # bins: int64 [matrices, BANKS, ROWS, 2]; scales: fp32 [5, matrices]
        bins, scales = layout.bins.of(workspace), layout.scales.of(workspace)
        table, chunks = self._directions.update(workspace), self._directions.chunks
        # squares are added up, make norms and factors, and by these directions are cast
        NormPlan(GRADS[layout.wide.dtype]).accumulate(table, chunks, bins.zero_())
        scales_by_norms(bins, self._ratios, scales, layout.how.eps, layout.is_scaled)
        if layout.is_scaled:
            cast(table, chunks, scales, layout.how.dtype)

    def note(self, workspace: torch.Tensor) -> None:
        """Notes the products, and where their results will be, before the first step.

        Compiles their kernels, within calling.compiling_together.
        """
        # `iterated` is run once, with what notes its products instead of making them
        layout, notes = self.layout, Notes(self._tables, workspace.device)
        room, scales = layout.room(workspace), MatrixScales(*layout.scales.of(workspace).unbind())
        result = iterated(room, scales, layout.how, layout.is_gram, notes)
        self._products, self._noted_at = notes.launches, workspace.data_ptr()
        # it ends in one area or the other, by the number of steps and restarts
        self.result = layout.first if result is room.first else layout.second
        # a kernel for each kind of product; the threads that compile them run at once
        for launch in self._products:
            launch.compile()

    def step(
        self,
        workspace: torch.Tensor,
        addresses: dict[str, numpy.ndarray],
        left_out: torch.Tensor | None,
    ) -> None:
        """Makes the products, by the factors in the workspace, and steps second moments."""
        # launches follow each other on the current stream, each reads what the last has written
        base = workspace.data_ptr()
        for launch in self._products:
            launch(base - self._noted_at)
        if self._second is not None:
            # int64 [matrices], addresses
            updates = base + self.layout.places(self.result)
            self._second.step(updates, addresses[SECOND_MOMENT], left_out)


class MuonWave:
    """Steps the matrices of a layout; groups, places: of the batch's parameters."""

    def __init__(
        self,
        formats: Formats,
        layout: Layout,
        groups: Sequence[int],
        places: Sequence[Place],
        device: torch.device,
    ) -> None:
        self.layout, self._iteration = layout, Iteration(layout, groups, device)
        # of each run its parameter, its place there, its numbers, its place in the workspace
        params, firsts, sizes, begins = zip(*layout.runs, strict=True)
        self._begins = numpy.array(begins)
        parts = (params, firsts, sizes, groups, places, device)
        self._parts = PartLaunches(formats, layout.wide.dtype, *parts)
        self.note = self._iteration.note

    def step(
        self,
        addresses: dict[str, numpy.ndarray],
        workspace: torch.Tensor,
        scalars: torch.Tensor,
        controls: torch.Tensor | None,
        left_out: torch.Tensor | None,
    ) -> None:
        """Takes a step; addresses: of parameters' tensors; left_out: controls of the update."""
        base, iteration = workspace.data_ptr(), self._iteration
        # int64 [runs], addresses in the workspace: in fp16 directions are fp32 first
        directions, updates = (
            base + area.places(self._begins) for area in (self.layout.wide, iteration.result)
        )
        self._parts.look(addresses, directions, updates)
        # momenta, then norms and casts, then products and second moments, then weights
        self._parts.direct(scalars, controls)
        iteration.scale(workspace)
        iteration.step(workspace, addresses, left_out)
        self._parts.apply(scalars, left_out)
