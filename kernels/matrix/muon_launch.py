"""Muon's step in launches over many matrices, in waves of as many as a workspace has room for.

Of a wave the first launch steps all momenta and leaves the directions in the workspace, others make
their norms, the products of `muon.iterated`, and the last updates all weights and masters. Which
products a wave makes, and where their matrices lie in the workspace, is noted at its first step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import numpy
import torch

from megaopt.kernels.backends import BACKENDS
from megaopt.kernels.calling import Replayed, call, compiling_together
from megaopt.kernels.chunks import rows as table_rows
from megaopt.kernels.chunks.batch import Buffers, Formats, Scalars
from megaopt.kernels.chunks.table import OWN as GEOMETRY
from megaopt.kernels.chunks.table import Chunks, DeviceTable, Geometry, stream_of, to_device
from megaopt.kernels.formats import GRADS, NONE, WEIGHTS
from megaopt.kernels.matrix import muon_kernel, shared
from megaopt.kernels.matrix.muon import (
    FP16,
    OWN,
    SQUARES,
    Matrices,
    MuonMaking,
    Orthogonal,
    Room,
    Scales,
    iterated,
    ordered,
)
from megaopt.kernels.matrix.muon_peers import PeerMaking, PeerSteps
from megaopt.kernels.matrix.normuon import SECOND_MOMENT, numbers_of
from megaopt.kernels.matrix.plan import (
    FLOAT32,
    LaunchedStep,
    MatrixPlan,
    apply_formats,
    inner_formats,
)
from megaopt.kernels.matrix.shared import NEUTRAL
from megaopt.kernels.norm.bins import BANKS, ROWS
from megaopt.kernels.norm.launch import NormPlan, tables_of
from megaopt.kernels.place import Place, in_order
from megaopt.kernels.products.epilogue import Numbers
from megaopt.kernels.products.launch import ELEMENTS, Tables, factors_of, moved
from megaopt.kernels.rules.matrix import Work
from megaopt.kernels.step.controls import COUNT, SKIP
from megaopt.kernels.step.launch import TritonPlan
from megaopt.kernels.step.reference import step_tensor

ROOM = 2**29
"""Bytes of the workspace at most, or as many as the largest parameter needs.

A wave is to keep a GPU busy for longer than its 20 launches take: 57 matrices of 768 x 2048, for
which this is enough, have 9 rounds of tiles for 132 processors in each of their Gram products.
"""
UNIT = 256
"""What lies in the workspace begins at multiples of so many bytes."""
WIDE = 8
"""Rows of squares begin at multiples of so many numbers, 16 bytes, as tensor descriptors want."""
ONE_ROW = Geometry(1, 1)
"""Chunks of a row each."""


def muon_plan(
    backend: str,
    formats: Formats,
    shapes: Sequence[torch.Size],
    groups: Sequence[int],
    places: Sequence[Place] | None,
    device: torch.device,
    room: int = ROOM,
) -> MatrixPlan:
    """The plan of parameters that MUON steps: in launches where the backend is "triton".

    Contracts "torch" and "eo" are torch's operations on every backend. Where several matrices share
    a scale, and their rows do not follow each other or their forms differ, all are stepped one by
    one.

    Arguments as Options.matrix_plan has them. room: of the workspace, in bytes.
    """
    assert formats.matrix is not None
    how, places = formats.matrix.how, places or in_order(len(shapes))
    is_launched = backend == BACKENDS["triton"].name
    launches: Any = None
    making: Any = (LaunchedMaking if is_launched else MuonMaking)(formats.matrix)
    if how.contract != OWN:
        launches, making = PeerSteps(formats, groups), PeerMaking(formats.matrix)
    elif is_launched and has_launches(formats, shapes):
        launches = MuonLaunches(formats, shapes, groups, places, device, room)
    step = LaunchedStep() if is_launched else step_tensor
    return MatrixPlan(formats, groups, places, step, launches, making)


# --- products that are noted


class NotedLaunch:
    """A launch of products in a workspace, which may have moved when it is launched again."""

    def __init__(
        self, launch: Any, runs: numpy.ndarray, numbers: Numbers, device: torch.device
    ) -> None:
        self._launch, self._runs, self._numbers = launch, runs, numbers
        self._table, self._shift = DeviceTable(device), 0
        self._table.update(launch.rows(runs))

    def __call__(self, shift: int) -> None:
        """shift: how far the workspace is from where it was noted, in bytes."""
        if shift != self._shift:
            self._table.update(self._launch.rows(moved(self._runs, shift)))
            self._shift = shift
        self._launch.begin(self._table.kept(), self._numbers)

    def compile(self) -> None:
        """Compiles the kernel, within calling.compiling_together."""
        self._launch.compile(self._table.kept(), self._numbers)


class Notes:
    """Notes products in the place of muon.Immediate, which makes them."""

    def __init__(self, tables: Tables, device: torch.device) -> None:
        self._tables, self._device, self.launches = tables, device, list[NotedLaunch]()

    def times(self, squares: Matrices, matrices: Matrices, out: Matrices, **others: Any) -> None:
        """Notes S X, as muon.Immediate makes it."""
        self._note((False, False), *ordered(squares, matrices), out, **others)

    def symmetric(
        self, left: Matrices, out: Matrices, right: Matrices | None = None, **others: Any
    ) -> None:
        """Notes symmetric products."""
        turned = [each.mT for each in left] if right is None else right
        self._note((True, right is None), left, turned, out, **others)

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
        own = Numbers(**numbers)
        found = self._tables.prepared(factors_of(left, right, out, add, scale), symmetry, own)
        self.launches += [NotedLaunch(*each, own, self._device) for each in found]


# --- where everything lies


@dataclass(frozen=True)
class Part:
    """A matrix, or all those of a parameter that share a scale: it is stepped in one wave."""

    param: int
    """The parameter's place in the batch."""
    shapes: list[tuple[int, int]]
    """Those of its matrices, which lie one behind another in the workspace."""
    runs: Sequence[tuple[int, int]]
    """Its numbers, in that order: where those that follow each other begin in the parameter, and
    how many they are."""
    row: int = 0
    """The rows of the parameter's matrices before these."""

    @property
    def numel(self) -> int:
        """Its numbers."""
        return sum(count for _, count in self.runs)


