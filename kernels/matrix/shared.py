"""Steps matrices whose parts are on several ranks: of each one rank, its owner, makes the update.

Every rank steps the moments of its own parts, and sends the directions to the matrix's owner, which
makes the update and sends each rank its part. Where a rule makes another matrix of the gradient
first, as GaLore does, the owner gets the gradient, and sends each rank the part that its moments
are of. Who owns what is no state: with other ranks others do, and the bits are the same. Matrices
go in buckets: while the updates of one bucket are made, the next is on its way to its owners, and
the last on its way back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import numpy
import torch

from megaopt.kernels.chunks.batch import Buffers, Formats
from megaopt.kernels.chunks.table import DeviceTable, addresses_of
from megaopt.kernels.formats import GRADS, NONE
from megaopt.kernels.matrix.plan import FLOAT32, apply_formats, check_update, inner_formats
from megaopt.kernels.matrix.tiles import TiledProducts, room_of
from megaopt.kernels.place import Place
from megaopt.kernels.rules import Rule
from megaopt.kernels.rules.matrix import SAME, Matrix, Work
from megaopt.kernels.step.controls import COUNT, SKIP

Tensors = list[torch.Tensor]
NEUTRAL = (1.0, 1.0, 1.0, 0.0, 0.0)
"""Controls that leave an update as it is."""
ALIGNED = 256
"""Pieces of a step's memory begin at multiples of so many bytes."""
WHOLLY: Any = ...
"""The rows of a parameter that is one matrix: of a kept tensor all of it."""


# --- what ranks do for one another


class ParameterMatrix(NamedTuple):
    """A matrix of a parameter."""

    param: int
    """The parameter's place in the batch."""
    rows: Any
    """Its rows among those of all matrices of the parameter, a slice; WHOLLY: it is the only one.
    """
    shape: tuple[int, ...]


class MatrixPart(NamedTuple):
    """Numbers of a matrix that this rank has; of one there may be several."""

    piece: int
    """The matrix's place in its bucket."""
    first: int
    """Its first number in the rank's part of the parameter, where its numbers follow each other."""
    numel: int


class MatrixBox(NamedTuple):
    """Rows of numbers of a matrix, and where they lie in a message, one behind another."""

    matrix: int
    """Its place in `Bucket.indices`."""
    first: int
    """The count of the matrix's numbers before its first."""
    rows: int
    columns: int
    stride: int
    """The distance between the beginnings of rows in the matrix."""
    place: int
    """The count of the message's numbers before its first."""


class Local(NamedTuple):
    """A matrix of which no other rank has any part."""

    piece: ParameterMatrix
    runs: list[tuple[int, int]]
    """Its numbers in this rank's tensor: where those that follow each other begin, how many."""


class Bucket(Protocol):
    """Matrices that are on their way together."""

    pieces: Sequence[ParameterMatrix]
    parts: Sequence[MatrixPart]
    """The parts, in the order in which they are sent; none is empty."""
    returned: Sequence[int]
    """The places at which parts begin among those that come back."""
    indices: Sequence[int]
    """The places of the matrices that this rank makes."""
    unpacked: Sequence[MatrixBox]
    """The boxes of the matrices `indices` in which the numbers lie that come to this rank."""
    packed: Sequence[MatrixBox]
    """The boxes in which those lie that it sends back."""
    owner: int | None
    """The rank to which the parts of the only matrix go, where all ranks make it together."""


class Exchange(Protocol):
    """The ranks that hold the parts of a batch of matrices; all call the same in the same order.

    `near` has numbers of parts and `far` those of whole matrices, both as bytes, uint8.
    """

    buckets: Sequence[Any]
    """The buckets, each a Bucket."""
    lows: Sequence[Any]
    """The buckets of what `before` makes of each one's matrices: the same where that is SAME."""
    owned: Sequence[Sequence[ParameterMatrix]]
    """The matrices that each rank makes, in the order of the buckets."""
    rank: int
    """This rank's place among them."""
    ranks: int
    """The number of ranks."""
    local: Sequence[Local]
    """Matrices in no bucket, which this rank makes: it alone has them."""
    most: tuple[int, int]
    """The most numbers of `near` and of `far` that a bucket takes."""
    keeps_order: bool
    """Messages to owners come behind those that went back before: all are of NCCL's stream."""

    def add_up(self, tensor: torch.Tensor) -> torch.Tensor:
        """Adds up in place over the ranks that hold the other parts of the same matrices."""

    def there(self, bucket: Any, near: torch.Tensor, far: torch.Tensor, size: int) -> Any:
        """Sends parts in `near` to their matrices' owners; returns what waits, or None.

        size: bytes of a number.
        """

    def back(self, bucket: Any, far: torch.Tensor, near: torch.Tensor, size: int) -> Any:
        """Sends each rank its parts; returns what waits, or None."""

    def hand_out(self, whole: torch.Tensor, owner: int) -> None:
        """Gives all ranks the owner's tensor, in place."""

    def spread(
        self, tensors: Tensors, lengths: Sequence[int], memory: torch.Tensor
    ) -> torch.Tensor:
        """Puts together what all ranks have, of so many numbers each, one behind another.

        memory: of `tiles.room_of` numbers; nothing else is taken.
        """


