"""Muon's step in launches over many matrices, in waves of as many as a workspace has room for.

`parts_of` cuts parameters into parts, `waves` puts parts together, a `Layout` says where the pieces
(the matrices) and runs (what elementwise launches step) of a wave lie, and a `Wave` steps them.
Of a wave the first launch steps all momenta and leaves the directions in the workspace, others make
their norms, the products of `muon.iterated`, and the last updates all weights and masters. Which
products a wave makes, and where their matrices lie in the workspace, is noted at its first step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
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
from megaopt.kernels.matrix.plan import LaunchedStep, MatrixPlan, apply_formats, inner_formats
from megaopt.kernels.matrix.shared import NEUTRAL
from megaopt.kernels.norm.bins import BANKS, ROWS
from megaopt.kernels.norm.launch import NormPlan, tables_of
from megaopt.kernels.place import Place, in_order
from megaopt.kernels.products.epilogue import Numbers
from megaopt.kernels.products.launch import ELEMENTS, Tables, factors_of, moved
from megaopt.kernels.rules.matrix import Shape, Work
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
    elif is_launched and (parts := parts_of(formats, shapes)) is not None:
        launches = MuonLaunches(formats, parts, shapes, groups, places, device, room)
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


# --- the matrices of a wave, and where they lie


class Part(NamedTuple):
    """A matrix, or all those of a parameter that share a scale: it is stepped in one wave."""

    param: int
    """The parameter's place in the batch."""
    row: int
    """The rows of the parameter's matrices before these."""
    shapes: Sequence[Shape]
    """Those of its matrices."""
    runs: Sequence[tuple[int, int]]
    """Their numbers, in order: where those that follow each other begin in the parameter, and how
    many they are."""


def parts_of(formats: Formats, shapes: Sequence[torch.Size]) -> list[Part] | None:
    """The parts of parameters, but for empty ones; None where no launches step them.

    Matrices that share a scale must follow each other and have one form; none may begin in a block.
    """
    assert formats.matrix is not None
    how: Orthogonal = formats.matrix.how
    found = []
    for param, shape in enumerate(shapes):
        cuts, row = how.cuts(shape), 0
        if formats.scaled:
            own = [cut.shape for cut in cuts]
            if len(set(map(how.is_gram, own))) > 1 or any(cut.runs[1:] for cut in cuts):
                return None
            found.append(Part(param, row, own, [(0, shape.numel())]))
            continue
        for cut in cuts:
            found.append(Part(param, row, [cut.shape], cut.runs))
            row += cut.shape[0]
    if any(first % (formats.block or 1) for part in found for first, _ in part.runs):
        return None
    return [part for part in found if shapes[part.param].numel()]


class Piece(NamedTuple):
    """A matrix of a wave."""

    param: int
    row: int
    """The rows of the parameter's matrices before this one."""
    shape: Shape
    begin: int
    """How many numbers lie before it in the memory of all matrices."""

    def of(self, matrices: torch.Tensor) -> torch.Tensor:
        """This one of that memory."""
        return matrices[self.begin : self.begin + math.prod(self.shape)].view(*self.shape)


class Run(NamedTuple):
    """Numbers of a part that follow each other in the parameter, and in the workspace."""

    param: int
    first: int
    """How many numbers of the parameter lie before these."""
    size: int
    """How many they are."""
    begin: int
    """How many numbers lie before them in the memory of all matrices."""


