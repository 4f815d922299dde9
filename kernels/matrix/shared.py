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
from typing import Any, NamedTuple, Protocol

import torch

from megaopt.kernels.chunks.batch import Buffers, Formats
from megaopt.kernels.formats import GRADS, NONE
from megaopt.kernels.matrix.plan import FLOAT32, apply_formats, check_update, inner_formats
from megaopt.kernels.matrix.tiles import Tiles, room_of
from megaopt.kernels.place import Place
from megaopt.kernels.rules import Rule
from megaopt.kernels.rules.matrix import SAME, Matrix, Work
from megaopt.kernels.step.controls import COUNT, SKIP

Tensors = list[torch.Tensor]
NEUTRAL = (1.0, 1.0, 1.0, 0.0, 0.0)
"""Controls that leave an update as it is."""
WHOLLY: Any = ...
"""The rows of a parameter that is one matrix: of a kept tensor all of it."""


# --- what ranks do for one another


class Piece(NamedTuple):
    """A matrix of a parameter."""

    param: int
    """The parameter's place in the batch."""
    rows: Any
    """Its rows among those of all matrices of the parameter, a slice; WHOLLY: it is the only one.
    """
    shape: tuple[int, ...]


class Part(NamedTuple):
    """Numbers of a matrix that this rank has; of one there may be several."""

    piece: int
    """The matrix's place in its bucket."""
    first: int
    """Its first number in the rank's part of the parameter, where its numbers follow each other."""
    numel: int


class Bucket(Protocol):
    """Matrices that are on their way together."""

    pieces: Sequence[Piece]
    parts: Sequence[Part]
    """In the order in which they are sent; none is empty."""
    returned: Sequence[int]
    """Where each part begins among those that come back."""
    own: Sequence[int]
    """Which of the matrices this rank makes."""
    owner: int | None
    """The rank to which the parts of the only matrix go, where all ranks make it together."""