def has_launches(formats: Formats, shapes: Sequence[torch.Size]) -> bool:
    """Whether the parts of parameters have their scales for themselves, and one form each."""
    assert formats.matrix is not None
    how: Orthogonal = formats.matrix.how
    own = [how.cuts(shape) for shape in shapes]
    if formats.scaled:
        in_order = all(len(cut.runs) == 1 for cuts in own for cut in cuts)
        return in_order and all(len({how.is_gram(cut.shape) for cut in cuts}) < 2 for cuts in own)
    block = formats.block or 1
    return not any(first % block for cuts in own for cut in cuts for first, _ in cut.runs)


def parts_of(formats: Formats, shapes: Sequence[torch.Size]) -> list[Part]:
    """The parts of parameters, but for empty ones."""
    assert formats.matrix is not None
    found = []
    for param, shape in enumerate(shapes):
        cuts, row = formats.matrix.how.cuts(shape), 0
        if formats.scaled:
            found.append(Part(param, [cut.shape for cut in cuts], [(0, shape.numel())]))
            continue
        for cut in cuts:
            found.append(Part(param, [cut.shape], cut.runs, row))
            row += cut.shape[0]
    return [part for part in found if part.numel]


@dataclass(frozen=True)
class Piece:
    """A matrix of a part."""

    part: int
    """The part's place in the wave."""
    first: int
    """Its first number in the part."""
    shape: tuple[int, int]

    @property
    def numel(self) -> int:
        """Its numbers."""
        return self.shape[0] * self.shape[1]


def pieces_of(parts: Sequence[Part]) -> Iterator[Piece]:
    """The matrices of parts, but for empty ones."""
    for index, part in enumerate(parts):
        first = 0
        for shape in part.shapes:
            piece = Piece(index, first, shape)
            first += piece.numel
            if piece.numel:
                yield piece


class Runs(NamedTuple):
    """All runs of a wave's parts: a number of each, but for `places`."""

    parts: numpy.ndarray
    """Its part's place in the wave,"""
    params: numpy.ndarray
    """the parameter's place in the batch,"""
    firsts: numpy.ndarray
    """its first number in the parameter,"""
    begins: numpy.ndarray
    """that in the part as it lies in the workspace,"""
    sizes: list[int]
    """and how many there are."""

    def places(self, parts: Sequence[int], size: int) -> numpy.ndarray:
        """The runs' places in bytes; parts: the places of parts; size: bytes of a number."""
        found: numpy.ndarray = numpy.array(parts)[self.parts] + self.begins * size
        return found


