"""A group of ranks, and the message that they add up."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any

import numpy
import torch
import torch.distributed as dist

from megaopt.kernels.backends import Plan
from megaopt.kernels.chunks.table import DeviceTable, is_capturing
from megaopt.kernels.norm.bins import new_bins

FOUND_INF, NONFINITE, WORDS = 2, 3, 4
"""At the end of a message: digests of the meetings that a rank is going to have, and of all that
ranks must have alike; found_inf; whether an infinity or NaN leaves the step out."""


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
SUM, MAX = dist.ReduceOp.SUM, dist.ReduceOp.MAX


def reduced(own: torch.Tensor, groups: Iterable[Any], op: Any = MAX) -> torch.Tensor:
    """The largest of all ranks of the groups, one after the other, or the sum; in place."""
    for group in groups:
        dist.all_reduce(own, op, group=group)
    return own


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
        self._copies = copies
        self.alike, self.kind = alike, kind
        self.meetings = 0
        """A digest of the kinds of all meetings, where ranks have all in common."""
        self.size = prod(map(dist.get_world_size, self.all_groups))
        self.measures = plans is not None
        """They meet in steps that measure their gradients, and in no others."""
        self._sent = DeviceTable(device)
        # it stays where it is, for CUDA graphs
        with torch.inference_mode(False):
            bins = new_bins(device)[: None if self.measures else 0]
            own = self._message = torch.cat([bins.flatten(), bins.new_zeros(WORDS)])
            self._bins, self._words = own[:-WORDS].view(bins.shape), own[-WORDS:]

    @property
    def all_groups(self) -> list[dist.ProcessGroup]:
        """Those of parts, then those of copies."""
        return [*self.groups, *self._copies]

    @property
    def event(self) -> str:
        """A name of what was heard last, which these ranks alone have in common; waits for it."""
        return "/".join(("megaopt", "differ", *map(str, (*self.ranks, *self._words.tolist()))))

    @property
    def is_read_at_once(self) -> bool:
        """Whether a message can be read without waiting for work that is queued on the device."""
        return self.device.type == "cpu"

    def write(
        self, asked: object = None, heard: torch.Tensor | None = None, measures: bool = True
    ) -> None:
        """Writes this rank's message: that it raises an error, unless something was heard.

        Args:
            asked: what the ranks must have alike in this step.
            heard: in the meeting before, to be passed on.
            measures: whether the step asks for the norm.
        """
        digest = REFUSED if heard is None else digest_of((self.alike, asked))
        own = numpy.array([self.meetings, digest, 0, 0], dtype=numpy.int64)
        # numpy's product is modulo 2**64, as the sum is
        words, self._alike = self._sent.update(numpy.stack([own, own * self.size]))
        self._message.zero_()
        self._words.copy_(words)
        if heard is not None:
            self._words.add_(heard.to(self.device))
            for plan in (self.plans or ()) if measures else ():
                plan.accumulate(self._bins)

    def meet(self) -> None:
        """Adds up the messages of all ranks."""
        reduced(self._message, self.groups, SUM)
        reduced(self._words, self._copies, SUM)

    def heard(self) -> torch.Tensor:
        """int64 [WORDS], 0 or 1: which digests are others, and what is set, on any rank."""
        apart: torch.Tensor = self._words != self._alike
        return apart.long()

    def accumulate(self, bins: torch.Tensor) -> None:
        """Adds the squares of all ranks' gradients to the bins."""
        bins.add_(self._bins)


class Notice:
    """A flag on the device that the host reads a step later, so that it waits for nothing.

    message: finds that of the error that it stands for.
    """

    def __init__(self, device: torch.device, message: Callable[[], str]) -> None:
        self.message = message
        with torch.inference_mode(False):
            pinned = device.type == "cuda"
            self._flag = torch.zeros((), dtype=torch.int64, device="cpu", pin_memory=pinned)
        self._sent: torch.cuda.Event | None = None

    def post(self, flag: torch.Tensor) -> None:
        """Sends a flag, int64 of shape (), on its way to the host."""
        self._flag.copy_(flag, non_blocking=True)
        # nobody can wait for a captured event: the flag is that of a replay some time ago
        if flag.is_cuda and not is_capturing(flag.device):
            self._sent = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's has no types
            self._sent.record(torch.cuda.current_stream(flag.device))

    def is_set(self) -> bool:
        """The flag, once it is there."""
        if self._sent is not None:
            self._sent.synchronize()
        return bool(self._flag)
