"""Muon's steps of matrices whose parts are on several ranks: in torch, and in planned launches.

A bucket's launches, in the order of shared.SharedSteps:

    direct   every rank steps the momenta of its parts, and leaves the directions in `near`
    (there)  the parts go to the owners, into `far`
    make     an owner puts its matrices together in `room`, makes their norms, the products of
             its iteration and second moments, and takes the updates apart again, into `far`
    (back)   the parts go to the ranks, into `back`
    finish   every rank steps its weights and masters

In fp16 a direction is cast times a power of two, by the norm of its whole matrix: `direct` leaves
fp32 numbers in `wide` and their squares in `sums`, which ranks add up, and `cast_directions` casts.
What `make` launches is the same in each step, whatever gradients and learning rates are: one CUDA
graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy
import torch

from megaopt.kernels.calling import Replayed, compiling_together
from megaopt.kernels.chunks.batch import Formats
from megaopt.kernels.chunks.table import stream_of, to_device
from megaopt.kernels.formats import GRADS, WEIGHTS
from megaopt.kernels.matrix.boxes import UNIT, Box, BoxCopies
from megaopt.kernels.matrix.bucket import BucketMemory, SharedStepRun, part_numbers
from megaopt.kernels.matrix.exchange import (
    WHOLLY,
    Bucket,
    MatrixBox,
    MatrixPart,
    ParameterMatrix,
    UpdateMaker,
)
from megaopt.kernels.muon import newton_schulz
from megaopt.kernels.muon.layout import Area, MatrixGroup, waves
from megaopt.kernels.muon.newton_schulz import (
    Matrices,
    MatrixScales,
    Workspace,
    room_of,
    scales_reference,
)
from megaopt.kernels.muon.normuon import normalized
from megaopt.kernels.muon.orthogonal import FP16, Orthogonal
from megaopt.kernels.muon.wave import DirectionTable, Iteration, PartLaunches, cast, scales_by_norms
from megaopt.kernels.norm.bins import BANKS, ROWS
from megaopt.kernels.norm.launch import NormPlan
from megaopt.kernels.norm.reference import accumulate_reference, total_reference
from megaopt.kernels.place import Place
from megaopt.kernels.rules.matrix import SECOND_MOMENT, Matrix, Shape

WITHOUT_END = 2**62
"""Bytes of which one wave has room for all matrices of a bucket."""


class MuonMaking(UpdateMaker):
    """The way from directions to updates: MUON's, alone and with other ranks, in plain torch."""

    def __init__(self, matrix: Matrix) -> None:
        super().__init__(matrix)
        self.how: Orthogonal = matrix.how
        # ranks send 16 bits a number, both ways
        self.sent = WEIGHTS[self.how.dtype]
        self.is_scaled = self.how.precision == FP16
        """Directions are fp32 first, and cast when their norms are known."""
        self.direction = WEIGHTS["float32"] if self.is_scaled else self.sent
        self.shares_work = True

    def sums(self, pieces: Sequence[ParameterMatrix], device: torch.device) -> torch.Tensor:
        """Makes bins of the norm of each matrix: a bank."""
        return torch.zeros((len(pieces), ROWS, 2), dtype=torch.int64, device=device)

    def measure(
        self, directions: Matrices, parts: Sequence[MatrixPart], sums: torch.Tensor
    ) -> None:
        """Adds the squares of directions to the bins."""
        for part, direction in zip(parts, directions, strict=True):
            # parts of one matrix add to the same bins: whole numbers, in any order
            accumulate_reference([direction], sums[part.piece][None])

    def notes(self, sums: torch.Tensor, pieces: Sequence[ParameterMatrix]) -> MatrixScales:
        """Makes the factors of the matrices."""
        # with second moments the ratio comes behind these
        ratios = [
            1.0 if self.how.second_moment else self.how.ratio(piece.shape) for piece in pieces
        ]
        # fp32 (1,) of each matrix, alike on all ranks
        norms = [total_reference(bins[None])[0].view(1) for bins in sums]
        pairs = zip(norms, ratios, strict=True)
        scales = [
            scales_reference(norm, self.how.eps, ratio, self.is_scaled) for norm, ratio in pairs
        ]
        # of each factor one tensor, fp32 [matrices]
        return MatrixScales(*map(torch.cat, zip(*scales, strict=True)))

    def cast(
        self, directions: Matrices, parts: Sequence[MatrixPart], notes: MatrixScales, out: Matrices
    ) -> None:
        """Casts directions, times their matrices' powers of two."""
        # bf16 directions were made in the place that they are sent from
        if self.is_scaled:
            powers = notes.power.unbind()
            for part, direction, target in zip(parts, directions, out, strict=True):
                target.copy_((direction * powers[part.piece]).to(target.dtype))

    def make(
        self,
        wholes: Matrices,
        pieces: Sequence[ParameterMatrix],
        indices: Sequence[int],
        notes: MatrixScales,
        states: Any,
    ) -> Matrices:
        """Iterates all matrices of one form together, and then steps second moments."""
        # indices: of `wholes` among the bucket's matrices, of all of which the notes have factors
        updates_by_index: dict[int, torch.Tensor] = {}
        for is_gram in (False, True):
            chosen = [
                i for i, whole in enumerate(wholes) if self.how.is_gram(whole.shape) is is_gram
            ]
            if chosen:
                # this form's factors, fp32 [chosen]
                places = torch.tensor([indices[i] for i in chosen], device=wholes[0].device)
                scales = MatrixScales(*(factors[places] for factors in notes))
                room = room_of([wholes[i] for i in chosen], is_gram)
                matrices = newton_schulz.iterated(room, scales, self.how, is_gram)
                updates_by_index.update(zip(chosen, matrices, strict=True))

        # back in the order of `wholes`
        updates = [updates_by_index[i] for i in range(len(wholes))]
        return self.finish(updates, states)

    def finish(self, updates: Matrices, states: Sequence[dict[str, Any]]) -> Matrices:
        """Steps second moments, if there are any."""
        if not self.how.second_moment:
            return updates
        normalized_updates = []
        for update, state in zip(updates, states, strict=True):
            # the second moments of the matrix, fp32 [rows], are stepped in place
            numbers = (state[SECOND_MOMENT], self.how.beta2, self.how.ratio(update.shape))
            normalized_updates.append(normalized(update, *numbers))
        return normalized_updates

    def room(self, shape: Shape, device: torch.device) -> Workspace:
        """Makes the memory of the iteration of a matrix that ranks make together."""
        # into which the owner's direction comes
        first = torch.empty(tuple(shape), dtype=self.how.dtype, device=device)
        return room_of([first], self.how.is_gram(shape))

    def together(self, room: Workspace, notes: Any, make: Any) -> torch.Tensor:
        """Returns the update of one matrix, by the products of `make`.

        notes: None where this rank failed: then it makes no products, and goes on with the others.
        """
        # anything stands for factors: a failed rank's products are never made
        scales: Any = notes or MatrixScales(*[make] * len(MatrixScales._fields))
        is_gram = self.how.is_gram(room.first[0].shape)
        return newton_schulz.iterated(room, scales, self.how, is_gram, make)[0]


