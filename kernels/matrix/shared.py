"""Steps matrices whose parts are on several ranks: of each one rank, its owner, makes the update.

Every rank steps the moments of its own parts, and sends the directions to the matrix's owner, which
makes the update and sends each rank its part. Who owns what is no state: with other ranks others
do, and the bits are the same. Matrices go in buckets: while the updates of one bucket are made, the
next is on its way to its owners, and the last on its way back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from megaopt.kernels.chunks.batch import Buffers, Formats
from megaopt.kernels.formats import GRADS, NONE
from megaopt.kernels.matrix.plan import FLOAT32, apply_formats, check_update, inner_formats
from megaopt.kernels.matrix.tiles import Tiles
from megaopt.kernels.place import Place
from megaopt.kernels.rules.matrix import Matrix, Work
from megaopt.kernels.step.controls import COUNT, SKIP

Tensors = list[torch.Tensor]
NEUTRAL = (1.0, 1.0, 1.0, 0.0, 0.0)
"""Controls that leave an update as it is."""
ON_THEIR_WAY = 3
"""Buckets that take memory at a time: one goes there, of one the updates are made, one is back."""


# --- what ranks do for one another


class Piece(NamedTuple):
    """A matrix of a parameter."""

    param: int
    """The parameter's place in the batch."""
    rows: slice
    """Its rows among those of all matrices of the parameter."""
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
        """Gives all ranks the owner's matrix."""

    def spread(self, own: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """What all ranks have, of so many numbers each, one behind another."""


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
        self, wholes: Tensors, own: Sequence[int], notes: Any, kept: Sequence[dict[str, Any]]
    ) -> Tensors:
        """The updates of matrices.

        own: their places in the notes. kept: what states keep for each, which may be written.
        """
        found = []
        for whole, each in zip(wholes, kept, strict=True):
            update = self.matrix.rule.after.run(whole, Work(self.matrix.how, Place(0), each))
            check_update(self.matrix, update, whole.dtype, whole.shape)
            found.append(update)
        return found


# --- the steps


