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
from functools import partial
from itertools import accumulate
from typing import Any

import numpy
import torch

from megaopt.kernels.chunks.batch import Buffers, Formats
from megaopt.kernels.chunks.table import DeviceTable
from megaopt.kernels.formats import NONE
from megaopt.kernels.matrix import bucket as buckets
from megaopt.kernels.matrix.bucket import BucketMemory, SharedStepRun, TorchBucket, state_tensors
from megaopt.kernels.matrix.exchange import ALIGNED, NEUTRAL, NOTHING_NEW, WHOLLY
from megaopt.kernels.matrix.tiles import TiledProducts, room_of
from megaopt.kernels.place import Place
from megaopt.kernels.rules.matrix import SAME, Work
from megaopt.kernels.step.controls import COUNT, SKIP


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
        self._lengths = [0 for _ in exchange.owned]
        for rank, pieces in enumerate(exchange.owned):
            for piece in pieces:
                shapes = state_shapes[piece.param].values()
                if piece.rows is not WHOLLY:
                    # a matrix of several in a parameter has its rows of each tensor
                    count = piece.rows.stop - piece.rows.start
                    shapes = [(count, *shape[1:]) for shape in shapes]
                self._lengths[rank] += sum(map(math.prod, shapes))

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

        # The phases of a turn, each for the bucket that began so many turns before. All buckets are
        # on their way at once: while the products of one are made, the directions of the next one
        # go to owners, and the updates of the last one come from them. What a rank must know of the
        # sums over all is asked for while no long message is in front of it.
        phases = [
            # updates of the bucket two turns before leave ahead of this one's directions
            *((0, self._direct), (2, self._return), (0, self._leave)),
            *((1, self._make), (2, self._finish)),
        ]
        if self._is_projected:
            # gradients go there, low ones come back, directions go there, updates come back
            phases = [
                *((0, self._send), (1, self._project), (2, self._direct), (2, self._leave)),
                *((3, self._make), (3, self._return), (4, self._finish)),
            ]
        run = SharedStepRun(buffers, works, scalars, controls, left_out, self.renewal)
        if self._making.launches is not None and self._memory:
            # launches keep their tables as long as all tensors and the memory lie where they did
            before, self._lay = self._lay, None
            lies: list[Any] = [row.tobytes() for row in run.addresses.values()]
            lies.append(self._memory[0].whole.data_ptr())
            run.has_moved = lies != before
            self._go(phases, run)
            self._lay = lies  # not after an error
        else:
            self._go(phases, run)

    def renew(self, buffers: Buffers, works: Sequence[Work]) -> None:
        """Makes anew what is kept, as `renewal` says, of these gradients, and steps nothing."""
        if self.renewal.turns:
            # as a step: all ranks take memory, gradients go to owners, and these renew
            self.ready()
            self._lay = None  # launches hear of other memory than the last step's
            run = SharedStepRun(buffers, works, None, None, None, self.renewal)

            # owners make anew what is kept, once the gradients of all ranks have come
            def renew(turn: int, run: SharedStepRun) -> None:
                self._ways[turn].arrive()
                self._try(self._ways[turn].steps.renew, run, self._memory[turn])

            self._go([(0, self._send), (1, renew)], run)

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

    def _direct(self, turn: int, run: SharedStepRun) -> None:
        """Moments are stepped, and directions made."""
        way, memory = self._ways[turn], self._memory[turn]
        # this rank waits for its parts of the low gradients
        if self._is_projected:
            way.arrive()
        self._try(way.steps.direct, run, memory)
        # all ranks add up, also one that has failed; the cast goes by the sums
        if way.steps.sums is not None:
            self._exchange.add_up(way.steps.sums)
        self._try(way.steps.cast_directions, memory)

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
        update: torch.Tensor | None = None
        owner = way.bucket.owner
        if owner is not None:
            # a bucket of one matrix whose tiles all ranks make, before any second moment; room: the
            # iteration's memory; spare: what tiles are exchanged in
            exchange, (room, spare) = self._exchange, self._rooms.pop(0)
            # one rank has put the direction together, [rows, columns]
            if owner == exchange.rank:
                far = memory.far.view(self._making.sent.dtype)
                self._try(lambda: room.first[0].copy_(buckets.unpacked(way.bucket, far)[0]))
            # all get it whole, and each makes its tiles of every product
            exchange.hand_out(room.first[0], owner)
            tiles = TiledProducts(exchange, spare, self._error)
            try:
                update = self._making.together(room, way.steps.notes, tiles)
            finally:
                # this rank's, of before or of its tiles
                self._error = tiles.error
        self._try(way.steps.make, run, memory, update)

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
        works, exchange = run.works, self._exchange
        if self._before.renew is not None:
            # the owner of each parameter's matrix
            owners = {p.param: i for i, pieces in enumerate(exchange.owned) for p in pieces}
            # the same parameters in the same order on all ranks
            for param in run.renewal.turns:
                work = works[param]
                for tensor in work.kept.values():
                    exchange.hand_out(tensor, owners[param])
                # None: this rank does not know whether the owner has made it, and looks it up later
                work.is_made = work.is_made or None
            return

        # every step changes what is kept: all of it goes, in one message; None: there is nothing
        memory, self._spread_room = self._spread_room, None
        if memory is None:
            return
        # for each rank what is kept for the matrices that it owns, as views of this rank's states
        tensors = [
            [tensor for piece in pieces for tensor in state_tensors(works, piece).values()]
            for pieces in exchange.owned
        ]
        # fp32: first those of rank 0's matrices, then rank 1's; this rank's come back as they were
        numbers = exchange.spread(tensors[exchange.rank], self._lengths, memory)
        flat = [tensor for rank_tensors in tensors for tensor in rank_tensors]
        parts = torch.split(numbers, [tensor.numel() for tensor in flat])
        for tensor, part in zip(flat, parts, strict=True):
            tensor.copy_(part.view(tensor.shape))
