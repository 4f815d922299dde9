"""Groups of ranks: the message that they add up, and a matrix of which each has some rows."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from math import prod
from typing import Any

import numpy
import torch
import torch.distributed as dist

from megaopt.kernels.backends import Plan
from megaopt.kernels.chunks.table import CopyEvent, Upload, is_capturing, pinned_copy, stream_of
from megaopt.kernels.norm.bins import new_bins

FOUND_INF, NONFINITE, WORDS = 2, 3, 4
"""Words at the end of a message: digests of the meetings that a rank is going to have, and of all
that ranks must have alike; found_inf; whether an infinity or NaN leaves the step out."""


def digest_of(what: object) -> int:
    """63 bits, the same on all ranks that have the same: of its repr.

    Ranks add their digests up modulo 2**64, and each compares the sum with its own times their
    number. It misses a difference where the others' digests less its own add up to 0. Small numbers
    do so easily: of three ranks with 4, 5 and 6 parameters the second would go on alone. With well
    mixed bits that is a chance of about ranks / 2**63, for every rank, be it one of few or of many.
    """
    digest = hashlib.blake2b(repr(what).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


REFUSED = digest_of("this rank raises an error")
"""The second word of a rank that does not step."""
MAGNITUDE = 0x7FFFFFFF
"""The bits of an fp32 number but its sign's: as integers in the order of the magnitudes, NaN
last. What collectives make of a NaN among numbers differs."""
SUM, MAX = dist.ReduceOp.SUM, dist.ReduceOp.MAX


def reduced(tensor: torch.Tensor, groups: Iterable[Any], op: Any = MAX) -> torch.Tensor:
    """Makes a tensor the largest of all ranks, or the sum, in place: one group after another."""
    # one dimension of a mesh after another: behind the last one all of its ranks have the same
    for group in groups:
        dist.all_reduce(tensor, op, group=group)
    return tensor


def hand_out(tensor: torch.Tensor, source: int, group: Any) -> None:
    """Gives all ranks of a group the tensor of one, in place; source: its number among all."""
    message = tensor.contiguous()
    # as bytes: not every library sends 16 bits
    dist.broadcast(message.view(-1).view(torch.uint8), source, group=group)
    # a tensor with gaps takes what has come
    if message is not tensor:
        tensor.copy_(message)


def group_of(mesh: Any) -> Any:
    """The group of all ranks of a mesh; the first call meets them, where it has many dimensions."""
    # a mesh made after destroy_process_group may equal one from before it
    return mesh.get_group() if mesh.ndim == 1 else _group_of(mesh, dist.group.WORLD)


@cache
def _group_of(mesh: Any, world: Any) -> Any:
    """The group of a mesh among those of the world."""
    # the mesh's numbers, in the order that ranks have in a group
    ranks = sorted(mesh.mesh.flatten().tolist())
    # no new group for a mesh of all ranks
    if len(ranks) == dist.get_world_size():
        return world
    # only the ranks of the mesh call it: others are not waited for
    return dist.new_group(ranks, use_local_synchronization=True)


class Peers:
    """The ranks that hold the other parts of some parameters, and what this one tells them.

    A message is int64: the norm's table, where gradients are measured, and WORDS. All ranks add
    theirs up, also one without a gradient: the norm has the bits of whole tensors.

    Args:
        device: where they meet.
        groups: which add up one after the other, as the dimensions of a mesh.
        alike: a digest of what the ranks must have alike of their parameters.
        plans: of those that are measured; None where no step measures them here.
        kind: what the ranks know the meeting by, and have in common.
        copies: who has copies of the same parts, and hears the words alone.
        ranks: all of them, by their numbers in the default group.
    """

    def __init__(
        self,
        device: torch.device,
        groups: list[dist.ProcessGroup],
        alike: int,
        plans: list[Plan] | None = None,
        kind: object = None,
        copies: Sequence[dist.ProcessGroup] = (),
        ranks: Sequence[int] = (),
    ) -> None:
        self.device, self.groups, self.plans = device, groups, plans
        self.ranks = ranks
        self._copies, self.all_groups = copies, [*groups, *copies]
        """The groups of parts, then those of copies."""
        self.alike, self.kind = alike, kind
        self.meetings = 0
        """A digest of the kinds of all meetings, where ranks have all in common."""
        # the number of ranks that add up: a sum of alike words is a word times it
        self.size = prod(map(dist.get_world_size, self.all_groups))
        self.measures = plans is not None
        """They meet in steps that measure their gradients, and in no others."""
        self._stream = stream_of(device)

        # int64: the norm's bins, [BANKS, ROWS, 2] flat, where the ranks measure; WORDS that are
        # summed up; and WORDS as they must come out
        # it stays where it is, for CUDA graphs
        with torch.inference_mode(False):
            bins = new_bins(device)[: None if self.measures else 0]
            memory = self._written = torch.cat([bins.flatten(), bins.new_zeros(2 * WORDS)])
            # beside the message what its words are where all ranks have the same: one copy for all
            self._message, self._alike = memory[:-WORDS], memory[-WORDS:]
            self._words = self._message[-WORDS:]
            self.bins = memory[: -2 * WORDS].view(bins.shape)
            """The squares of all ranks' gradients, once they have met in a step that measures."""
        # the host's side of it, of which one copy goes to the device
        self._host = numpy.zeros(len(memory), dtype=numpy.int64)
        self._upload = Upload(memory)
        self._captured: list[torch.Tensor] = []  # what CUDA graphs copy from

    @property
    def is_read_at_once(self) -> bool:
        """Whether a message can be read without waiting for work that is queued on the device."""
        return self.device.type == "cpu"

    @property
    def event(self) -> str:
        """A name of what was heard last, which these ranks alone have in common; waits for it."""
        return "/".join(("megaopt", "differ", *map(str, (*self.ranks, *self._words.tolist()))))

    def write(
        self, request: object, heard: torch.Tensor | None = None, measures: bool = True
    ) -> None:
        """Writes this rank's message.

        Args:
            request: what the ranks must have alike in this step.
            heard: in the meeting before, to be passed on; None: nothing.
            measures: whether the step asks for the norm.
        """
        # the table is 0 and the words stand, before anything is added on the device
        self._write(digest_of((self.alike, request)))
        # bool as 0 or 1: a digest with 1 added differs here, too, so that a difference heard before
        # goes on to these ranks
        if heard is not None:
            self._words.add_(heard.to(self.device))

        # behind the words in the queue: gradients' squares, which one all-reduce then sums up with
        # them
        for plan in (self.plans or ()) if measures else ():
            plan.accumulate(self.bins)

    def refuse(self) -> None:
        """Writes that this rank raises an error."""
        self._write(REFUSED)

    def _write(self, digest: int) -> None:
        """Clears the table and writes the words, in one copy."""
        # views of the host's memory; all before them stays 0, and clears the table
        words = self._host[-2 * WORDS : -WORDS]
        words[:2] = self.meetings, digest
        # numpy's product is modulo 2**64, as the sum is
        self._host[-WORDS:] = words * self.size
        # a graph copies from the same pinned memory at each replay: it must be this capture's own
        if is_capturing(self.device):
            pinned = pinned_copy(self._host, self.device)
            self._captured.append(pinned)
            self._written.copy_(pinned, non_blocking=True)
            return
        if self._stream != stream_of(self.device):  # its events are on another
            self._stream, self._upload = stream_of(self.device), Upload(self._written)
        self._upload.write(self._host)

    def meet(self) -> None:
        """Adds up the messages of all ranks."""
        # table and words together, in one all-reduce for each dimension of the mesh
        reduced(self._message, self.groups, SUM)
        # copies of the same parts have the same squares: only words are added up over them
        reduced(self._words, self._copies, SUM)

    def heard(self) -> torch.Tensor:
        """[WORDS], bool: which digests are others, and what is set, on any rank."""
        return torch.ne(self._words, self._alike)

    def accumulate(self, bins: torch.Tensor) -> None:
        """Adds the squares of all ranks' gradients to the bins."""
        bins.add_(self.bins)