class Way:
    """A bucket's steps of what is elementwise, and where it is on its way."""

    def __init__(
        self,
        bucket: Bucket,
        formats: Formats,
        making: Any,
        groups: Sequence[int],
        places: Sequence[Place],
        backend: Any,
        device: torch.device,
    ) -> None:
        assert formats.matrix is not None
        rule, self.bucket, self._formats = formats.matrix.rule, bucket, formats
        params = [bucket.pieces[part.piece].param for part in bucket.parts]
        self._params, self._numels = params, [part.numel for part in bucket.parts]
        own: Any = (
            *(self._numels, [groups[param] for param in params], device, None),
            [places[i].after(p.first, p.numel) for i, p in zip(params, bucket.parts, strict=True)],
        )
        inner = inner_formats(formats, making.direction)
        self._inner = backend.plan(inner, rule.inner, *own)
        self._apply = backend.plan(apply_formats(formats, _grads(making.sent)), rule.apply, *own)
        self.notes: Any = None
        self.on_its_way: Any = None

    def views(self, memory: torch.Tensor, firsts: Sequence[int] | None = None) -> Tensors:
        """Each part in memory; firsts: where they begin, without it one behind another."""
        if firsts is None:
            return list(torch.split(memory[: sum(self._numels)], self._numels))
        return [memory[a : a + n] for a, n in zip(firsts, self._numels, strict=True)]

    def direct(self, buffers: Buffers, scalars: Any, controls: Any, out: Tensors) -> None:
        """Steps the moments of the parts, and writes their directions."""
        self._step(self._inner, buffers, scalars, controls, weight=out)

    def update(self, buffers: Buffers, scalars: Any, left_out: Any, parts: Tensors) -> None:
        """Steps weights and masters by parts of updates."""
        self._step(self._apply, buffers, scalars, left_out, grad=parts)

    def _step(
        self, plan: Any, buffers: Buffers, scalars: Any, controls: Any, **others: Tensors
    ) -> None:
        own = {s: self._cut(s, buffers[s]) for s in plan.formats.slots if s not in others}
        plan.look({**own, **others})
        plan.step(scalars, controls)

    def _cut(self, slot: str, tensors: Tensors) -> Tensors:
        """The parts of parameters' tensors, flat."""
        form, unit = self._formats.by_slot.get(slot), 1
        if form is None:  # scales of blocks
            unit = self._formats.by_slot[slot.removesuffix("_scale")].block
        elif form.packed:
            unit = form.packed
        return [
            tensors[param].detach().view(-1)[part.first // unit : (part.first + part.numel) // unit]
            for param, part in zip(self._params, self.bucket.parts, strict=True)
        ]


def _grads(form: Any) -> Any:
    """The format of gradients of a weight's dtype."""
    return GRADS[form.dtype]


class SharedSteps:
    """The steps of a batch of matrices that several ranks share; MatrixPlan's `launches`.

    Args:
        formats: of every buffer; `matrix` is set.
        making: how owners make updates: Making, or as it.
        groups: for each parameter its row of scalars.
        places: of each rank's part in its parameter.
        backend: of kernels.backends.
        device: of all.
        exchange: an Exchange, with the other ranks.
    """

    def __init__(
        self,
        formats: Formats,
        making: Any,
        groups: Sequence[int],
        places: Sequence[Place],
        backend: Any,
        device: torch.device,
        exchange: Any,
    ) -> None:
        self._making, self._exchange, self._device = making, exchange, device
        backend = making.plans or backend
        self._groups = groups
        own = (formats, making, groups, places, backend, device)
        self._ways = [Way(bucket, *own) for bucket in exchange.buckets]
        self.many_calls = device.type == "cpu"  # elsewhere nobody has memory for copies
        self._formats, self._backend = formats, backend
        self._memory: list[Tensors] = []
        self._rooms: list[Any] = []
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

    def ready(self) -> None:
        """Takes the memory in which ranks exchange, before they meet: a rank without it says so."""
        sets = min(ON_THEIR_WAY, len(self._ways))
        self._memory = [
            [torch.empty(most, dtype=self._making.sent.dtype, device=self._device) for most in own]
            for own in [self._exchange.most] * sets
        ]
        together = [way.bucket for way in self._ways if way.bucket.owner is not None]
        self._rooms = [self._making.room(own.pieces[0].shape, self._device) for own in together]

    def step(
        self, buffers: Buffers, works: Sequence[Work], scalars: Any, controls: torch.Tensor | None
    ) -> None:
        """One step of every parameter.

        A rank that fails goes on with the exchange, as others wait for it, and raises at its end.
        """
        memory, self._memory, self._error = self._memory, [], None
        count, ways = len(self._ways), self._ways
        left_out = None if controls is None else torch.where(self._skip, controls, self._neutral)
        for turn in range(count + ON_THEIR_WAY - 1):
            if turn < count:
                self._begin(ways[turn], buffers, scalars, controls, memory[turn % ON_THEIR_WAY])
            if 0 < turn <= count:
                self._make(ways[turn - 1], works, memory[(turn - 1) % ON_THEIR_WAY], controls)
            if turn > 1:
                near = memory[(turn - 2) % ON_THEIR_WAY][0]
                self._finish(ways[turn - 2], buffers, scalars, left_out, near)
        self._spread(works)
        if self._error is not None:
            raise self._error

    def _try(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What a function returns; None where it fails, or something has failed before."""
        if self._error is not None:
            return None
        try:
            return function(*arguments)
        except Exception as error:
            self._error = error
            return None

    def _begin(
        self, way: Way, buffers: Buffers, scalars: Any, controls: Any, memory: Tensors
    ) -> None:
        """Directions are made, and go to the owners."""
        making, bucket, (near, far) = self._making, way.bucket, memory
        out = directions = way.views(near)
        if making.direction is not making.sent:
            directions = self._try(self._wide, way) or out
        self._try(way.direct, buffers, scalars, controls, directions)
        sums = making.sums(bucket.pieces, self._device)
        if sums is not None:
            self._try(making.measure, directions, bucket.parts, sums)
            self._exchange.add_up(sums)
        way.notes = self._try(making.notes, sums, bucket.pieces)
        self._try(making.send, directions, bucket.parts, way.notes, out)
        way.on_its_way = self._exchange.there(bucket, near, far)

    def _wide(self, way: Way) -> Tensors:
        numel = sum(part.numel for part in way.bucket.parts)
        dtype = self._making.direction.dtype
        return way.views(torch.empty(numel, dtype=dtype, device=self._device))

    def _make(
        self, way: Way, works: Sequence[Work], memory: Tensors, controls: torch.Tensor | None
    ) -> None:
        """Owners make updates, and send them back."""
        bucket, (near, far) = way.bucket, memory
        way.on_its_way.wait()
        update = None if bucket.owner is None else self._made_together(way, far)
        updates = self._try(self._made, way, works, far, controls, update)
        self._try(self._exchange.pack, bucket, updates, far)
        way.on_its_way = self._exchange.back(bucket, far, near)

    def _made_together(self, way: Way, far: torch.Tensor) -> torch.Tensor:
        """The update of a matrix of which every rank makes tiles, before any second moment."""
        exchange, owner, room = self._exchange, way.bucket.owner, self._rooms.pop(0)
        assert owner is not None
        if owner == exchange.rank:
            self._try(lambda: room.first[0].copy_(exchange.wholes(way.bucket, far)[0]))
        exchange.hand_out(room.first[0], owner)
        tiles = Tiles(exchange.rank, exchange.ranks, exchange.spread, self._error)
        update: torch.Tensor = self._making.together(room, way.notes, tiles)
        self._error = tiles.error
        return update

    def _made(
        self,
        way: Way,
        works: Sequence[Work],
        far: torch.Tensor,
        controls: torch.Tensor | None,
        update: torch.Tensor | None,
    ) -> Tensors:
        """The updates; what states keep is stepped, but of groups that are left out.

        update: of the matrix that ranks have made together.
        """
        bucket, making = way.bucket, self._making
        pieces = [bucket.pieces[index] for index in bucket.own]
        kept = [_kept(works, piece) for piece in pieces]
        before = [{name: each.clone() for name, each in own.items()} for own in kept]
        updates: Tensors
        if update is None:
            updates = making.make(self._exchange.wholes(bucket, far), bucket.own, way.notes, kept)
        else:
            updates = making.finish([update], kept) if pieces else []
        for piece, own, old in zip(pieces, kept, before, strict=True):
            if controls is not None:
                is_left_out = controls[self._groups[piece.param], SKIP] != 0
                for name, each in own.items():
                    each.copy_(torch.where(is_left_out, old[name], each))
        return updates

    def _finish(
        self, way: Way, buffers: Buffers, scalars: Any, left_out: Any, near: torch.Tensor
    ) -> None:
        """Weights and masters are stepped."""
        way.on_its_way.wait()
        parts = way.views(near, way.bucket.returned)
        self._try(way.update, buffers, scalars, left_out, parts)
        way.notes = way.on_its_way = None

    def _spread(self, works: Sequence[Work]) -> None:
        """Every rank gets what the owners have stepped of what states keep."""
        pieces = [[_kept(works, piece) for piece in own] for own in self._exchange.owned]
        kept = [[each for own in ranks for each in own.values()] for ranks in pieces]
        lengths = [sum(each.numel() for each in own) for own in kept]
        if not sum(lengths):
            return
        own = [each.flatten() for each in kept[self._exchange.rank]]
        sent = torch.cat(own) if own else torch.empty(0, device=self._device)
        found = self._exchange.spread(sent, lengths)
        flat = [each for own in kept for each in own]
        for each, part in zip(flat, torch.split(found, [e.numel() for e in flat]), strict=True):
            each.copy_(part.view(each.shape))


def _kept(works: Sequence[Work], piece: Piece) -> dict[str, torch.Tensor]:
    """What a state keeps for a matrix; of several in a parameter its rows."""
    return {name: each[piece.rows] for name, each in works[piece.param].kept.items()}
