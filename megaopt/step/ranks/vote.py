"""How ranks notice that they do not all do the same, in collectives that they call anyway."""

from __future__ import annotations

import hashlib

import torch

from megaopt.kernels.step.table import is_capturing


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


def is_read_at_once(device: torch.device) -> bool:
    """Whether a tensor on the device can be read without waiting for work that is queued there."""
    return device.type == "cpu"


class RanksDiffer(ValueError):
    """All ranks that have met raise it at the same place; users see a ValueError."""


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
            self._flag = torch.zeros(1, dtype=torch.int64, device="cpu", pin_memory=on_gpu)
        self._sent: torch.cuda.Event | None = None

    def post(self, flag: torch.Tensor) -> None:
        """Sends a flag, int64 of shape (1,), on its way to the host."""
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