class Exchange(Protocol):
    """The ranks that hold the parts of a batch of matrices; all call the same in the same order.

    `near` has numbers of parts and `far` those of whole matrices, each in one dimension.
    """

    buckets: Sequence[Any]
    """Each a Bucket."""
    lows: Sequence[Any]
    """For each bucket that of what `before` makes of its matrices: itself where that is SAME."""
    owned: Sequence[Sequence[Piece]]
    """For each rank the matrices that it makes, in the order of the buckets."""
    rank: int
    """This rank's place among them."""
    ranks: int
    """How many there are."""
    most: tuple[int, int]
    """How many numbers of `near` and of `far` a bucket takes at most."""

    def add_up(self, own: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks that hold the other parts of the same matrices; in place."""

    def there(self, bucket: Any, near: torch.Tensor, far: torch.Tensor) -> Any:
        """Sends parts in `near` to their matrices' owners; returns what `wait` waits for."""

    def wholes(self, bucket: Any, far: torch.Tensor) -> Tensors:
        """The matrices `bucket.own` of the parts that have come."""

    def pack(self, bucket: Any, updates: Tensors, far: torch.Tensor) -> None:
        """Writes the parts of the updates of `bucket.own`."""

    def back(self, bucket: Any, far: torch.Tensor, near: torch.Tensor) -> Any:
        """Sends each rank its parts; returns what `wait` waits for."""

    def hand_out(self, whole: torch.Tensor, owner: int) -> None:
        """Gives all ranks the owner's tensor, in place."""

    def spread(self, own: Tensors, lengths: Sequence[int], memory: torch.Tensor) -> torch.Tensor:
        """Puts together what all ranks have, of so many numbers each, one behind another.

        memory: of `tiles.room_of` numbers; nothing else is taken.
        """


# --- how a rule makes updates


class Making:
    """How updates are made: by the rule's transform, of fp32. A rule may have a way of its own."""

    direction = sent = FLOAT32
    """The formats of directions, and of what ranks send one another."""
    plans: Any = None
    """What makes plans of what is elementwise, as a backend does; None: the backend."""
    shares_work = False
    """Ranks may make a matrix together: there are `room`, `together` and `finish`."""

    def __init__(self, matrix: Matrix) -> None:
        self.matrix = matrix

    def sums(self, pieces: Sequence[Piece], device: torch.device) -> torch.Tensor | None:
        """New memory for what is added up over the ranks of each matrix; None where nothing is."""
        return None

    def measure(self, directions: Tensors, parts: Sequence[Part], sums: torch.Tensor) -> None:
        """Adds what is known of this rank's parts of directions to the sums."""

    def send(self, directions: Tensors, parts: Sequence[Part], notes: Any, out: Tensors) -> None:
        """Makes what is sent of directions; `out` are these themselves where formats are alike."""

    def notes(self, sums: Any, pieces: Sequence[Piece]) -> Any:
        """What `send` and `make` must know of the matrices, by the sums over all ranks."""

    def make(
        self, wholes: Tensors, pieces: Sequence[Piece], own: Sequence[int], notes: Any, kept: Any
    ) -> Tensors:
        """The updates of matrices.

        pieces: of the bucket. own: the matrices' places there, and in the notes. kept: what states
        keep for each, which may be written.
        """
        found = []
        for whole, index, each in zip(wholes, own, kept, strict=True):
            update = self.matrix.rule.after.run(whole, Work(self.matrix.how, Place(0), each))
            check_update(self.matrix, update, whole.dtype, pieces[index].shape)
            found.append(update)
        return found


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
        self._params = [bucket.pieces[part.piece].param for part in bucket.parts]
        self._numels = [part.numel for part in bucket.parts]
        pairs = zip(self._params, bucket.parts, strict=True)
        spots = [places[param].after(part.first, part.numel) for param, part in pairs]
        rows = [groups[param] for param in self._params]
        self._plan = backend.plan(formats, rule, self._numels, rows, device, None, spots)

    def views(self, memory: torch.Tensor, firsts: Sequence[int] | None = None) -> Tensors:
        """Each part in memory; firsts: where they begin, without it one behind another."""
        if firsts is None:
            return list(torch.split(memory[: sum(self._numels)], self._numels))
        return [memory[a : a + n] for a, n in zip(firsts, self._numels, strict=True)]

    def step(self, buffers: Buffers, scalars: Any, controls: Any, **others: Tensors) -> None:
        """Steps the parts of parameters' tensors; others: in the place of these, by slot."""
        own = {s: self.cut(s, buffers[s]) for s in self._formats.slots if s not in others}
        self._plan.look({**own, **others})
        self._plan.step(scalars, controls)

    def cut(self, slot: str, tensors: Tensors) -> Tensors:
        """The parts of parameters' tensors, flat."""
        form, unit = self._formats.by_slot.get(slot), 1
        if form is None:  # scales of blocks
            unit = self._formats.by_slot[slot.removesuffix("_scale")].block
        elif form.packed:
            unit = form.packed
        return [
            tensors[param].detach().view(-1)[part.first // unit : (part.first + part.numel) // unit]
            for param, part in zip(self._params, self._parts, strict=True)
        ]


@dataclass
class Way:
    """A bucket, and where it is on its way."""

    bucket: Any
    low: Any
    """The bucket of what `before` makes of the gradients, and of the directions."""
    inner: PartSteps
    """Steps the moments, and leaves directions."""
    apply: PartSteps
    """Steps weights and masters by updates."""
    sums: Any = None
    notes: Any = None
    on_its_way: Any = None

    def arrive(self) -> None:
        """Waits for what was sent last."""
        self.on_its_way.wait()
        self.on_its_way = None


class Memory(NamedTuple):
    """The memory that a bucket takes on its way."""

    near: torch.Tensor
    """Parts that go to owners, and come from them."""
    far: torch.Tensor
    """Those of whole matrices, at the owner."""
    directions: torch.Tensor
    """Directions that are not made where they are sent from."""


class Run(NamedTuple):
    """One step."""

    buffers: Buffers
    works: Sequence[Work]
    scalars: Any
    controls: torch.Tensor | None
    left_out: torch.Tensor | None
    """The controls of an update."""
    renewal: Renewal


class SharedSteps:
    """The steps of a batch of matrices that several ranks share; MatrixPlan's `launches`.

    Args:
        formats: of every buffer; `matrix` is set.
        making: how owners make updates: Making, or as it.
        groups: for each parameter its row of scalars.
        places: of each rank's part in its parameter.
        low_places: of its moments, in all of them.
        backend: of kernels.backends.
        device: of all.
        exchange: an Exchange, with the other ranks.
        kept: shapes of what the state of each parameter keeps.
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
        kept: Sequence[dict[str, tuple[int, ...]]],
    ) -> None:
        assert formats.matrix is not None
        self._making, self._exchange, self._device = making, exchange, device
        self._formats, self._groups, self._backend = formats, groups, making.plans or backend
        rule, self._grad_dtype = formats.matrix.rule, formats.dtype("grad")
        self._before, self._is_projected = rule.before, rule.before is not SAME
        own = (groups, low_places, self._backend, device)
        inner = inner_formats(formats, making.direction), rule.inner, *own
        own = (groups, places, self._backend, device)
        apply = apply_formats(formats, GRADS[making.sent.dtype]), rule.apply, *own
        self._ways = [
            Way(bucket, low, PartSteps(low, *inner), PartSteps(bucket, *apply))
            for bucket, low in zip(exchange.buckets, exchange.lows, strict=True)
        ]
        self.many_calls = device.type == "cpu"  # elsewhere nobody has memory for copies
        self.renewal = NOTHING_NEW
        """The renewal that the next step makes."""
        self._lengths = [sum(_kept_numel(kept, each) for each in own) for own in exchange.owned]
        self._memory: list[Memory] = []
        self._rooms: list[Any] = []
        self._spread_room: torch.Tensor | None = None
        self._neutral = torch.tensor(NEUTRAL, device=device)
        self._skip = torch.arange(COUNT, device=device) == SKIP
        self._error: Exception | None = None

    def accumulate(self, buffers: Buffers, bins: torch.Tensor) -> None:
        """Adds the squares of the whole gradients to the bins of megaopt.kernels.norm."""
        own = {slot: buffers[slot] for slot in ("grad", "weight")}
        measured = Formats(self._formats.grad, self._formats.weight, NONE, (), ())
        numels = [tensor.numel() for tensor in own["grad"]]
        rule = self._making.matrix.rule.apply
        plan = self._backend.plan(measured, rule, numels, self._groups, self._device)
        plan.look(own)
        plan.accumulate(bins)

    @property
    def _phases(self) -> list[Callable[[Way, Memory, Run], None]]:
        """The phases of each bucket, one after another."""
        first = [self._send, self._project] if self._is_projected else []
        return [*first, self._direct, self._make, self._finish]

    def ready(self) -> None:
        """Takes the memory in which ranks exchange, before they meet: a rank without it says so."""
        making, exchange = self._making, self._exchange
        sent, direction = making.sent.dtype, making.direction.dtype
        near, far = exchange.most
        wide = near if self._is_projected or direction is not sent else 0

        def new(count: int, dtype: torch.dtype = sent) -> torch.Tensor:
            return torch.empty(count, dtype=dtype, device=self._device)

        sets = min(len(self._phases), len(self._ways))
        self._memory = [Memory(new(near), new(far), new(wide, direction)) for _ in range(sets)]
        for way in self._ways:
            way.sums = making.sums(way.low.pieces, self._device)
        together = [way.bucket for way in self._ways if way.bucket.owner is not None]
        self._rooms = [
            (
                making.room(shape, self._device),
                new(Tiles.numel(shape, exchange.rank, exchange.ranks)),
            )
            for shape in (own.pieces[0].shape for own in together)
        ]
        if self._before.renew is None and any(self._lengths):
            numel = room_of(self._lengths, exchange.rank)
            self._spread_room = new(numel, torch.float32)

    def step(
        self, buffers: Buffers, works: Sequence[Work], scalars: Any, controls: torch.Tensor | None
    ) -> None:
        """One step of every parameter.

        A rank that fails goes on with the exchange, as others wait for it, and raises at its end.
        """
        left_out = None
        if controls is not None:
            left_out = self._try(torch.where, self._skip, controls, self._neutral)
        self._go(self._phases, Run(buffers, works, scalars, controls, left_out, self.renewal))

    def renew(self, buffers: Buffers, works: Sequence[Work]) -> None:
        """Makes anew what is kept, as `renewal` says, of these gradients, and steps nothing."""
        if self.renewal.turns:
            self.ready()
            phases = [self._send, self._whole_gradients]
            self._go(phases, Run(buffers, works, None, None, None, self.renewal))

    def _go(self, phases: Sequence[Callable[..., Any]], run: Run) -> None:
        memory, self._memory, self.renewal = self._memory, [], NOTHING_NEW
        count = len(self._ways)
        try:
            for turn in range(count + len(phases) - 1):
                for behind, phase in enumerate(phases):
                    place = turn - behind
                    if 0 <= place < count:
                        phase(self._ways[place], memory[place % len(memory)], run)
            self._tell(run)
        except Exception as later:
            # after a fault of the device every call fails: the first error tells of the cause
            self._error = self._error or later
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _try(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """What a function returns; None where it fails, or something has failed before."""
        if self._error is not None:
            return None
        try:
            return function(*arguments, **named)
        except Exception as error:
            self._error = error
            return None

    # --- phases

    def _send(self, way: Way, memory: Memory, run: Run) -> None:
        """Gradients go to the owners."""
        near, far = (each.view(self._grad_dtype) for each in (memory.near, memory.far))
        self._try(_copy, way.apply.views(near), way.apply, run.buffers["grad"])
        way.on_its_way = self._exchange.there(way.bucket, near, far)

    def _project(self, way: Way, memory: Memory, run: Run) -> None:
        """Owners make another matrix of each gradient, of which each rank gets its part."""
        wholes = self._whole_gradients(way, memory, run)
        lows = self._try(self._projected, way, wholes, run.works)
        self._try(self._exchange.pack, way.low, lows, memory.far)
        way.on_its_way = self._exchange.back(way.low, memory.far, memory.near)

    def _whole_gradients(self, way: Way, memory: Memory, run: Run) -> Any:
        """Those of `bucket.own`, fp32, of which what is kept has been made anew."""
        way.arrive()
        return self._try(self._renewed, way, memory.far.view(self._grad_dtype), run.renewal)

    def _renewed(self, way: Way, far: torch.Tensor, renewal: Renewal) -> Tensors:
        grads = self._exchange.wholes(way.bucket, far)
        own = dict(zip(_params(way), grads, strict=True))
        turns = [param for param in renewal.turns if param in own]
        renewal.renew(turns, lambda index: own[turns[index]])
        return [self._formats.grad.decode_reference(grad) for grad in grads]

    def _projected(self, way: Way, wholes: Tensors, works: Sequence[Work]) -> Tensors:
        pairs = zip(wholes, _params(way), strict=True)
        return [self._before.run(whole, works[param]) for whole, param in pairs]

    def _direct(self, way: Way, memory: Memory, run: Run) -> None:
        """Moments are stepped, and directions go to the owners."""
        making, (near, far, own) = self._making, memory
        given, sent = {}, near
        if self._is_projected:
            way.arrive()
            given["grad"], sent = way.inner.views(near, way.low.returned), own
        out = way.inner.views(sent)
        directions = way.inner.views(own) if own.numel() and sent is near else out
        own_numbers = (run.buffers, run.scalars, run.controls)
        self._try(way.inner.step, *own_numbers, weight=directions, **given)
        if way.sums is not None:
            self._try(making.measure, directions, way.low.parts, way.sums)
            self._exchange.add_up(way.sums)
        way.notes = self._try(making.notes, way.sums, way.low.pieces)
        self._try(making.send, directions, way.low.parts, way.notes, out)
        way.on_its_way = self._exchange.there(way.low, sent, far)

    def _make(self, way: Way, memory: Memory, run: Run) -> None:
        """Owners make updates, and send them back."""
        way.arrive()
        bucket, (near, far, _) = way.bucket, memory
        update = None if bucket.owner is None else self._made_together(way, far)
        updates = self._try(self._made, way, far, run, update)
        self._try(self._exchange.pack, bucket, updates, far)
        way.on_its_way = self._exchange.back(bucket, far, near)

    def _made_together(self, way: Way, far: torch.Tensor) -> torch.Tensor:
        """The update of a matrix of which every rank makes tiles, before any second moment."""
        exchange, owner, (room, memory) = self._exchange, way.bucket.owner, self._rooms.pop(0)
        assert owner is not None
        if owner == exchange.rank:
            self._try(lambda: room.first[0].copy_(exchange.wholes(way.bucket, far)[0]))
        exchange.hand_out(room.first[0], owner)
        tiles = Tiles(exchange, memory, self._error)
        try:
            update: torch.Tensor = self._making.together(room, way.notes, tiles)
        finally:
            self._error = tiles.error
        return update

    def _made(self, way: Way, far: torch.Tensor, run: Run, update: torch.Tensor | None) -> Tensors:
        """The updates; what states keep is stepped, but of groups that are left out.

        update: of the matrix that ranks have made together.
        """
        bucket, making = way.bucket, self._making
        pieces = [bucket.pieces[index] for index in bucket.own]
        kept = [_kept(run.works, piece) for piece in pieces]
        before: list[dict[str, torch.Tensor]] = []
        if run.controls is not None:
            before = [{name: each.clone() for name, each in own.items()} for own in kept]
        updates: Tensors
        if update is None:
            wholes = self._exchange.wholes(way.low, far)
            updates = making.make(wholes, bucket.pieces, bucket.own, way.notes, kept)
        else:
            updates = making.finish([update], kept) if pieces else []
        for piece, own, old in zip(pieces, kept, before, strict=False):
            assert run.controls is not None
            is_left_out = run.controls[self._groups[piece.param], SKIP] != 0
            for name, each in own.items():
                each.copy_(torch.where(is_left_out, old[name], each))
        return updates

    def _finish(self, way: Way, memory: Memory, run: Run) -> None:
        """Weights and masters are stepped."""
        way.arrive()
        parts = way.apply.views(memory.near, way.bucket.returned)
        self._try(way.apply.step, run.buffers, run.scalars, run.left_out, grad=parts)
        way.notes = way.sums = None

    # --- what states keep

    def _tell(self, run: Run) -> None:
        """Every rank gets what the owners have made of what states keep."""
        if self._before.renew is None:
            return self._spread(run.works)
        owners = {p.param: i for i, own in enumerate(self._exchange.owned) for p in own}
        for param in run.renewal.turns:
            work = run.works[param]
            for each in work.kept.values():
                self._exchange.hand_out(each, owners[param])
            work.is_made = work.is_made or None

    def _spread(self, works: Sequence[Work]) -> None:
        """Gives all ranks what owners have stepped, in one message."""
        memory, self._spread_room = self._spread_room, None
        if memory is None:
            return
        pieces = [[_kept(works, piece) for piece in own] for own in self._exchange.owned]
        kept = [[each for own in ranks for each in own.values()] for ranks in pieces]
        found = self._exchange.spread(kept[self._exchange.rank], self._lengths, memory)
        flat = [each for own in kept for each in own]
        for each, part in zip(flat, torch.split(found, [e.numel() for e in flat]), strict=True):
            each.copy_(part.view(each.shape))


def _copy(into: Tensors, steps: PartSteps, tensors: Tensors) -> None:
    if into:
        torch._foreach_copy_(into, steps.cut("grad", tensors))


def _params(way: Way) -> list[int]:
    """The parameters of the matrices that this rank makes."""
    return [way.bucket.pieces[index].param for index in way.bucket.own]


def _kept(works: Sequence[Work], piece: Piece) -> dict[str, torch.Tensor]:
    """What a state keeps for a matrix; of several in a parameter its rows."""
    return {name: each[piece.rows] for name, each in works[piece.param].kept.items()}


def _kept_numel(kept: Sequence[dict[str, tuple[int, ...]]], piece: Piece) -> int:
    """How many numbers these are."""
    shapes = kept[piece.param].values()
    if piece.rows is WHOLLY:
        return sum(map(math.prod, shapes))
    return sum((piece.rows.stop - piece.rows.start) * math.prod(own[1:]) for own in shapes)