# --- in launches


class MuonBucket:
    """Steps a bucket by launches, as bucket.TorchBucket does by torch's operations.

    Args:
        bucket: its matrices.
        formats: of every buffer; `matrix` is set.
        groups: for each parameter of the batch its row of scalars.
        places: of each rank's part in its parameter.
        device: a CUDA device, or the CPU under Triton's interpreter.
    """

    def __init__(
        self,
        bucket: Bucket,
        formats: Formats,
        groups: Sequence[int],
        places: Sequence[Place],
        device: torch.device,
    ) -> None:
        assert formats.matrix is not None
        how = self._how = formats.matrix.how

        self._bucket, self._device = bucket, device
        params, firsts, numels = part_numbers(bucket)
        # in fp16 directions are fp32 until their norms are known, in bf16 what is sent at once
        self._is_scaled = how.precision == FP16
        wide = torch.float32 if self._is_scaled else how.dtype
        self._parts = PartLaunches(formats, wide, params, firsts, numels, groups, places, device)
        # where each part's numbers begin in a message, in bytes
        begins = numpy.cumsum([0, *numels])[:-1]
        # int64 [parts] each
        self._sent, self._wide = begins * how.dtype.itemsize, begins * wide.itemsize
        self._returned = numpy.array(bucket.returned, dtype=numpy.int64) * how.dtype.itemsize
        # the matrices that this rank makes, those of one form in one iteration
        parts = {_part_of(bucket.pieces[index]): index for index in bucket.indices}
        indices = {(part.param, part.row): index for part, index in parts.items()}
        self._iterations: list[tuple[Iteration, torch.Tensor]] = []
        for layout in waves(how, list(parts), WITHOUT_END) if parts else ():
            # a layout sorts its matrices: int64, the column of each among the bucket's factors
            order = [indices[piece.param, piece.row] for piece in layout.pieces]
            in_bucket = to_device(numpy.array(order), device)
            self._iterations.append((Iteration(layout, groups, device), in_bucket))
        # iterations follow each other, and each has all of the room
        self.room = max((step.layout.used for step, _ in self._iterations), default=0)
        """Bytes that the launches of `make` take beside messages."""
        self._norms = PartNorms(bucket, how, device) if self._is_scaled else None
        self.sums = None if self._norms is None else self._norms.sums
        """The sums that ranks add up behind `direct`, before the cast; None: there are none."""
        # CUDA graphs of `measure`, `cast` and `make`: messages and new scalars lie between them
        self._measured, self._cast, self._made = (Replayed(device) for _ in range(3))
        self._begins: dict[str, int] = {}
        # for each iteration from `far` to the matrices, and back
        self._copies: list[tuple[BoxCopies, BoxCopies]] = []

    def lie(self, begins: dict[str, int]) -> None:
        """Hears where BucketMemory's pieces begin in a step's memory: tables are made by it."""
        self._begins = begins
        if self._norms is not None:
            self._norms.lie(begins)

    def ready(self) -> None:
        """Takes nothing but the step's memory."""

    def direct(self, run: SharedStepRun, memory: BucketMemory) -> None:
        """Steps momenta, and leaves directions in `near`, or fp32 ones in `wide`."""
        # all of a step's memory is one tensor, in which pieces lie where `lie` was told
        base = memory.whole.data_ptr()
        if run.has_moved:
            # int64 [parts], addresses: `near` is sent as it is, `wide` is cast into it behind
            directions = base + self._begins["near"] + self._sent
            if self._is_scaled:
                directions = base + self._begins["wide"] + self._wide
            # the updates are not there yet: `finish` hears now where it will find them
            updates = base + self._begins["back"] + self._returned
            self._parts.look(run.addresses, directions, updates)
        # the first launch: momenta are stepped, and directions written
        self._parts.direct(run.scalars, run.controls)
        if self._norms is not None:
            # this rank's squares, into `sums`: ranks add them up before directions are cast
            state, measure = (stream_of(self._device), base), self._norms.measure
            self._measured(state, lambda: measure(memory.whole))

    def cast_directions(self, memory: BucketMemory) -> None:
        """Casts fp32 directions, by the sums over all ranks."""
        if self._norms is not None:
            # wide -> near, all parts of this rank, whoever makes their matrices
            state, cast_all = (stream_of(self._device), memory.whole.data_ptr()), self._norms.cast
            self._cast(state, lambda: cast_all(memory.whole))

    def make(self, run: SharedStepRun, memory: BucketMemory, update: None) -> None:
        """Makes updates of the directions in `far`, and leaves their parts there."""
        # a rank may own none of the bucket's matrices
        if not self._iterations:
            return
        # the first step: which of two areas has an iteration's result is known once it is noted
        if not self._copies:
            with compiling_together(self._device):
                for iteration, _ in self._iterations:
                    iteration.note(memory.room)
            self._plan_copies()
        addresses, left_out = run.addresses, run.left_out

        def launches() -> None:
            for (iteration, in_bucket), (unpack, pack) in zip(
                self._iterations, self._copies, strict=True
            ):
                # far -> room: parts of all ranks become whole matrices
                unpack.copy(memory.whole)
                if self._norms is None:
                    # bf16: the norms of the whole matrices, made here
                    iteration.scale(memory.room)
                else:
                    # fp16: the factors of the cast, fp32 [5, this rank's matrices]
                    scales = iteration.layout.scales.of(memory.room)
                    torch.index_select(self._norms.scales, 1, in_bucket, out=scales)
                # all products of the iteration, then second moments
                iteration.step(memory.room, addresses, left_out)
                # room -> far: of each update all ranks' parts, as they are sent back
                pack.copy(memory.whole)

        # all that the launches depend on
        state: list[Any] = [stream_of(self._device), memory.whole.data_ptr()]
        if self._how.second_moment:
            # second moments lie in tensors of their own, and are left out with their group
            state.append(addresses[SECOND_MOMENT].tobytes())
            state.append(None if left_out is None else left_out.data_ptr())
        self._made(state, launches)

    def finish(self, run: SharedStepRun, memory: BucketMemory) -> None:
        """Steps weights and masters by the updates in `back`."""
        # the last launch: it reads updates where they have come back
        self._parts.apply(run.scalars, run.left_out)

    def _plan_copies(self) -> None:
        """Plans the launches between `far` and the matrices in `room`."""
        planned = []
        # places in the step's memory are counted in numbers of 16 bits
        far, room = (self._begins[name] // UNIT for name in ("far", "room"))
        for iteration, _ in self._iterations:
            # where each matrix begins among the iteration's
            begins = {(piece.param, piece.row): piece.begin for piece in iteration.layout.pieces}

            def boxes(
                chosen: Sequence[MatrixBox],
                area: Area,
                begins: dict[tuple[int, int], int] = begins,
            ) -> Iterator[Box]:
                """Makes boxes of the iteration's matrices, from a message to where these lie."""
                for index, first, rows, columns, stride, place in chosen:
                    part = _part_of(self._bucket.pieces[self._bucket.indices[index]])
                    begin = begins.get((part.param, part.row))
                    if begin is not None:
                        # the message has no gaps, a matrix has its stride between rows
                        matrix = room + area.begin // UNIT + begin + first
                        yield Box(far + place, matrix, rows, columns, columns, stride)

            # directions go into the first area, updates come from that where the iteration ends
            unpack = boxes(self._bucket.unpacked, iteration.layout.first)
            pack = [box.turned for box in boxes(self._bucket.packed, iteration.result)]
            copies = BoxCopies(list(unpack), self._device), BoxCopies(pack, self._device)
            planned.append(copies)
        self._copies = planned  # not before all are made


def _part_of(piece: ParameterMatrix) -> MatrixGroup:
    """Returns a matrix as a wave has it, without runs for elementwise launches."""
    row = 0 if piece.rows is WHOLLY else piece.rows.start
    return MatrixGroup(piece.param, row, (piece.shape,), ())


class PartNorms:
    """Makes the norms of a bucket's matrices of this rank's fp32 directions, and casts these.

    Args:
        bucket: its matrices.
        how: their Orthogonal.
        device: of all.
    """

    def __init__(self, bucket: Bucket, how: Any, device: torch.device) -> None:
        self._how = how
        numels = [part.numel for part in bucket.parts]
        self._table = DirectionTable(numels, device)
        # parts lie one behind another, as fp32 and as what is sent
        self._firsts = numpy.cumsum([0, *numels])[:-1]
        # int64 [parts]: the matrix that each is a part of
        self._matrices = to_device(numpy.array([part.piece for part in bucket.parts], int), device)
        # with second moments the ratio comes behind these
        ratios = [1.0 if how.second_moment else how.ratio(piece.shape) for piece in bucket.pieces]
        self._ratios = to_device(numpy.array(ratios, numpy.float32), device)
        count = len(ratios)
        # kept from step to step: later steps, within inference mode or not, write all of these
        with torch.inference_mode(False):
            shape = (BANKS, ROWS, 2)
            # a norm's bins are whole numbers in two limbs: parts and ranks add up in any order
            self._part_bins = torch.zeros((len(numels), *shape), dtype=torch.int64, device=device)
            self._bins = torch.zeros((count, *shape), dtype=torch.int64, device=device)
            self.sums = torch.zeros((count, ROWS, 2), dtype=torch.int64, device=device)
            """The sums that ranks add up: of each matrix a bank of the norm's bins."""
            self.scales = torch.zeros((len(MatrixScales._fields), count), device=device)
            """The factors of all matrices of the bucket."""

    def lie(self, begins: dict[str, int]) -> None:
        """Hears where the directions begin in a step's memory, and where they are sent from."""
        wide = begins["wide"] + self._firsts * torch.float32.itemsize
        near = begins["near"] + self._firsts * self._how.dtype.itemsize
        self._table.lie(wide, near)

    def measure(self, memory: torch.Tensor) -> None:
        """Puts the squares of this rank's directions in a step's memory into `sums`."""
        # a rank without parts sends zeros
        self.sums.zero_()
        if not self._table.chunks.count:
            return

        table = self._table.update(memory)
        bins = self._part_bins.zero_()
        # int64 [parts, BANKS, ROWS, 2] -> [parts, ROWS, 2] -> one row for each matrix
        NormPlan(GRADS["float32"]).accumulate(table, self._table.chunks, bins)
        self.sums.index_add_(0, self._matrices, bins.sum(1))

    def cast(self, memory: torch.Tensor) -> None:
        """Makes factors of `sums`, which ranks have added up, and what is sent of directions."""
        # the sums are one bank; the others of a matrix stay zero
        self._bins[:, 0] = self.sums
        # fp32 [5, matrices], alike on all ranks
        scales_by_norms(self._bins, self._ratios, self.scales, self._how.eps, True)
        if self._table.chunks.count:
            # fp32 [5, parts]: each part goes by its whole matrix's power of two
            by_part = self.scales.index_select(1, self._matrices)
            cast(self._table.update(memory), self._table.chunks, by_part, self._how.dtype)