class Area(NamedTuple):
    """Memory of a workspace."""

    begin: int
    """How many bytes of the workspace lie before it."""
    dtype: torch.dtype
    shape: Shape

    @property
    def size(self) -> int:
        """Its bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def of(self, workspace: torch.Tensor) -> torch.Tensor:
        """The tensor there."""
        return workspace[self.begin : self.begin + self.size].view(self.dtype).view(*self.shape)

    def places(self, begins: numpy.ndarray) -> numpy.ndarray:
        """Bytes of the workspace before what begins behind so many numbers of this."""
        found: numpy.ndarray = self.begin + begins * self.dtype.itemsize
        return found


class Layout:
    """A wave's matrices, and where they lie in its workspace."""

    def __init__(self, how: Orthogonal, parts: Sequence[Part], is_gram: bool) -> None:
        self.how, self.is_gram, self.is_scaled = how, is_gram, how.precision == FP16
        self.pieces, self.runs, end = list[Piece](), list[Run](), 0
        for part in parts:
            row, begin = part.row, end
            for shape in part.shapes:
                self.pieces.append(Piece(part.param, row, shape, begin))
                row, begin = row + shape[0], begin + math.prod(shape)
            for first, size in part.runs:
                self.runs.append(Run(part.param, first, size, end))
                end += size
            end = _rounded_up(end, UNIT // how.dtype.itemsize)
        self.used, count = 0, len(self.pieces)
        """The workspace's bytes."""
        self.bins = self._take(torch.int64, count, BANKS, ROWS, 2)
        self.scales = self._take(torch.float32, len(Scales._fields), count)
        self.first = self._take(how.dtype, end)
        # directions that are cast when their norms are known: gone before what lies over them comes
        self.wide = Area(self.used, torch.float32, (end,)) if self.is_scaled else self.first
        self.second = self._take(how.dtype, end)
        shorts = [min(each.shape) for each in self.pieces]
        self.squares = [
            [self._take(how.dtype, short, _rounded_up(short, WIDE)) for short in shorts]
            for _ in range(SQUARES[is_gram])
        ]
        self.used = max(self.used, self.wide.begin + self.wide.size)

    def _take(self, dtype: torch.dtype, *shape: int) -> Area:
        area = Area(self.used, dtype, shape)
        self.used += _rounded_up(area.size, UNIT)
        return area

    def places(self, area: Area) -> numpy.ndarray:
        """Bytes of the workspace before each matrix that lies there."""
        return area.places(numpy.array([each.begin for each in self.pieces]))

    def room(self, workspace: torch.Tensor) -> Room:
        """The matrices in a workspace."""
        wholes = (self.first.of(workspace), self.second.of(workspace))
        first, second = ([piece.of(whole) for piece in self.pieces] for whole in wholes)
        squares = [[each.of(workspace)[:, : each.shape[0]] for each in own] for own in self.squares]
        return Room(first, second, squares)


def _rounded_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def waves(how: Orthogonal, parts: Sequence[Part], room: int) -> Iterator[Layout]:
    """The parts that are stepped together, all in one form."""

    def kind(part: Part) -> Any:
        own = part.shapes[0]
        return how.is_gram(own), own[0] > own[1], own

    for is_gram, alike in groupby(sorted(parts, key=kind), lambda part: kind(part)[0]):
        own, used = list[Part](), 0
        for part in alike:
            needed = Layout(how, [part], is_gram).used
            if own and used + needed > room:
                yield Layout(how, own, is_gram)
                own, used = [], 0
            own.append(part)
            used += needed
        yield Layout(how, own, is_gram)


# --- the launches


class MuonLaunches:
    """The launches of a batch; arguments as of `muon_plan`."""

    many_calls = False

    def __init__(
        self,
        formats: Formats,
        parts: Sequence[Part],
        shapes: Sequence[torch.Size],
        groups: Sequence[int],
        places: Sequence[Place],
        device: torch.device,
        room: int,
    ) -> None:
        assert formats.matrix is not None
        self._device, self._how = device, formats.matrix.how
        layouts = waves(self._how, parts, room)
        self._waves = [Wave(formats, layout, groups, places, device) for layout in layouts]
        measured = Formats(formats.grad, formats.weight, NONE, (), ())
        sizes = [shape.numel() for shape in shapes]
        self._measured = TritonPlan(measured, formats.matrix.rule.apply, sizes, groups, device)
        self._rows, self._replayed = DeviceTable(device), Replayed(device)
        self._is_noted = False
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
        tensors = dict(buffers)
        if self._how.second_moment:
            tensors[SECOND_MOMENT] = [work.kept[SECOND_MOMENT] for work in works]
        addresses = {
            slot: numpy.array(list(map(torch.Tensor.data_ptr, each)), dtype=numpy.int64)
            for slot, each in tensors.items()
        }
        others = (workspace, scalars, controls, left_out)
        if not self._is_noted:
            with compiling_together(self._device):
                for wave in self._waves:
                    wave.note(workspace)
            self._is_noted = True

        def launches() -> None:
            for wave in self._waves:
                wave.step(addresses, *others)

        told = [own.tobytes() for own in addresses.values()]
        places = [None if each is None else each.data_ptr() for each in others]
        self._replayed((stream_of(self._device), told, places), launches)


class Norms:
    """Makes the factors of a wave's matrices by the norms of their directions, and casts these.

    ratios: fp32 [matrices], of the last products.
    """

    def __init__(self, layout: Layout, ratios: torch.Tensor) -> None:
        self._layout, self._ratios, device = layout, ratios, ratios.device
        numels = [math.prod(each.shape) for each in layout.pieces]
        self._chunks, self._table = Chunks(numels, GEOMETRY, device), DeviceTable(device)
        self._rows = numpy.zeros((int(table_rows.ALIGNED) + 1, len(numels)), dtype=numpy.int64)
        self._rows[int(table_rows.NUMEL)] = numels
        self._places = numpy.stack([layout.places(layout.wide), layout.places(layout.first)])

    def step(self, workspace: torch.Tensor) -> None:
        """Makes them of the directions in a workspace."""
        layout = self._layout
        bins, scales = layout.bins.of(workspace), layout.scales.of(workspace)
        places = workspace.data_ptr() + self._places
        self._rows[[int(table_rows.GRAD), int(table_rows.WEIGHT)]] = places
        self._rows[int(table_rows.ALIGNED)] = numpy.bitwise_or.reduce(places) & 15 == 0
        table = self._table.update(self._rows)
        NormPlan(GRADS[layout.wide.dtype]).accumulate(table, self._chunks, bins.zero_())
        scales_by_norms(bins, self._ratios, scales, layout.how.eps, layout.is_scaled)
        if not layout.is_scaled:
            return
        options: dict[str, object] = {
            "SOURCE": WEIGHTS[layout.wide.dtype],
            "TARGET": WEIGHTS[layout.how.dtype],
            "BLOCK": GEOMETRY.block,
            "ITERATIONS": GEOMETRY.iterations,
            "SPAN": GEOMETRY.span,
            "num_warps": GEOMETRY.warps,
        }
        arguments = (table, self._chunks.table, scales, len(self._ratios))
        call(muon_kernel.cast_kernel, self._chunks.count, arguments, options)


def scales_by_norms(
    bins: torch.Tensor, ratios: torch.Tensor, scales: torch.Tensor, eps: float, is_scaled: bool
) -> None:
    """Launches `muon.scales_reference`: fp32 [factors, matrices] of bins of each matrix's norm."""
    count, options = len(ratios), dict[str, object](IS_SCALED=is_scaled, num_warps=1)
    call(muon_kernel.scales_kernel, count, (bins, ratios, scales, count, eps), options)


class SecondMoments:
    """NorMuon's launches over the rows of a wave's updates."""

    def __init__(self, layout: Layout, groups: Sequence[int], ratios: torch.Tensor) -> None:
        self._how, self._ratios, device = layout.how, ratios, ratios.device
        params, firsts, shapes, _ = zip(*layout.pieces, strict=True)
        heights, widths = zip(*shapes, strict=True)
        self._params, self._firsts = list(params), numpy.array(firsts)
        self._chunks, self._table = Chunks(heights, ONE_ROW, device), DeviceTable(device)
        self._rows = numpy.zeros((muon_kernel.ROW_COUNT, len(heights)), dtype=numpy.int64)
        self._rows[int(muon_kernel.COLUMNS)] = widths
        self._rows[int(muon_kernel.HEIGHT)] = heights
        self._rows[int(muon_kernel.GROUP)] = [groups[param] for param in params]
        self._rows[int(muon_kernel.FIRST_ROW)] = numpy.cumsum([0, *heights[:-1]])

    def step(
        self, updates: numpy.ndarray, seconds: numpy.ndarray, left_out: torch.Tensor | None
    ) -> None:
        """Makes rows alike; updates: each matrix's address; seconds: each parameter's."""
        self._rows[int(muon_kernel.UPDATE)] = updates
        self._rows[int(muon_kernel.SECOND)] = seconds[self._params] + 4 * self._firsts
        table, ratios = self._table.update(self._rows), self._ratios
        count, rows, dtype = len(ratios), self._chunks.count, self._how.dtype
        squares, roots = ratios.new_empty((2, rows)).unbind()
        factors, (keeps, rest, eps) = torch.empty_like(ratios), numbers_of(self._how.beta2)
        tables: tuple[object, ...] = (table, self._chunks.table)
        own = {"ELEMENT": ELEMENTS[dtype], "SPAN": ONE_ROW.span, "num_warps": 2}
        arguments = (*tables, left_out, squares, roots, count, keeps, rest, eps)
        controlled = {**own, "CONTROLLED": left_out is not None}
        call(muon_kernel.row_squares_kernel, rows, arguments, controlled)
        arguments = (table, ratios, squares, roots, factors, count, eps)
        call(muon_kernel.row_factors_kernel, count, arguments, {"num_warps": 2})
        call(muon_kernel.row_scale_kernel, rows, (*tables, roots, factors, count), own)


class Wave:
    """Steps the matrices of a layout; groups, places: of the batch's parameters."""

    def __init__(
        self,
        formats: Formats,
        layout: Layout,
        groups: Sequence[int],
        places: Sequence[Place],
        device: torch.device,
    ) -> None:
        assert formats.matrix is not None
        self.layout, how, rule = layout, layout.how, formats.matrix.rule
        self._params, self._firsts, sizes, self._begins = numpy.array(layout.runs).T
        own_groups = [groups[run.param] for run in layout.runs]
        shifted = [
            places[param]._replace(first=places[param].first + first)
            for param, first, *_ in layout.runs
        ]
        own = (sizes.tolist(), own_groups, device, None, shifted)
        direction = inner_formats(formats, WEIGHTS[layout.wide.dtype])
        self._direction = TritonPlan(direction, rule.inner, *own)
        self._apply = TritonPlan(apply_formats(formats, GRADS[how.dtype]), rule.apply, *own)
        ratios = numpy.array([how.ratio(each.shape) for each in layout.pieces], numpy.float32)
        last, self._second = to_device(ratios, device), None
        if how.second_moment:  # behind which the ratios come
            self._second = SecondMoments(layout, groups, last)
            last = torch.ones_like(last)
        self._norms, self._tables = Norms(layout, last), Tables()
        self._products, self._noted_at, self._result = list[NotedLaunch](), 0, layout.first

    def note(self, workspace: torch.Tensor) -> None:
        """Notes the products, and where their results will be, before the first step.

        Compiles their kernels, within calling.compiling_together.
        """
        layout, notes = self.layout, Notes(self._tables, workspace.device)
        room, scales = layout.room(workspace), Scales(*layout.scales.of(workspace).unbind())
        result = iterated(room, scales, layout.how, layout.is_gram, notes)
        self._products, self._noted_at = notes.launches, workspace.data_ptr()
        self._result = layout.first if result is room.first else layout.second
        for launch in self._products:
            launch.compile()

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
        self._look(self._direction, addresses, weight=base + self.layout.wide.places(self._begins))
        self._direction.step(scalars, controls)
        self._norms.step(workspace)
        for launch in self._products:
            launch(base - self._noted_at)
        if self._second is not None:
            updates = base + self.layout.places(self._result)
            self._second.step(updates, addresses[SECOND_MOMENT], left_out)
        self._look(self._apply, addresses, grad=base + self._result.places(self._begins))
        self._apply.step(scalars, left_out)

    def _look(
        self, plan: TritonPlan, addresses: dict[str, numpy.ndarray], **others: numpy.ndarray
    ) -> None:
        """Tells a plan where its tensors lie; others: in the place of the parameters' own."""
        for slot, row in plan.addresses.items():
            now = others.get(slot)
            if now is None:
                now = addresses[slot][self._params] + _bytes(plan.formats, slot, self._firsts)
            plan.stale = plan.stale or not numpy.array_equal(now, row)
            row[:] = now


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
        scales_by_norms(bins, own, scales, self.how.eps, self.is_scaled)
        return Scales(*scales.unbind())