class Notice:
    """Flags on the device that the host reads a step later, so that it waits for nothing.

    message: finds that of the error that they stand for.
    """

    def __init__(self, device: torch.device, message: Callable[[], str]) -> None:
        self.message = message
        with torch.inference_mode(False):
            # pinned, so that the host does not wait for the device's copy
            pinned = device.type == "cuda"
            self._flags = torch.zeros(WORDS, dtype=torch.bool, device="cpu", pin_memory=pinned)
        self._array = self._flags.numpy()  # which is looked at without an operation of torch
        # behind the last copy; None before the first, and on CPUs
        self._sent: CopyEvent | None = None
        self._stream = 0

    def post(self, flags: torch.Tensor) -> None:
        """Sends flags, bool [WORDS], on their way to the host."""
        # on the current stream, behind the meeting that made the flags
        self._flags.copy_(flags, non_blocking=True)
        # nobody can wait for a captured event: the flags are those of a replay some time ago
        if flags.is_cuda and not is_capturing(flags.device):
            stream = stream_of(flags.device)
            if self._sent is None or self._stream != stream:
                self._sent, self._stream = CopyEvent(flags.device), stream
            self._sent.record()

    def is_set(self) -> bool:
        """Whether ranks differ, once it is known here."""
        if self._sent is not None:
            self._sent.wait()
        # the digests alone: found_inf and infinities are no error
        return True in self._array[:FOUND_INF].tolist()


