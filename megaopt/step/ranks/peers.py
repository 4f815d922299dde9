"""A group of ranks, and the message that they add up."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

import numpy
import torch
import torch.distributed as dist

from megaopt.kernels.backends import Plan
from megaopt.kernels.norm.bins import new_bins
from megaopt.kernels.step.table import DeviceTable, is_capturing

FOUND_INF, NONFINITE, WORDS = 2, 3, 4
"""At the end of a message: digests of the meetings that a rank is going to have, and of all that
ranks must have alike; found_inf; whether an infinity or NaN leaves the step out."""


def digest_of(what: object) -> int:
    """63 bits, the same on all ranks that have the same.

    Ranks add their digests up modulo 2**64, and each compares the sum with its own times their
    number. It misses a difference where the others' digests less its own add up to 0. Small numbers
    do so easily: of three ranks with 4, 5 and 6 parameters the second would go on alone. With well
    mixed bits that is a chance of about ranks / 2**63, for every rank, be it one of few or of many.

    Args:
        what: its repr is compared.
    """
    digest = hashlib.blake2b(repr(what).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


REFUSED = digest_of("this rank raises an error")
"""The second word of a rank that does not step."""


@dataclass(eq=False)
class Peers:
    """The ranks that hold the other parts of some parameters, and what this one tells them.

    A message is int64: a table of the norm, where gradients are measured, and WORDS. All ranks add
    theirs up, so that the norm has the bits of whole tensors; also one that has no gradient.
    """

    device: torch.device
    groups: list[dist.ProcessGroup]
    """The message is added up over one after the other: the dimensions of a mesh."""
    alike: int
    """A digest of what the ranks must have alike of their parameters."""
    plans: list[Plan] | None = None
    """Of the parameters that are measured; None where the norm is not measured here."""
    meetings: int = 0
    """A digest of the meetings that the ranks have in common, of which this is one."""
    _message: torch.Tensor = field(init=False)
    _alike: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self._sent = DeviceTable(self.device)
        # it stays where it is, for CUDA graphs
        with torch.inference_mode(False):
            words = torch.zeros(WORDS, dtype=torch.int64, device=self.device)
            bins = new_bins(self.device) if self.plans is not None else words[:0]
            self._message = torch.cat([bins.flatten(), words])
        self._bins, self._words = self._message[:-WORDS].view(bins.shape), self._message[-WORDS:]

    @property
    def measures(self) -> bool:
        """Whether they meet only in steps that measure their gradients."""
        return self.plans is not None

    @cached_property
    def size(self) -> int:
        """How many ranks there are."""
        return prod(map(dist.get_world_size, self.groups))

    def write(self, asked: object, heard: torch.Tensor) -> None:
        """Writes this rank's message.

        Args:
            asked: what else the ranks must have alike in this step.
            heard: in the meeting before, to be passed on.
        """
        self._begin(digest_of((self.alike, asked)))
        self._words.add_(heard.to(self.device))
        for plan in self.plans or ():
            plan.accumulate(self._bins)

    def refuse(self) -> None:
        """Writes that this rank raises an error."""
        self._begin(REFUSED)

    def _begin(self, digest: int) -> None:
        own = numpy.array([self.meetings, digest, 0, 0], dtype=numpy.int64)
        # numpy's product is modulo 2**64, as the sum is
        words, self._alike = self._sent.update(numpy.stack([own, own * self.size]))
        self._message.zero_()
        self._words.copy_(words)

    def meet(self) -> None:
        """Adds up the messages of all ranks."""
        for group in self.groups:
            dist.all_reduce(self._message, dist.ReduceOp.SUM, group=group)

    def heard(self) -> torch.Tensor:
        """int64 [WORDS], 0 or 1: which digests are others, and what is set, on any rank."""
        return (self._words != self._alike).long()

    def accumulate(self, bins: torch.Tensor) -> None:
        """Adds the squares of all ranks' gradients, which were added up, to the bins."""
        bins.add_(self._bins)


class Notice:
    """A flag on the device that the host reads a step later, so that it waits for nothing.

    Args:
        device: where the flag is.
        message: of the error that it stands for.
    """

    def __init__(self, device: torch.device, message: str) -> None:
        self.message = message
        self._device = device
        on_gpu = device.type == "cuda"
        with torch.inference_mode(False):
            self._flag = torch.zeros((), dtype=torch.int64, device="cpu", pin_memory=on_gpu)
        self._sent: torch.cuda.Event | None = None

    def post(self, flag: torch.Tensor) -> None:
        """Sends a flag, int64 of shape (), on its way to the host."""
        self._flag.copy_(flag, non_blocking=True)
        # nobody can wait for a captured event: the flag is that of a replay some time ago
        if self._device.type == "cuda" and not is_capturing(self._device):
            self._sent = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's has no types
            self._sent.record(torch.cuda.current_stream(self._device))

    def is_set(self) -> bool:
        """The flag, once it is there."""
        if self._sent is not None:
            self._sent.synchronize()
        return bool(self._flag)
