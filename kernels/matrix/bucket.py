"""Steps a bucket of matrices that ranks share: the parts elementwise, whole ones by torch.

shared.py says in which turn a bucket takes each of its steps, and whose memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy
import torch

from megaopt.kernels.chunks.batch import Buffers, Formats
from megaopt.kernels.chunks.table import addresses_of
from megaopt.kernels.formats import GRADS
from megaopt.kernels.matrix.exchange import Bucket, MatrixBox, ParameterMatrix, Renewal, Tensors
from megaopt.kernels.matrix.plan import apply_formats, inner_formats
from megaopt.kernels.place import Place
from megaopt.kernels.rules import Rule
from megaopt.kernels.rules.matrix import SAME, Work
from megaopt.kernels.step.controls import SKIP


def part_numbers(bucket: Bucket) -> tuple[list[int], list[int], list[int]]:
    """Returns each part's parameter, how many of its numbers lie before the part, and its size."""
    # in the order of `bucket.parts`
    params = [bucket.pieces[part.piece].param for part in bucket.parts]
    firsts, sizes = [part.first for part in bucket.parts], [part.numel for part in bucket.parts]
    return params, firsts, sizes


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
        self._params, _, self._numels = part_numbers(bucket)
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
        """The sums that ranks add up between `direct` and `cast_directions`."""
        # of one step: what one phase makes and a later one reads
        self.notes: Any = None
        """The notes of the matrices by the sums; None where this rank failed to make them."""
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

    def cast_directions(self, memory: BucketMemory) -> None:
        """Makes what is sent of the directions, by the sums over all ranks."""
        # of all matrices of the bucket: the sums of other owners' matrices are here, too
        self.notes = self._making.notes(self.sums, self._low.pieces)
        self._making.cast(self._directions, self._low.parts, self.notes, self._out)

    def make(self, run: SharedStepRun, memory: BucketMemory, update: torch.Tensor | None) -> None:
        """Makes updates, and leaves their parts in `far`; what states keep is stepped.

        But for groups that are left out. update: of the matrix that ranks have made together.
        """
        # the matrices of this rank, and views of what their states keep
        bucket, making = self._bucket, self._making
        pieces = [bucket.pieces[index] for index in bucket.indices]
        states = [state_tensors(run.works, piece) for piece in pieces]

        # the host does not know which groups are left out: a copy of all is kept
        before: list[dict[str, torch.Tensor]] = []
        if run.controls is not None:
            before = [{name: tensor.clone() for name, tensor in state.items()} for state in states]

        updates: Tensors
        far = memory.far.view(making.sent.dtype)
        if update is None:
            wholes = unpacked(self._low, far)
            # each owner makes its own matrices
            updates = making.make(wholes, bucket.pieces, bucket.indices, self.notes, states)
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
        self.notes, self.sums, self._directions, self._out = None, None, [], []


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


def state_tensors(works: Sequence[Work], piece: ParameterMatrix) -> dict[str, torch.Tensor]:
    """Returns what a state keeps for a matrix; of several in a parameter its rows."""
    return {name: tensor[piece.rows] for name, tensor in works[piece.param].kept.items()}