# --- how a rule makes updates


class UpdateMaker:
    """The way in which updates are made: by the rule's transform, of fp32.

    A rule may have a way of its own.
    """

    direction = sent = FLOAT32
    """The formats of directions, and of what ranks send one another."""
    plans: Any = None
    """The maker of elementwise plans, as a backend is one; None: the backend."""
    shares_work = False
    """Ranks may make a matrix together: there are `room`, `together` and `finish`."""
    launches: Any = None
    """The class that steps a bucket by launches, as TorchBucket by torch's operations: MuonBucket;
    where the rule has a `before`, it is also given the low bucket and places: GaLoreBucket."""
    alone: Any = None
    """Makes the launches of matrices that one rank alone has; None: they are in buckets, too."""

    def __init__(self, matrix: Matrix) -> None:
        self.matrix = matrix

    def sums(self, pieces: Sequence[ParameterMatrix], device: torch.device) -> torch.Tensor | None:
        """New memory for what is added up over the ranks of each matrix; None where nothing is."""
        return None

    def measure(self, directions: Tensors, parts: Sequence[MatrixPart], sums: torch.Tensor) -> None:
        """Adds what is known of this rank's parts of directions to the sums."""

    def send(
        self, directions: Tensors, parts: Sequence[MatrixPart], notes: Any, out: Tensors
    ) -> None:
        """Makes what is sent of directions; `out` are these themselves where formats are alike."""

    def notes(self, sums: Any, pieces: Sequence[ParameterMatrix]) -> Any:
        """Returns what `send` and `make` must know of the matrices, by the sums over all ranks."""

    def make(
        self,
        wholes: Tensors,
        pieces: Sequence[ParameterMatrix],
        indices: Sequence[int],
        notes: Any,
        states: Any,
    ) -> Tensors:
        """Makes the updates of matrices.

        pieces: of the bucket. indices: the matrices' places there, and in the notes. states: what
        states keep for each, which may be written.
        """
        updates = []
        for whole, index, state in zip(wholes, indices, states, strict=True):
            update = self.matrix.rule.after.run(whole, Work(self.matrix.how, Place(0), state))
            check_update(self.matrix, update, whole.dtype, pieces[index].shape)
            updates.append(update)
        return updates


class Renewal(NamedTuple):
    """A step in which what states keep is made anew."""

    turns: Sequence[int]
    """Parameters by their places in the batch, the same on all ranks."""
    renew: Callable[[Sequence[int], Callable[[int], torch.Tensor]], None]
    """Makes it anew for some of them, of the gradient of the one at an index of these."""


NOTHING_NEW = Renewal((), lambda params, grad: None)


# --- the steps