class PartsOnRanks:
    """Rows of a DTensor on this rank, and those of the others.

    One rank of the mesh, the maker, gets all rows where what states keep is made anew.

    Args:
        view: of a DTensor that is split in its first dimension.
        number: of the parameter, by which parameters take turns with their makers.
    """

    def __init__(self, view: Any, number: int) -> None:
        # all coordinates of the mesh, by rank; parameters take turns with their makers by number
        self._mesh, dims = view.split
        ranks = self._mesh.mesh
        # in the order that ranks have in a group, whatever their places in the mesh are
        places = sorted(numpy.ndindex(*ranks.shape), key=lambda place: int(ranks[place]))
        here, maker = tuple(self._mesh.get_coordinate()), places[number % len(places)]
        self.ranks, self.is_maker = len(places), here == maker
        # the maker's number among all ranks, for broadcasts
        self._source, self._columns = int(ranks[maker]), view.whole_shape[1]
        # first row and the one behind the last, of each rank; [columns] are whole
        rows = [box[0] for box in view.boxes(places, view.whole_shape)]
        # one copy of each part is sent: from the ranks with the maker's coordinates along copies
        copies = [dim for dim in range(ranks.ndim) if dim not in dims]
        rows = [
            ends if all(place[dim] == maker[dim] for dim in copies) else (0, 0)  # a copy of others'
            for ends, place in zip(rows, places, strict=True)
        ]
        # what each rank sends to the maker; to others nothing
        numels = [(end - begin) * self._columns for begin, end in rows]
        self._received = numels if self.is_maker else [0] * self.ranks
        self._sent = [numels[places.index(here)] if place == maker else 0 for place in places]
        # messages come by rank, rows may lie in another order
        order = sorted(range(self.ranks), key=rows.__getitem__)
        self._order = None if order == list(range(self.ranks)) else order

    def largest(self, magnitude: torch.Tensor) -> torch.Tensor:
        """The largest of all ranks' magnitudes, fp32 of shape ()."""
        # as int32, the largest of all ranks in one all-reduce
        bits = magnitude.view(torch.int32) & MAGNITUDE
        return reduced(bits, [group_of(self._mesh)]).view(torch.float32)

    def joined(self, part: torch.Tensor) -> torch.Tensor:
        """The whole matrix; one without rows where this rank is not the maker."""
        # all numbers on the maker, none elsewhere; `part`: this rank's rows, or none where a copy
        # is sent
        whole = part.new_empty(sum(self._received))
        message = part.reshape(-1)[: sum(self._sent)]
        # as bytes: not every library sends 16 bits
        incoming, outgoing = (
            [part.itemsize * numel for numel in numels] for numels in (self._received, self._sent)
        )
        # bytes that come from each rank, and that go to each; every rank of the mesh calls it
        dist.all_to_all_single(
            whole.view(torch.uint8),
            message.view(torch.uint8),
            incoming,
            outgoing,
            group=group_of(self._mesh),
        )
        # the ranks' rows in the order that they have in the matrix
        if self._order is not None and self.is_maker:
            pieces = torch.split(whole, self._received)
            whole = torch.cat([pieces[rank] for rank in self._order])
        return whole.view(-1, self._columns)

    def hand_out(self, tensor: torch.Tensor) -> None:
        """Gives all ranks the maker's tensor, in place."""
        hand_out(tensor, self._source, group_of(self._mesh))