def runs_of(parts: Sequence[Part]) -> Runs:
    """The runs of a wave's parts, in order."""
    rows = []
    for index, part in enumerate(parts):
        begin = 0
        for first, size in part.runs:
            rows.append((index, part.param, first, begin, size))
            begin += size
    owners, params, firsts, begins, sizes = numpy.array(rows).T
    return Runs(owners, params, firsts, begins, sizes.tolist())


class Layout:
    """Where a wave's matrices lie, in bytes from the workspace's beginning."""

    def __init__(self, how: Orthogonal, parts: Sequence[Part], is_gram: bool) -> None:
        self.how, self.pieces = how, list(pieces_of(parts))
        self.is_scaled = how.precision == FP16
        """Directions are fp32 first, and cast when their norms are known."""
        self.wide_size = 4 if self.is_scaled else how.dtype.itemsize
        self.used = 0
        count = len(self.pieces)
        self.bins = self._take(count * BANKS * ROWS * 2 * 8)
        self.scales = self._take(len(Scales._fields) * count * 4)
        size = how.dtype.itemsize
        self.first = [self._take(part.numel * size) for part in parts]
        self.wide = self.first
        behind = 0
        if self.is_scaled:  # they are gone before what lies over them comes
            begin = self.used
            self.wide = [self._take(part.numel * self.wide_size) for part in parts]
            behind, self.used = self.used, begin
        self.second = [self._take(part.numel * size) for part in parts]
        sizes = [min(piece.shape) * self.stride(piece) * size for piece in self.pieces]
        self.squares = [[self._take(each) for each in sizes] for _ in range(SQUARES[is_gram])]
        self.used = max(self.used, behind)

    def _take(self, size: int) -> int:
        begin = self.used
        self.used += -(-size // UNIT) * UNIT
        return begin

    def places(self, firsts: Sequence[int], size: int | None = None) -> numpy.ndarray:
        """Where the pieces of matrices lie that begin there; size: of a number, in bytes."""
        size = self.how.dtype.itemsize if size is None else size
        return numpy.array([firsts[each.part] + each.first * size for each in self.pieces])

    @staticmethod
    def stride(piece: Piece) -> int:
        """How far the rows of a piece's squares lie apart."""
        return -(-min(piece.shape) // WIDE) * WIDE

    def room(self, workspace: torch.Tensor) -> Room:
        """The matrices of a workspace."""
        return Room(
            self._matrices(workspace, self.first),
            self._matrices(workspace, self.second),
            [self._squares(workspace, own) for own in self.squares],
        )

    def _matrices(self, workspace: torch.Tensor, firsts: Sequence[int]) -> Matrices:
        size, found = self.how.dtype.itemsize, []
        for piece, begin in zip(self.pieces, self.places(firsts).tolist(), strict=True):
            own = workspace[begin : begin + piece.numel * size].view(self.how.dtype)
            found.append(own.view(piece.shape))
        return found

    def _squares(self, workspace: torch.Tensor, firsts: Sequence[int]) -> Matrices:
        found = []
        for piece, begin in zip(self.pieces, firsts, strict=True):
            short, stride = min(piece.shape), self.stride(piece)
            own = workspace[begin : begin + short * stride * self.how.dtype.itemsize]
            found.append(own.view(self.how.dtype).view(short, stride)[:, :short])
        return found

    def scales_in(self, workspace: torch.Tensor) -> Scales:
        """The factors of the matrices, in a workspace."""
        count = len(self.pieces)
        own = workspace[self.scales : self.scales + len(Scales._fields) * count * 4]
        return Scales(*own.view(torch.float32).view(-1, count).unbind())

    def bins_in(self, workspace: torch.Tensor) -> torch.Tensor:
        """The bins of the matrices' norms, in a workspace."""
        own = workspace[self.bins : self.bins + len(self.pieces) * BANKS * ROWS * 2 * 8]
        return own.view(torch.int64).view(-1, BANKS, ROWS, 2)


# --- the launches


class MuonLaunches:
    """The launches of a batch; arguments as of `muon_plan`."""

    many_calls = False

    def __init__(
        self,
        formats: Formats,
        shapes: Sequence[torch.Size],
        groups: Sequence[int],
        places: Sequence[Place],
        device: torch.device,
        room: int = ROOM,
    ) -> None:
        assert formats.matrix is not None
        parts, how = parts_of(formats, shapes), formats.matrix.how
        self._device = device
        self._waves = [
            Wave(formats, device, is_gram, own, groups, places)
            for own, is_gram in waves(how, parts, room)
        ]
        measured = Formats(formats.grad, formats.weight, NONE, (), ())
        sizes = [shape.numel() for shape in shapes]
        self._measured = TritonPlan(measured, formats.matrix.rule.apply, sizes, groups, device)
        self._rows, self._replayed = DeviceTable(device), Replayed(device)
        self._neutral = torch.tensor(NEUTRAL, device=device)
        self._skip = torch.arange(COUNT, device=device) == SKIP

    def accumulate(self, buffers: Buffers, bins: torch.Tensor) -> None:
        """Adds the squares of the whole gradients to the bins of megaopt.kernels.norm."""
        self._measured.look({slot: buffers[slot] for slot in ("grad", "weight")})
        self._measured.accumulate(bins)

    def step(
        self, buffers: Buffers, works: Sequence[Work], scalars: Scalars, controls: Any
    ) -> None:
        """One step of every parameter."""
        if not isinstance(scalars, torch.Tensor):
            scalars = self._rows.update(numpy.array(scalars, dtype=numpy.float32))
        most = max((wave.layout.used for wave in self._waves), default=0)
        workspace = torch.empty(most, dtype=torch.uint8, device=self._device)
        # of the controls an update is told one
        left_out = None if controls is None else torch.where(self._skip, controls, self._neutral)
        addresses = {slot: _addresses_of(each) for slot, each in buffers.items()}
        if self._waves and self._waves[0].how.second_moment:
            addresses[SECOND_MOMENT] = _addresses_of([work.kept[SECOND_MOMENT] for work in works])
        others = (workspace, scalars, controls, left_out)

        def launches() -> None:
            for wave in self._waves:
                wave.step(addresses, *others)

        told = [own.tobytes() for own in addresses.values()]
        places = [None if each is None else each.data_ptr() for each in others]
        self._replayed((stream_of(self._device), told, places), launches)


def waves(how: Orthogonal, parts: Sequence[Part], room: int) -> Iterator[tuple[list[Part], bool]]:
    """The parts that are stepped together, and whether in Gram's form."""

    def kind(part: Part) -> Any:
        own = part.shapes[0]
        return how.is_gram(own), own[0] > own[1], own

    for is_gram, alike in groupby(sorted(parts, key=kind), lambda part: bool(kind(part)[0])):
        own: list[Part] = []
        used = 0
        for part in alike:
            needed = Layout(how, [part], is_gram).used
            if own and used + needed > room:
                yield own, is_gram
                own, used = [], 0
            own.append(part)
            used += needed
        yield own, is_gram


class Norms:
    """Makes the factors of a wave's matrices by the norms of their directions, and casts these.

    ratios: fp32 [matrices], of the last products.
    """

    def __init__(self, layout: Layout, ratios: torch.Tensor) -> None:
        self._layout, self._ratios, device = layout, ratios, ratios.device
        numels = [piece.numel for piece in layout.pieces]
        self._chunks, self._table = Chunks(numels, GEOMETRY, device), DeviceTable(device)
        self._rows = numpy.zeros((int(table_rows.ALIGNED) + 1, len(numels)), dtype=numpy.int64)
        self._rows[int(table_rows.NUMEL)] = numels
        self._places = numpy.stack(
            [layout.places(layout.wide, layout.wide_size), layout.places(layout.first)]
        )

    def step(self, workspace: torch.Tensor) -> None:
        """Makes them of the directions in a workspace."""
        layout, count = self._layout, len(self._layout.pieces)
        bins, scales = layout.bins_in(workspace), layout.scales_in(workspace).square
        table = self._told(workspace.data_ptr())
        wide = GRADS["float32"] if layout.is_scaled else GRADS[layout.how.dtype]
        NormPlan(wide).accumulate(table, self._chunks, bins.zero_())
        arguments = (bins, self._ratios, scales, count, layout.how.eps)
        options: dict[str, object] = {"IS_SCALED": layout.is_scaled, "num_warps": 1}
        call(muon_kernel.scales_kernel, count, arguments, options)
        if layout.is_scaled:
            self._cast(table, scales)

    def _told(self, base: int) -> torch.Tensor:
        """The table on the device; base: the workspace's address."""
        places = base + self._places
        self._rows[[int(table_rows.GRAD), int(table_rows.WEIGHT)]] = places
        self._rows[int(table_rows.ALIGNED)] = numpy.bitwise_or.reduce(places) & 15 == 0
        return self._table.update(self._rows)

    def _cast(self, table: torch.Tensor, scales: torch.Tensor) -> None:
        options: dict[str, object] = {
            "SOURCE": FLOAT32,
            "TARGET": WEIGHTS[self._layout.how.dtype],
            "BLOCK": GEOMETRY.block,
            "ITERATIONS": GEOMETRY.iterations,
            "SPAN": GEOMETRY.span,
            "num_warps": GEOMETRY.warps,
        }
        arguments = (table, self._chunks.table, scales, len(self._layout.pieces))
        call(muon_kernel.cast_kernel, self._chunks.count, arguments, options)


class SecondMoments:
    """NorMuon's launches over the rows of a wave's updates."""

    def __init__(self, layout: Layout, groups: Sequence[int], device: torch.device) -> None:
        self._layout, self._table, pieces = layout, DeviceTable(device), layout.pieces
        self._rows = numpy.zeros((muon_kernel.ROW_COUNT, len(pieces)), dtype=numpy.int64)
        heights = [piece.shape[0] for piece in pieces]
        self._rows[int(muon_kernel.COLUMNS)] = [piece.shape[1] for piece in pieces]
        self._rows[int(muon_kernel.HEIGHT)] = heights
        self._rows[int(muon_kernel.GROUP)] = [groups[piece.part] for piece in pieces]
        self._rows[int(muon_kernel.FIRST_ROW)] = numpy.cumsum([0, *heights[:-1]])
        self._chunks = Chunks(heights, ONE_ROW, device)

    def step(
        self,
        updates: numpy.ndarray,
        seconds: Sequence[int],
        ratios: torch.Tensor,
        left_out: torch.Tensor | None,
    ) -> None:
        """Makes rows alike; updates: each matrix's address; seconds: each part's."""
        how, count = self._layout.how, len(self._layout.pieces)
        table = self._told(updates, seconds)
        squares, roots = ratios.new_empty((2, self._chunks.count)).unbind()
        factors, (keeps, rest, eps) = torch.empty_like(ratios), numbers_of(how.beta2)
        tables: tuple[object, ...] = (table, self._chunks.table)
        own = {"ELEMENT": ELEMENTS[how.dtype], "SPAN": ONE_ROW.span, "num_warps": 2}
        arguments = (*tables, left_out, squares, roots, count, keeps, rest, eps)
        controlled = {**own, "CONTROLLED": left_out is not None}
        call(muon_kernel.row_squares_kernel, self._chunks.count, arguments, controlled)
        arguments = (table, ratios, squares, roots, factors, count, eps)
        call(muon_kernel.row_factors_kernel, count, arguments, {"num_warps": 2})
        arguments = (*tables, roots, factors, count)
        call(muon_kernel.row_scale_kernel, self._chunks.count, arguments, own)

    def _told(self, updates: numpy.ndarray, seconds: Sequence[int]) -> torch.Tensor:
        """The table on the device, with the addresses of this step."""
        self._rows[int(muon_kernel.UPDATE)] = updates
        self._rows[int(muon_kernel.SECOND)] = [
            seconds[piece.part] + piece.first // piece.shape[1] * 4 for piece in self._layout.pieces
        ]
        return self._table.update(self._rows)


class Wave:
    """Steps some parts of a batch, all in one form; groups, places: of the parameters."""

    def __init__(
        self,
        formats: Formats,
        device: torch.device,
        is_gram: bool,
        parts: Sequence[Part],
        groups: Sequence[int],
        places: Sequence[Place],
    ) -> None:
        assert formats.matrix is not None
        self.how: Orthogonal = formats.matrix.how
        self._parts, self._runs = parts, runs_of(parts)
        self.layout, self._is_gram = Layout(self.how, parts, is_gram), is_gram
        params, firsts = self._runs.params.tolist(), self._runs.firsts.tolist()
        shifted = [
            places[param]._replace(first=places[param].first + first)
            for param, first in zip(params, firsts, strict=True)
        ]
        own = (self._runs.sizes, [groups[each] for each in params], device, None, shifted)
        wide, rule = (
            FLOAT32 if self.layout.is_scaled else WEIGHTS[self.how.dtype],
            formats.matrix.rule,
        )
        self._direction = TritonPlan(inner_formats(formats, wide), rule.inner, *own)
        self._apply = TritonPlan(apply_formats(formats, GRADS[self.how.dtype]), rule.apply, *own)
        ratios = [self.how.ratio(piece.shape) for piece in self.layout.pieces]
        self._ratios = to_device(numpy.array(ratios, numpy.float32), device)
        self._second, last = None, self._ratios
        if self.how.second_moment:  # behind which the ratios come
            own_groups = [groups[part.param] for part in parts]
            self._second = SecondMoments(self.layout, own_groups, device)
            last = torch.ones_like(last)
        self._norms = Norms(self.layout, last)
        self._tables, self._products = Tables(), list[NotedLaunch]()
        self._noted_at, self._result = 0, self.layout.first

    def step(
        self,
        addresses: dict[str, numpy.ndarray],
        workspace: torch.Tensor,
        scalars: torch.Tensor,
        controls: torch.Tensor | None,
        left_out: torch.Tensor | None,
    ) -> None:
        """One step; addresses: of each parameter's tensors; left_out: controls of the update."""
        base = workspace.data_ptr()
        if not self._products:
            self._note(workspace)
        wide = self._runs.places(self.layout.wide, self.layout.wide_size)
        self._look(self._direction, addresses, weight=base + wide)
        self._direction.step(scalars, controls)
        self._norms.step(workspace)
        for launch in self._products:
            launch(base - self._noted_at)
        if self._second is not None:
            rows = addresses[SECOND_MOMENT]
            seconds = [rows[part.param] + 4 * part.row for part in self._parts]
            updates = base + self.layout.places(self._result)
            self._second.step(updates, seconds, self._ratios, left_out)
        results = self._runs.places(self._result, self.how.dtype.itemsize)
        self._look(self._apply, addresses, grad=base + results)
        self._apply.step(scalars, left_out)

    def _look(
        self, plan: TritonPlan, addresses: dict[str, numpy.ndarray], **others: numpy.ndarray
    ) -> None:
        """Tells a plan where its tensors lie; others: in the place of the parameters' own."""
        for slot, row in plan.addresses.items():
            if slot in others:
                now = others[slot]
            else:
                runs = self._runs
                now = addresses[slot][runs.params] + _bytes(plan.formats, slot, runs.firsts)
            plan.stale = plan.stale or not numpy.array_equal(now, row)
            row[:] = now

    def _note(self, workspace: torch.Tensor) -> None:
        """Notes the products, and where their results will be."""
        room, scales = self.layout.room(workspace), self.layout.scales_in(workspace)
        notes = Notes(self._tables, workspace.device)
        result = iterated(room, scales, self.how, self._is_gram, notes)
        self._products, self._noted_at = notes.launches, workspace.data_ptr()
        with compiling_together(workspace.device):
            for launch in self._products:
                launch.compile()
        self._result = self.layout.first if result is room.first else self.layout.second


def _addresses_of(tensors: Sequence[torch.Tensor]) -> numpy.ndarray:
    return numpy.array(list(map(torch.Tensor.data_ptr, tensors)), dtype=numpy.int64)


def _bytes(formats: Formats, slot: str, firsts: numpy.ndarray) -> numpy.ndarray:
    """How many bytes of a slot's tensor lie before these numbers of the parameter."""
    form = formats.by_slot.get(slot)
    if form is None:  # a scale: of each block a byte, or of the whole tensor
        block = formats.by_slot[slot.removesuffix("_scale")].block
        return firsts // block if block else 0 * firsts
    return firsts * formats.dtype(slot).itemsize // form.packed


# --- among ranks


class LaunchedMaking(MuonMaking):
    """MuonMaking with a launch for all squares of a bucket, and one for all factors."""

    def measure(
        self, directions: Matrices, parts: Sequence[shared.Part], sums: torch.Tensor
    ) -> None:
        """Adds the squares of directions to the bins."""
        if not directions:
            return
        table, chunks = tables_of(directions)
        own = sums.new_zeros((len(parts), BANKS, ROWS, 2))
        NormPlan(GRADS[self.direction.dtype]).accumulate(table, chunks, own)
        places = torch.tensor([part.piece for part in parts], device=sums.device)
        sums.index_add_(0, places, own.sum(1))

    def notes(self, sums: torch.Tensor, pieces: Sequence[shared.Piece]) -> Scales:
        """The factors of the matrices."""
        ratios = [1.0 if self.how.second_moment else self.how.ratio(own.shape) for own in pieces]
        own = torch.tensor(ratios, dtype=torch.float32, device=sums.device)
        scales = own.new_empty((len(Scales._fields), len(pieces)))
        bins = sums.new_zeros((len(pieces), BANKS, ROWS, 2))
        bins[:, 0] = sums
        arguments = (bins, own, scales, len(pieces), self.how.eps)
        options: dict[str, object] = {"IS_SCALED": self.is_scaled, "num_warps": 1}
        call(muon_kernel.scales_kernel, len(pieces), arguments, options)
        return Scales(*scales.unbind())