class PartSteps:
    """Elementwise steps of this rank's parts in a bucket; the arguments as SharedSteps has them.

    places: of each parameter's tensors that are cut into the parts.
    """

    def __init__(
        self,
        bucket: Bucket,
        formats: Formats,
        rule: Rule,
        groups: Sequence[int],
        places: Sequence[Place],
        backend: Any,
        device: torch.device,
    ) -> None:
        self._parts, self._formats = bucket.parts, formats
        # of each part, in the order of `bucket.parts`: its parameter, and the count of its numbers
        self._params = [bucket.pieces[part.piece].param for part in bucket.parts]
        self._numels = [part.numel for part in bucket.parts]
        # random bits go by the parameter's numbers, whichever rank has them
        pairs = zip(self._params, bucket.parts, strict=True)
        spots = [places[param].after(part.first, part.numel) for param, part in pairs]
        # the rows of scalars and controls, by the parameters' groups
        rows = [groups[param] for param in self._params]
        self._plan = backend.plan(formats, rule, self._numels, rows, device, None, spots)

    def views(self, memory: torch.Tensor, firsts: Sequence[int] | None = None) -> Tensors:
        """Returns each part in memory; firsts: where they begin; None: one behind another."""
        if firsts is None:
            return list(torch.split(memory[: sum(self._numels)], self._numels))
        return [memory[a : a + n] for a, n in zip(firsts, self._numels, strict=True)]

    def step(self, buffers: Buffers, scalars: Any, controls: Any, **replacements: Tensors) -> None:
        """Steps the parts of parameters' tensors; replacements: in the place of these, by slot."""
        # each slot's tensors are views of the parameters' own, unless they are replaced
        cut_tensors = {
            s: self.cut(s, buffers[s]) for s in self._formats.slots if s not in replacements
        }
        self._plan.look({**cut_tensors, **replacements})
        self._plan.step(scalars, controls)

    def cut(self, slot: str, tensors: Tensors) -> Tensors:
        """Returns the parts of parameters' tensors, flat."""
        # unit: the parameter's numbers to one number of the tensor
        form, unit = self._formats.by_slot.get(slot), 1
        if form is None:  # scales of blocks
            unit = self._formats.by_slot[slot.removesuffix("_scale")].block
        elif form.packed:
            unit = form.packed

        # a part begins and ends at whole blocks and whole packed numbers
        return [
            tensors[param].detach().view(-1)[part.first // unit : (part.first + part.numel) // unit]
            for param, part in zip(self._params, self._parts, strict=True)
        ]


class BucketMemory(NamedTuple):
    """The memory that a bucket takes on its way; all uint8."""

    whole: torch.Tensor
    """The memory in which the others lie."""

    near: torch.Tensor
    """Parts that go to owners."""
    back: torch.Tensor
    """Parts that come from them."""
    far: torch.Tensor
    """Numbers of whole matrices, at the owner."""
    wide: torch.Tensor
    """Directions that are not made where they are sent from."""
    room: torch.Tensor
    """The memory that a bucket's launches take while updates are made."""


@dataclass
class SharedStepRun:
    """One step."""

    buffers: Buffers
    works: Sequence[Work]
    scalars: Any
    controls: torch.Tensor | None
    left_out: torch.Tensor | None
    """The controls of an update."""
    renewal: Renewal
    has_moved: bool = True
    """Tensors, or the step's memory, lie elsewhere than in the step before."""

    @cached_property
    def addresses(self) -> dict[str, numpy.ndarray]:
        """int64 [parameters] for each slot, and for all that states keep: where tensors begin."""
        tensors = dict(self.buffers)
        for name in self.works[0].kept if self.works else ():
            tensors[name] = [work.kept[name] for work in self.works]
        return addresses_of(tensors)


class TorchBucket:
    """Steps a bucket: its elementwise part by a backend's plans, updates by torch's operations.

    Args:
        bucket: of the matrices.
        low: that of what `before` makes of them; the same where that is SAME.
        formats: of every buffer; `matrix` is set.
        making: how updates are made.
        groups: for each parameter its row of scalars.
        places: of each rank's part in its parameter.
        low_places: of its moments.
        plans: makes plans, as a backend does.
        device: of all.
    """

    def __init__(
        self,
        bucket: Bucket,
        low: Bucket,
        formats: Formats,
        making: Any,
        groups: Sequence[int],
        places: Sequence[Place],
        low_places: Sequence[Place],
        plans: Any,
        device: torch.device,
    ) -> None:
        assert formats.matrix is not None

        self._bucket, self._low, self._making, self._device = bucket, low, making, device
        self._groups, self._grad, rule = groups, formats.grad, formats.matrix.rule
        self._grad_dtype = formats.dtype("grad")
        self._before = rule.before
        # the moments are of the low bucket, and so are the directions
        inner, apply = inner_formats(formats, making.direction), apply_formats
        self.inner = PartSteps(low, inner, rule.inner, groups, low_places, plans, device)
        # updates come back in the dtype that ranks send, in the place of gradients
        update = apply(formats, GRADS[making.sent.dtype])
        self.apply = PartSteps(bucket, update, rule.apply, groups, places, plans, device)

        self.room = 0
        """Bytes that launches take while updates are made."""
        self.sums: torch.Tensor | None = None
        """The sums that ranks add up between `direct` and `send`."""
        # of one step: what one phase makes and a later one reads
        self._notes: Any = None
        self._directions: Tensors = []
        self._out: Tensors = []

    def lie(self, begins: dict[str, int]) -> None:
        """Hears where BucketMemory's pieces begin in a step's memory: no launch must know it."""

    def ready(self) -> None:
        """Takes the memory of what is added up."""
        self.sums = self._making.sums(self._low.pieces, self._device)

    def send_grads(self, run: SharedStepRun, memory: BucketMemory) -> None:
        """Leaves this rank's parts of gradients in `near`, where `before` makes others of them."""
        # one part behind another, as the exchange sends them
        into = self.apply.views(memory.near.view(self._grad_dtype))
        if into:
            torch._foreach_copy_(into, self.apply.cut("grad", run.buffers["grad"]))

    def renew(self, run: SharedStepRun, memory: BucketMemory) -> Tensors:
        """Makes anew what is kept, of the whole gradients in `far`, and returns these."""
        # the gradients leave `far` here: what is made of them may be written over it
        grads = unpacked(self._bucket, memory.far.view(self._grad_dtype))
        renewed(self._bucket, run.renewal, grads)
        return grads

    def project(self, run: SharedStepRun, memory: BucketMemory) -> None:
        """Makes what `before` makes of gradients, and leaves its parts in `far`."""
        # fp32 [rows, columns] of each matrix that this rank makes
        grads = map(self._grad.decode_reference, self.renew(run, memory))
        pairs = zip(grads, params_of(self._bucket), strict=True)
        # the smaller matrices of which the moments are
        lows = [self._before.run(grad, run.works[param]) for grad, param in pairs]
        pack(self._low, lows, memory.far.view(self._making.sent.dtype))

    def direct(self, run: SharedStepRun, memory: BucketMemory) -> None:
        """Steps moments, and makes directions."""
        # without `before` directions are made of parameters' own gradients, and sent from `near`
        making, sent = self._making, memory.near
        grads: dict[str, Any] = {}
        if self._before is not SAME:
            # `near` has what the owners made of gradients: directions go elsewhere
            near = memory.near.view(making.sent.dtype)
            sent, grads = memory.wide, {"grad": self.inner.views(near, self._low.returned)}

        # where formats are alike directions are made in the place from which they are sent
        self._out = self.inner.views(sent.view(making.sent.dtype))
        self._directions = self._out
        if making.direction.dtype is not making.sent.dtype:
            self._directions = self.inner.views(memory.wide.view(making.direction.dtype))

        # the inner rule writes directions where other rules write weights
        numbers = (run.buffers, run.scalars, run.controls)
        self.inner.step(*numbers, weight=self._directions, **grads)
        # this rank's share of the sums: SharedSteps adds up what all ranks have
        if self.sums is not None:
            making.measure(self._directions, self._low.parts, self.sums)

    def send(self, memory: BucketMemory) -> None:
        """Makes what is sent of the directions, by the sums over all ranks."""
        # of all matrices of the bucket: the sums of other owners' matrices are here, too
        self._notes = self._making.notes(self.sums, self._low.pieces)
        self._making.send(self._directions, self._low.parts, self._notes, self._out)

    @property
    def notes(self) -> Any:
        """The notes of the matrices; None where this rank failed to make them."""
        return self._notes

    def make(self, run: SharedStepRun, memory: BucketMemory, update: torch.Tensor | None) -> None:
        """Makes updates, and leaves their parts in `far`; what states keep is stepped.

        But for groups that are left out. update: of the matrix that ranks have made together.
        """
        # the matrices of this rank, and views of what their states keep
        bucket, making = self._bucket, self._making
        pieces = [bucket.pieces[index] for index in bucket.indices]
        states = [_kept(run.works, piece) for piece in pieces]

        # the host does not know which groups are left out: a copy of all is kept
        before: list[dict[str, torch.Tensor]] = []
        if run.controls is not None:
            before = [{name: tensor.clone() for name, tensor in state.items()} for state in states]

        updates: Tensors
        far = memory.far.view(making.sent.dtype)
        if update is None:
            wholes = unpacked(self._low, far)
            # each owner makes its own matrices
            updates = making.make(wholes, bucket.pieces, bucket.indices, self._notes, states)
        else:
            # all ranks have the update, and its owner alone steps what is kept
            updates = making.finish([update], states) if pieces else []

        # groups that are left out get their copy again; without controls the loop is empty
        for piece, state, old in zip(pieces, states, before, strict=False):
            assert run.controls is not None
            is_left_out = run.controls[self._groups[piece.param], SKIP] != 0
            for name, tensor in state.items():
                tensor.copy_(torch.where(is_left_out, old[name], tensor))

        # the directions have been copied out of `far`: updates take their place
        pack(bucket, updates, far)

    def finish(self, run: SharedStepRun, memory: BucketMemory) -> None:
        """Steps weights and masters by the updates' parts that have come back."""
        # parts come ordered by owner, which need not be the order in which they are stepped
        back = memory.back.view(self._making.sent.dtype)
        parts = self.apply.views(back, self._bucket.returned)
        self.apply.step(run.buffers, run.scalars, run.left_out, grad=parts)
        self._notes, self.sums, self._directions, self._out = None, None, [], []


def unpacked(bucket: Bucket, far: torch.Tensor) -> Tensors:
    """Makes the matrices `bucket.indices` of the parts that have come."""
    # whole matrices [rows, columns], new memory beside the message
    matrices = [far.new_empty(bucket.pieces[index].shape) for index in bucket.indices]
    pairs = _boxes_beside_parts(bucket.unpacked, matrices, far)
    if pairs:
        torch._foreach_copy_([box for box, _ in pairs], [part for _, part in pairs])
    return matrices


def renewed(bucket: Bucket, renewal: Renewal, grads: Sequence[torch.Tensor]) -> None:
    """Makes anew what is kept of the matrices `bucket.indices` whose turn it is."""
    # all ranks know all turns, and each renews what it owns
    grads_by_param = dict(zip(params_of(bucket), grads, strict=True))
    turns = [param for param in renewal.turns if param in grads_by_param]
    renewal.renew(turns, lambda index: grads_by_param[turns[index]])


def params_of(bucket: Bucket) -> list[int]:
    """Returns the parameters of the matrices `bucket.indices`."""
    return [bucket.pieces[index].param for index in bucket.indices]


def pack(bucket: Bucket, updates: Tensors, far: torch.Tensor) -> None:
    """Writes the parts of the updates of `bucket.indices`."""
    # every rank's part of each matrix, one rank's parts behind another's
    pairs = _boxes_beside_parts(bucket.packed, [update.contiguous() for update in updates], far)
    if pairs:
        torch._foreach_copy_([part for _, part in pairs], [box for box, _ in pairs])


def _boxes_beside_parts(
    boxes: Sequence[MatrixBox], matrices: Tensors, far: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Returns views of the boxes in matrices, each beside that of its numbers in a message."""
    pairs = []
    for index, first, rows, columns, stride, place in boxes:
        # both views are [rows, columns]: in the matrix rows are `stride` apart, in the message not
        box = matrices[index].view(-1)[first:].as_strided((rows, columns), (stride, 1))
        pairs.append((box, far[place : place + rows * columns].view(rows, columns)))
    return pairs


@dataclass
class BucketSteps:
    """A bucket, and where it is on its way."""

    bucket: Any
    low: Any
    """The bucket of what `before` makes of the gradients, and of the directions."""
    steps: Any
    """TorchBucket, or as it."""
    on_its_way: Any = None

    def arrive(self) -> None:
        """Waits for what was sent last, if it has not come."""
        message, self.on_its_way = self.on_its_way, None
        if message is not None:
            message.wait()


class SharedSteps:
    """The steps of a batch of matrices that several ranks share; MatrixPlan's `launches`.

    Args:
        formats: of every buffer; `matrix` is set.
        making: how owners make updates: UpdateMaker, or as it.
        groups: for each parameter its row of scalars.
        places: of each rank's part in its parameter.
        low_places: of its moments, in all of them.
        backend: of kernels.backends.
        device: of all.
        exchange: an Exchange, with the other ranks.
        state_shapes: shapes of what the state of each parameter keeps.
        local: steps the matrices that this rank alone has, if there are any: MuonLaunches.
    """

    def __init__(
        self,
        formats: Formats,
        making: Any,
        groups: Sequence[int],
        places: Sequence[Place],
        low_places: Sequence[Place],
        backend: Any,
        device: torch.device,
        exchange: Any,
        state_shapes: Sequence[dict[str, tuple[int, ...]]],
        local: Any = None,
    ) -> None:
        assert formats.matrix is not None
        self._making, self._exchange, self._device = making, exchange, device

        self._local = local
        self._before = formats.matrix.rule.before
        self._is_projected, self._grad_dtype = self._before is not SAME, formats.dtype("grad")
        # the formats of the gradients' norm: without moments and master
        measured = Formats(formats.grad, formats.weight, NONE, (), ())
        self._measure = partial(
            backend.plan, measured, making.matrix.rule.apply, groups=groups, device=device
        )
        self._measured: Any = None

        # each bucket has its own steps, planned once
        plans = making.plans or backend
        sides = (groups, places, low_places, plans, device)
        self._ways = []
        for bucket, low in zip(exchange.buckets, exchange.lows, strict=True):
            # a matrix that all ranks make together has no launches
            if making.launches is not None and bucket.owner is None:
                low_arguments = (low, low_places) if self._is_projected else ()
                steps = making.launches(bucket, formats, groups, places, device, *low_arguments)
            else:
                steps = TorchBucket(bucket, low, formats, making, *sides)
            self._ways.append(BucketSteps(bucket, low, steps))

        by_launches = all(not isinstance(way.steps, TorchBucket) for way in self._ways)
        self.is_captured = by_launches and (not self._ways or exchange.keeps_order)
        """A CUDA graph can repeat a step: launches, and messages of NCCL if there are any."""
        # the layout of a step's memory, which is taken in `ready`
        self._places = self._placed([way.steps for way in self._ways])
        self.many_calls = device.type == "cpu"  # elsewhere nobody has memory for copies
        self.renewal = NOTHING_NEW
        """The renewal that the next step makes."""
        # for each rank the count of numbers that states keep for the matrices it owns
        self._lengths = [
            sum(_kept_numel(state_shapes, piece) for piece in pieces) for pieces in exchange.owned
        ]

        # memory of one step: from `ready` to the end of `_go`
        self._memory: list[BucketMemory] = []
        self._rooms: list[Any] = []
        self._spread_room: torch.Tensor | None = None

        # fp32 [COUNT] and bool [COUNT]: of controls an update is told SKIP alone
        self._neutral = torch.tensor(NEUTRAL, device=device)
        self._skip = torch.arange(COUNT, device=device) == SKIP
        # fp32 [groups, numbers of a rule]: the scalars for launches
        self._rows = DeviceTable(device)
        self._lay: list[Any] | None = None
        """The addresses of tensors and memory in the last step, if it was whole."""
        self._error: Exception | None = None

    def accumulate(self, buffers: Buffers, bins: torch.Tensor) -> None:
        """Adds the squares of the whole gradients to the bins of megaopt.kernels.norm."""
        # this rank's own numbers, whichever matrices they are of
        if self._measured is None:
            self._measured = self._measure(numels=[grad.numel() for grad in buffers["grad"]])
        self._measured.look({slot: buffers[slot] for slot in ("grad", "weight")})
        self._measured.accumulate(bins)

    @property
    def _phases(self) -> list[tuple[int, Callable[[int, SharedStepRun], None]]]:
        """The phases of a turn, each for the bucket that began so many turns before.

        All buckets are on their way at once: while the products of one are made, the directions of
        the next one go to owners, and the updates of the last one come from them. What a rank must
        know of the sums over all is asked for while no long message is in front of it.
        """
        if self._is_projected:
            # gradients go there, low ones come back, directions go there, updates come back
            return [
                *((0, self._send), (1, self._project), (2, self._direct), (2, self._leave)),
                *((3, self._make), (3, self._return), (4, self._finish)),
            ]
        # updates of the bucket two turns before leave ahead of this one's directions
        return [
            *((0, self._direct), (2, self._return), (0, self._leave)),
            *((1, self._make), (2, self._finish)),
        ]

    def _placed(self, steps: Sequence[Any]) -> tuple[list[int], list[dict[str, int]]]:
        """Returns the bytes of each area of a step's memory, and each bucket's areas of its pieces.

        Buckets take turns with the pieces. When updates come back, two turns after their directions
        left, those of the turn between have left too, and updates come where these were. What goes
        back from an owner makes room for what comes there next, where messages keep their order.
        """
        making, exchange = self._making, self._exchange
        # bytes: near, parts; far, whole matrices; room, launches; wide, directions of another dtype
        near, far = (making.sent.dtype.itemsize * most for most in exchange.most)
        room, wide = max((bucket_steps.room for bucket_steps in steps), default=0), 0
        if self._is_projected or making.direction.dtype is not making.sent.dtype:
            wide = making.direction.dtype.itemsize * exchange.most[0]

        # how many areas there are of each kind
        nears, fars, wides = 2, 2 if exchange.keeps_order else 3, 1
        if self._is_projected:
            # buckets of five turns are on their way at once, and no two share an area
            nears = fars = wides = 5
        elif room:  # an iteration has ended when directions are made of the next ones
            room, wides = max(room, wide), 0
        # of a few buckets each has its own
        nears, fars, wides = (min(areas, max(len(steps), 1)) for areas in (nears, fars, wides))

        # the areas in their order: room, then those of near, of far and of wide
        needed = [room, *[near] * nears, *[far] * fars, *[wide] * wides]
        sizes = [-(-size // ALIGNED) * ALIGNED for size in needed]
        # bytes before each area, and the places of each kind's areas among all
        begins, areas = list(accumulate(sizes, initial=0)), range(len(sizes))
        near_areas, far_areas = areas[1 : 1 + nears], areas[1 + nears : 1 + nears + fars]
        # without an area of their own wide directions lie in `room`
        wide_areas = areas[1 + nears + fars :] or areas[:1]

        places = []
        for turn, bucket_steps in enumerate(steps):
            # updates come back into `near` of the next bucket, whose directions have left it
            ahead = 0 if self._is_projected else 1
            places.append(
                {
                    "near": near_areas[turn % nears],
                    "back": near_areas[(turn + ahead) % nears],
                    "far": far_areas[turn % fars],
                    "wide": wide_areas[turn % len(wide_areas)],
                    "room": 0,
                }
            )
            # launches make their tables by this, before any memory is there
            bucket_steps.lie({name: begins[area] for name, area in places[-1].items()})
        return sizes, places

    def ready(self) -> None:
        """Takes the memory in which ranks exchange, before they meet: a rank without it says so."""
        making, exchange = self._making, self._exchange
        sizes, places = self._places
        # one allocation, and views of it for each bucket
        whole = torch.empty(sum(sizes), dtype=torch.uint8, device=self._device)
        areas = torch.split(whole, sizes)
        self._memory = [
            BucketMemory(whole, **{name: areas[area] for name, area in place.items()})
            for place in places
        ]

        for way in self._ways:
            way.steps.ready()

        # a matrix that all ranks make has the memory of its iteration on each of them
        together = [way.bucket for way in self._ways if way.bucket.owner is not None]

        def new(count: int, dtype: torch.dtype = making.sent.dtype) -> torch.Tensor:
            return torch.empty(count, dtype=dtype, device=self._device)

        self._rooms = [
            (
                making.room(shape, self._device),
                new(TiledProducts.numel(shape, exchange.rank, exchange.ranks)),
            )
            for shape in (bucket.pieces[0].shape for bucket in together)
        ]

        # fp32: the owners' states on their way to all ranks
        if self._before.renew is None and any(self._lengths):
            numel = room_of(self._lengths, exchange.rank)
            self._spread_room = new(numel, torch.float32)

    def step(
        self, buffers: Buffers, works: Sequence[Work], scalars: Any, controls: torch.Tensor | None
    ) -> None:
        """Takes one step of every parameter.

        A rank that fails goes on with the exchange, as others wait for it, and raises at its end.
        """
        # no other rank waits for these, and nothing of them is sent
        if self._local is not None:
            self._try(self._local.step, buffers, works, scalars, controls)

        # fp32 [groups, COUNT]: neutral but for SKIP, as an update has no loss scale
        left_out = None
        if controls is not None:
            left_out = self._try(torch.where, self._skip, controls, self._neutral)
        # launches read scalars on the device: those that changed are uploaded
        if self._making.launches is not None and not isinstance(scalars, torch.Tensor):
            scalars = self._try(self._rows.update, numpy.array(scalars, dtype=numpy.float32))

        run = SharedStepRun(buffers, works, scalars, controls, left_out, self.renewal)
        if self._making.launches is not None and self._memory:
            # launches keep their tables as long as all tensors and the memory lie where they did
            before, self._lay = self._lay, None
            lies: list[Any] = [row.tobytes() for row in run.addresses.values()]
            lies.append(self._memory[0].whole.data_ptr())
            run.has_moved = lies != before
            self._go(self._phases, run)
            self._lay = lies  # not after an error
        else:
            self._go(self._phases, run)

    def renew(self, buffers: Buffers, works: Sequence[Work]) -> None:
        """Makes anew what is kept, as `renewal` says, of these gradients, and steps nothing."""
        if self.renewal.turns:
            # as a step: all ranks take memory, gradients go to owners, and these renew
            self.ready()
            self._lay = None  # launches hear of other memory than the last step's
            run = SharedStepRun(buffers, works, None, None, None, self.renewal)
            self._go([(0, self._send), (1, self._renew)], run)

    def _go(
        self, phases: Sequence[tuple[int, Callable[[int, SharedStepRun], None]]], run: SharedStepRun
    ) -> None:
        # last: turns after the last bucket's first phase until its last phase
        count, last = len(self._ways), max(behind for behind, _ in phases)
        try:
            # all ranks go through the same turns and phases: no message is without its partner
            for turn in range(count + last):
                for behind, phase in phases:
                    if 0 <= turn - behind < count:
                        phase(turn - behind, run)
            self._tell(run)
        except Exception as later:
            # after a fault of the device every call fails: the first error tells of the cause
            self._error = self._error or later
        # what was taken for the step goes; an error is raised when no other rank waits for this one
        self._memory, self._rooms, self.renewal = [], [], NOTHING_NEW
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _try(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Returns what a function returns; None where it fails, or something has failed before."""
        if self._error is not None:
            return None
        try:
            return function(*arguments, **named)
        except Exception as error:
            self._error = error
            return None

    # --- phases of the bucket of a turn

    def _send(self, turn: int, run: SharedStepRun) -> None:
        """Gradients go to the owners."""
        way, memory = self._ways[turn], self._memory[turn]
        # this rank's parts, from the gradients to `near`
        self._try(way.steps.send_grads, run, memory)
        # near -> far, to each owner; nobody waits yet
        size = self._grad_dtype.itemsize
        way.on_its_way = self._exchange.there(way.bucket, memory.near, memory.far, size)

    def _project(self, turn: int, run: SharedStepRun) -> None:
        """Owners make another matrix of each gradient, of which each rank gets its part."""
        way, memory = self._ways[turn], self._memory[turn]
        # the owner waits for the gradients of all ranks
        way.arrive()
        self._try(way.steps.project, run, memory)
        # far -> near, to each rank: of the low matrices the parts that it has moments of
        size = self._making.sent.dtype.itemsize
        way.on_its_way = self._exchange.back(way.low, memory.far, memory.near, size)

    def _renew(self, turn: int, run: SharedStepRun) -> None:
        """Owners make anew what is kept."""
        # the owner waits for the gradients of all ranks; nothing goes back
        self._ways[turn].arrive()
        self._try(self._ways[turn].steps.renew, run, self._memory[turn])

    def _direct(self, turn: int, run: SharedStepRun) -> None:
        """Moments are stepped, and directions made."""
        way, memory = self._ways[turn], self._memory[turn]
        # this rank waits for its parts of the low gradients
        if self._is_projected:
            way.arrive()
        self._try(way.steps.direct, run, memory)
        # all ranks add up, also one that has failed; the cast of `send` goes by the sums
        if way.steps.sums is not None:
            self._exchange.add_up(way.steps.sums)
        self._try(way.steps.send, memory)

    def _leave(self, turn: int, run: SharedStepRun) -> None:
        """Directions go to the owners."""
        way, memory = self._ways[turn], self._memory[turn]
        # parts lie in `near`, but for projected ones: there `near` has the low gradients
        sent, form = memory.near, self._making.sent
        if self._is_projected:
            sent, form = memory.wide, self._making.direction
        # near or wide -> far, to each owner; `_make` waits for it a turn later
        size = form.dtype.itemsize
        way.on_its_way = self._exchange.there(way.low, sent, memory.far, size)

    def _make(self, turn: int, run: SharedStepRun) -> None:
        """Owners make updates."""
        way, memory = self._ways[turn], self._memory[turn]
        # the owner waits for the parts of all ranks
        way.arrive()
        # a bucket of one matrix that all ranks make: its tiles go round here
        update = None if way.bucket.owner is None else self._made_together(way, memory)
        self._try(way.steps.make, run, memory, update)

    def _made_together(self, way: BucketSteps, memory: BucketMemory) -> torch.Tensor:
        """Makes the update of a matrix whose tiles all ranks make, before any second moment."""
        # room: the iteration's memory; spare: what tiles are exchanged in
        exchange, owner, (room, spare) = self._exchange, way.bucket.owner, self._rooms.pop(0)
        assert owner is not None
        # one rank has put the direction together, [rows, columns]
        if owner == exchange.rank:
            far = memory.far.view(self._making.sent.dtype)
            self._try(lambda: room.first[0].copy_(unpacked(way.bucket, far)[0]))
        # all get it whole, and each makes its tiles of every product
        exchange.hand_out(room.first[0], owner)

        tiles = TiledProducts(exchange, spare, self._error)
        try:
            update: torch.Tensor = self._making.together(room, way.steps.notes, tiles)
        finally:
            # this rank's, of before or of its tiles
            self._error = tiles.error
        return update

    def _return(self, turn: int, run: SharedStepRun) -> None:
        """Updates go back, into what the directions of the next bucket have left."""
        way, memory = self._ways[turn], self._memory[turn]
        # updates come into the next bucket's `near`: its directions must have left
        if not self._is_projected and turn + 1 < len(self._ways):
            self._ways[turn + 1].arrive()
        # far -> back, to each rank that has parts; `_finish` waits for it
        size = self._making.sent.dtype.itemsize
        way.on_its_way = self._exchange.back(way.bucket, memory.far, memory.back, size)

    def _finish(self, turn: int, run: SharedStepRun) -> None:
        """Weights and masters are stepped."""
        # this rank waits for the updates of its parts, from all owners
        self._ways[turn].arrive()
        self._try(self._ways[turn].steps.finish, run, self._memory[turn])

    # --- what states keep

    def _tell(self, run: SharedStepRun) -> None:
        """Every rank gets what the owners have made of what states keep."""
        if self._before.renew is None:
            # every step changes what is kept: all of it goes, in one message
            return self._spread(run.works)
        # the owner of each parameter's matrix
        owners = {p.param: i for i, pieces in enumerate(self._exchange.owned) for p in pieces}
        # the same parameters in the same order on all ranks
        for param in run.renewal.turns:
            work = run.works[param]
            for tensor in work.kept.values():
                self._exchange.hand_out(tensor, owners[param])
            # None: this rank does not know whether the owner has made it, and looks it up later
            work.is_made = work.is_made or None

    def _spread(self, works: Sequence[Work]) -> None:
        """Gives all ranks what owners have stepped, in one message."""
        # None: no state keeps anything
        memory, self._spread_room = self._spread_room, None
        if memory is None:
            return
        # for each rank what is kept for the matrices that it owns, as views of this rank's states
        states = [
            [_kept(works, piece) for piece in rank_pieces] for rank_pieces in self._exchange.owned
        ]
        tensors = [
            [tensor for state in rank_states for tensor in state.values()] for rank_states in states
        ]

        # fp32: first those of rank 0's matrices, then rank 1's
        numbers = self._exchange.spread(tensors[self._exchange.rank], self._lengths, memory)
        flat = [tensor for rank_tensors in tensors for tensor in rank_tensors]
        for tensor, part in zip(
            flat, torch.split(numbers, [tensor.numel() for tensor in flat]), strict=True
        ):
            # this rank's own come back as they were sent
            tensor.copy_(part.view(tensor.shape))


def _kept(works: Sequence[Work], piece: ParameterMatrix) -> dict[str, torch.Tensor]:
    """Returns what a state keeps for a matrix; of several in a parameter its rows."""
    return {name: tensor[piece.rows] for name, tensor in works[piece.param].kept.items()}


def _kept_numel(state_shapes: Sequence[dict[str, tuple[int, ...]]], piece: ParameterMatrix) -> int:
    """Counts the numbers that a state keeps for a matrix."""
    shapes = state_shapes[piece.param].values()
    if piece.rows is WHOLLY:
        return sum(map(math.prod, shapes))
    # a matrix of several in a parameter has its rows of each tensor
    return sum((piece.rows.stop - piece.rows.start) * math.prod(shape[1:]) for shape in shapes)
