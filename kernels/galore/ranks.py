"""GaLore's steps of matrices whose parts are on several ranks, in launches that are planned once.

A bucket's launches, in the order of shared.SharedSteps:

    send_grads  every rank copies its parts of the gradients into `near`
    (there)     they go to the owners, into `far`
    project     an owner puts its gradients together in `room`, makes anew the projections whose
                turn it is, projects, and takes the projected ones apart, into `far`
    (back)      the parts go to the ranks, into `near`
    direct      every rank steps its moments, and leaves the directions in `wide`
    (there)     they go to the owners, into `far`
    make        an owner projects them back, and takes the updates apart, into `far`
    (back)      the parts go to the ranks, into `back`
    finish      every rank steps its weights and masters

What an owner launches between two messages is the same in each step, but where a projection is made
anew: one CUDA graph. With precision "ieee" the two products are torch's, matrix by matrix, as those
of bucket.TorchBucket are, and have their bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy
import torch

from megaopt.kernels.calling import Replayed
from megaopt.kernels.chunks.batch import Formats
from megaopt.kernels.chunks.table import stream_of
from megaopt.kernels.formats import GRADS, NONE, WEIGHTS, Format
from megaopt.kernels.galore.compiled import CompiledStep
from megaopt.kernels.galore.launch import LAUNCHED, launched_plan, waves
from megaopt.kernels.galore.products import IEEE
from megaopt.kernels.galore.rule import projected, projected_back
from megaopt.kernels.galore.tiles import tiles_of
from megaopt.kernels.galore.wave import BY_SHAPE, How, Products, areas_of, places_of
from megaopt.kernels.matrix.boxes import UNIT, Box, BoxCopies, PartCopies
from megaopt.kernels.matrix.bucket import (
    BucketMemory,
    SharedStepRun,
    params_of,
    part_numbers,
    renewed,
)
from megaopt.kernels.matrix.exchange import Bucket, MatrixBox, Tensors, UpdateMaker
from megaopt.kernels.matrix.launch import PartLaunch
from megaopt.kernels.matrix.plan import MatrixPlan, apply_formats
from megaopt.kernels.place import Place
from megaopt.kernels.rules.galore import GALORE_KEEP
from megaopt.kernels.rules.matrix import PROJECTION
from megaopt.kernels.step.reference import step_tensor

UPDATES = Formats(GRADS["float32"], WEIGHTS["float32"], NONE, (), ())
"""The formats of a launch that leaves updates, as ranks are sent them."""


class ProjectionGroup:
    """Matrices that a bucket's owner projects by one launch, and where they lie in `room`.

    Args:
        how: what all matrices have in common; its kernel is "grouped".
        turns: their places among those that the rank makes.
        shapes: of these.
        begin: how many bytes of `room` lie before the first.
        device: of all.
    """

    def __init__(
        self,
        how: How,
        turns: Sequence[int],
        shapes: Sequence[torch.Size],
        begin: int,
        device: torch.device,
    ) -> None:
        self.turns, self._how, self._shapes, self._products = turns, how, shapes, None
        # gradients, and in their place fp32 updates; projected ones; rounded projections; slabs
        firsts, count = places_of([shape.numel() for shape in shapes])
        lows, low_count = places_of([how.low_numel(shape) for shape in shapes])
        sizes = [4 * count, 4 * low_count, 0, 0]
        # ieee products are torch's, and need neither copies nor slabs
        if how.low_rank.precision != IEEE:
            arguments = (UPDATES, GALORE_KEEP, device, shapes, [0] * len(shapes))
            self._products = Products(how, *arguments, [Place(0)] * len(shapes))
            sizes[2] = _dtype(how.projection).itemsize * self._products.rounded_numel
            sizes[3] = 4 * self._products.slabs_numel
            # of which the rule takes nothing; the kernel has a row to read all the same
            self._row = torch.zeros((1, GALORE_KEEP.row_length), device=device)
        self._areas, self.end = areas_of(sizes, begin)
        # offsets in bytes from the begin of `room` on; a direction takes the place of its sums
        lowest = self._areas[1].start
        self.wholes: list[int] = (begin + 4 * firsts).tolist()
        """The offsets at which gradients begin, and in their place updates, in bytes."""
        self.lows: list[int] = (lowest + 4 * lows).tolist()
        """The offsets at which projected gradients begin."""
        self.directions: list[int] = (
            lowest + _dtype(how.direction.weight).itemsize * lows
        ).tolist()
        """The offsets at which directions begin, in the place of these."""

    def grad(self, room: torch.Tensor, index: int) -> torch.Tensor:
        """Returns the gradient of one of the matrices."""
        form = self._how.formats.grad
        return _matrix(room, self.wholes[index], _dtype(form), self._shapes[index])

    def project(self, room: torch.Tensor, projections: Tensors) -> None:
        """Projects the gradients."""
        # torch, matrix by matrix: fp32 [m, n] to fp32 of the projected shape
        if self._products is None:
            form, side = self._how.formats.grad, self._how.low_rank.side
            for index, projection in enumerate(projections):
                grad = form.decode_reference(self.grad(room, index))
                low_grad = projected(grad, projection, side, IEEE)
                _matrix(room, self.lows[index], torch.float32, low_grad.shape).copy_(low_grad)
            return
        self._look(self._products, room, projections)
        _, low, _, slabs = (room[area] for area in self._areas)
        # slabs have room of their own only where they are stored apart
        workspace = slabs if slabs.numel() else low
        self._products.project(low.view(torch.float32), workspace.view(torch.float32))

    def project_back(self, room: torch.Tensor, projections: Tensors) -> None:
        """Makes updates of the directions."""
        # torch, matrix by matrix: the update goes where the gradient was
        if self._products is None:
            low_rank, dtype = self._how.low_rank, _dtype(self._how.direction.weight)
            for index, projection in enumerate(projections):
                shape = low_rank.low_shape(self._shapes[index])
                low = _matrix(room, self.directions[index], dtype, shape)
                update = projected_back(low, projection, low_rank.side, IEEE)
                _matrix(room, self.wholes[index], torch.float32, update.shape).copy_(update)
            return
        # one launch, whose "weights" are the updates, in the gradients' place
        self._look(self._products, room, projections)
        self._products.project_back(self._row, None)

    def _look(self, products: Products, room: torch.Tensor, projections: Tensors) -> None:
        """Tells the launches where all lies, and rounds the projections."""
        # int64 [matrices], addresses of gradients, in whose place updates go
        whole = room.data_ptr() + numpy.array(self.wholes)
        _, low, rounded, _ = (room[area] for area in self._areas)
        addresses = [projection.data_ptr() for projection in projections]
        directions = low.view(_dtype(self._how.direction.weight))
        products.look({"grad": whole, "weight": whole}, addresses, directions)
        if self._how.tiles.ahead:
            products.round(rounded.view(_dtype(self._how.projection)))


def _dtype(form: Format) -> torch.dtype:
    """Returns the dtype of numbers of a format."""
    assert form.dtype is not None
    return form.dtype


def _matrix(
    room: torch.Tensor, begin: int, dtype: torch.dtype, shape: Sequence[int]
) -> torch.Tensor:
    """Returns a matrix in `room`."""
    return room[begin : begin + dtype.itemsize * math.prod(shape)].view(dtype).view(*shape)


class GaLoreBucket:
    """Steps a bucket by launches, as bucket.TorchBucket does by torch's operations.

    Args:
        how: of its matrices; the kernel is "grouped".
        bucket: the matrices.
        formats: of every buffer; `matrix` is set.
        groups: for each parameter of the batch its row of scalars.
        places: of each rank's part in its parameter.
        device: a CUDA device, or the CPU under Triton's interpreter.
        low: the bucket of what is made of the gradients.
        low_places: of each rank's part of the moments, in all of them.
    """

    sums = notes = None

    def __init__(
        self,
        how: How,
        bucket: Bucket,
        formats: Formats,
        groups: Sequence[int],
        places: Sequence[Place],
        device: torch.device,
        low: Bucket,
        low_places: Sequence[Place],
    ) -> None:
        assert formats.matrix is not None
        self._how, self._bucket, self._low, self._device = how, bucket, low, device
        # launches over this rank's own parts: Adam's step of low ones, the update of whole ones
        rule, parts, lows = formats.matrix.rule, part_numbers(bucket), part_numbers(low)
        arguments = (groups, low_places, device)
        self._direction = PartLaunch(how.direction, rule.inner, *lows, *arguments)
        arguments = (groups, places, device)
        self._apply = PartLaunch(apply_formats(formats), rule.apply, *parts, *arguments)
        # bytes of a gradient's number, and of a direction's
        self._grad_size = formats.dtype("grad").itemsize
        self._size = how.direction.dtype("weight").itemsize
        # int64 [parts]: parameters, and where parts begin there and how long they are, in bytes
        self._params, firsts, sizes = (numpy.array(numbers, dtype=numpy.int64) for numbers in parts)
        self._firsts, self._sizes = firsts * self._grad_size, sizes * self._grad_size
        # where directions are sent from, and where projected gradients and updates come back, in
        # bytes
        low_sizes = numpy.array(lows[2], dtype=numpy.int64)
        self._sent = self._size * (numpy.cumsum(low_sizes) - low_sizes)
        self._came = 4 * numpy.array(low.returned, dtype=numpy.int64)
        self._returned = 4 * numpy.array(bucket.returned, dtype=numpy.int64)
        # the matrices that this rank owns, in groups of one kind, one behind another in `room`
        shapes = [torch.Size(bucket.pieces[index].shape) for index in bucket.indices]
        self._kinds, end = list[ProjectionGroup](), 0
        for turns in waves(how, shapes, math.inf):
            chosen = [shapes[turn] for turn in turns]
            self._kinds.append(ProjectionGroup(how, turns, chosen, end, device))
            end = self._kinds[-1].end
        # bytes of `room`; the launches between two messages make a graph each
        self.room = end
        self._projecting, self._making = Replayed(device), Replayed(device)

    def lie(self, begins: dict[str, int]) -> None:
        """Hears where BucketMemory's pieces begin in a step's memory: tables are made by it."""
        self._begins = begins
        # parts of gradients are sent one behind another
        targets = begins["near"] + numpy.cumsum(self._sizes) - self._sizes
        arguments = (targets // UNIT).tolist(), (self._sizes // UNIT).tolist(), self._device
        self._grads = PartCopies(*arguments)
        # of each owned matrix, in the bucket's order, where it begins in `room`
        begins_of: dict[str, list[int]] = {}
        for name in ("wholes", "lows", "directions"):
            pairs = [p for k in self._kinds for p in zip(k.turns, getattr(k, name), strict=True)]
            begins_of[name] = [begin for _, begin in sorted(pairs)]

        # all four are copies between `far` and `room`; those that leave go the other way
        def copies(boxes: Sequence[MatrixBox], name: str, size: int, leave: bool) -> BoxCopies:
            chosen = self._boxes(boxes, begins_of[name], size // UNIT)
            return BoxCopies([box.turned if leave else box for box in chosen], self._device)

        self._grads_come = copies(self._bucket.unpacked, "wholes", self._grad_size, False)
        self._lows_leave = copies(self._low.packed, "lows", 4, True)
        self._directions_come = copies(self._low.unpacked, "directions", self._size, False)
        self._updates_leave = copies(self._bucket.packed, "wholes", 4, True)

    def _boxes(
        self, boxes: Sequence[MatrixBox], begins: Sequence[int], units: int
    ) -> Iterator[Box]:
        """Makes boxes from `far` into `room`; begins: of each matrix there; units: of a number."""
        # copies count in UNIT bytes
        far, room = (self._begins[name] // UNIT for name in ("far", "room"))
        for index, first, rows, columns, stride, place in boxes:
            # `first` numbers of the matrix lie before the box, `place` numbers of the message
            matrix = room + begins[index] // UNIT + first * units
            wide = (columns * units, columns * units, stride * units)
            yield Box(far + place * units, matrix, rows, *wide)

    def ready(self) -> None:
        """Takes nothing but the step's memory."""

    def send_grads(self, run: SharedStepRun, memory: BucketMemory) -> None:
        """Leaves this rank's parts of gradients in `near`."""
        if run.has_moved:
            self._grads.look(run.addresses["grad"][self._params] + self._firsts, memory.whole)
        self._grads.copy(memory.whole)

    def renew(self, run: SharedStepRun, memory: BucketMemory) -> None:
        """Puts gradients together, and makes the projections anew whose turn it is."""
        # from `far`, where all ranks' parts have come, into whole matrices in `room`
        self._grads_come.copy(memory.whole)
        # gradients in the order of the bucket's matrices
        pairs = (
            (turn, kind.grad(memory.room, index))
            for kind in self._kinds
            for index, turn in enumerate(kind.turns)
        )
        renewed(self._bucket, run.renewal, list(dict(sorted(pairs)).values()))

    def project(self, run: SharedStepRun, memory: BucketMemory) -> None:
        """Projects gradients, and leaves the parts of that in `far`."""
        # a rank may own no matrix of the bucket
        if not self._kinds:
            return
        # gradients that make projections come together ahead of that, and no graph is taken
        is_due = not set(run.renewal.turns).isdisjoint(params_of(self._bucket))
        if is_due:
            self.renew(run, memory)
        projections = self._projections(run)

        # `far` into `room`, the products there, and their parts back into `far`
        def launches() -> None:
            if not is_due:
                self._grads_come.copy(memory.whole)
            for kind, kind_projections in zip(self._kinds, projections, strict=True):
                kind.project(memory.room, kind_projections)
            self._lows_leave.copy(memory.whole)

        self._launch(None if is_due else self._projecting, memory, projections, launches)

    def direct(self, run: SharedStepRun, memory: BucketMemory) -> None:
        """Steps moments by what has come, and leaves directions in `wide`."""
        # projected parts came into `near`, directions leave from `wide`, updates come into `back`
        if run.has_moved:
            base, begins = memory.whole.data_ptr(), self._begins
            came, sent = base + begins["near"] + self._came, base + begins["wide"] + self._sent
            self._direction.look(run.addresses, grad=came, weight=sent)
            self._apply.look(run.addresses, grad=base + begins["back"] + self._returned)
        self._direction.step(run.scalars, run.controls)

    def cast_directions(self, memory: BucketMemory) -> None:
        """Does nothing: directions already are as they are sent."""

    def make(self, run: SharedStepRun, memory: BucketMemory, update: None) -> None:
        """Makes updates of the directions in `far`, and leaves their parts there."""
        # a rank may own no matrix of the bucket
        if not self._kinds:
            return
        projections = self._projections(run)

        # `far` into `room`, the products there, and the updates' parts back into `far`
        def launches() -> None:
            self._directions_come.copy(memory.whole)
            for kind, kind_projections in zip(self._kinds, projections, strict=True):
                kind.project_back(memory.room, kind_projections)
            self._updates_leave.copy(memory.whole)

        self._launch(self._making, memory, projections, launches)

    def finish(self, run: SharedStepRun, memory: BucketMemory) -> None:
        """Steps weights and masters by the updates in `back`."""
        self._apply.step(run.scalars, run.left_out)

    def _projections(self, run: SharedStepRun) -> list[Tensors]:
        """Returns the projections of the matrices of each kind."""
        params = params_of(self._bucket)
        return [
            [run.works[params[turn]].kept[PROJECTION] for turn in kind.turns]
            for kind in self._kinds
        ]

    def _launch(
        self,
        replayed: Replayed | None,
        memory: BucketMemory,
        projections: list[Tensors],
        launches: Callable[[], None],
    ) -> None:
        """Launches; what is the same in each step goes as a graph. replayed: None: it is not."""
        # kernels read projections without gaps; copies of others lie elsewhere in each step
        apart = [
            matrix for matrices in projections for matrix in matrices if not matrix.is_contiguous()
        ]
        for matrices in projections if apart else ():
            # they live until all is launched
            matrices[:] = [matrix.contiguous() for matrix in matrices]
        if replayed is None or apart or self._how.low_rank.precision == IEEE:
            return launches()
        # all else that the launches read and write lies in the step's memory
        addresses = [matrix.data_ptr() for matrices in projections for matrix in matrices]
        replayed((stream_of(self._device), memory.whole.data_ptr(), addresses), launches)


# --- the plan


class GaLoreMaking(UpdateMaker):
    """The exchange among ranks of what launches step; how: of the batch's matrices."""

    def __init__(self, how: How) -> None:
        assert how.formats.matrix is not None
        super().__init__(how.formats.matrix)
        # as the last product takes them, so that they are rounded before they are sent
        self.direction = how.direction.weight
        self.launches = partial(GaLoreBucket, how)


def galore_plan(
    kernel: str,
    formats: Formats,
    shapes: Sequence[torch.Size],
    groups: Sequence[int],
    places: Sequence[Place],
    device: torch.device,
) -> MatrixPlan:
    """Makes the plan of a kernel: "torch", "compiled" or one of launched_plan's; its arguments."""
    if kernel in (*LAUNCHED, BY_SHAPE):
        plan = launched_plan(formats, shapes, groups, device, places, kernel)
        assert formats.matrix is not None
        if not formats.scaled:
            low_rank = formats.matrix.how
            how = How(formats, low_rank, "grouped", tiles_of(low_rank))
            plan.making = partial(GaLoreMaking, how)
        return plan
    step = CompiledStep() if kernel == "compiled" else step_tensor
    return MatrixPlan(formats, groups, places, step)
