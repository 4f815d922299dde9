"""Copies from the host to the device for which nobody waits, out of memory that is used again."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy
import torch


class CopyEvent:
    """A CUDA event behind copies on the stream that is current when it is made.

    torch's own asks for the current stream at each record, which takes 5 us on an H200's host.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device)
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.query = self._event.query

    def record(self) -> None:
        """Behind what is queued now."""
        self._event.record(self._stream)


class NoEvent:
    """In its place where copies are done when they return."""

    def record(self) -> None:
        """Nothing is queued."""

    def query(self) -> bool:
        """All is done."""
        return True


@dataclass(frozen=True)
class Piece:
    """Memory of the host that the device copies from."""

    tensor: torch.Tensor
    copied: Any
    """The event behind its last copy: once it has passed the memory can be written again."""

    @cached_property
    def array(self) -> numpy.ndarray:
        """The memory as the host writes it."""
        return self.tensor.numpy()


def new_piece(like: torch.Tensor) -> Piece:
    """Memory for a copy to a tensor; pinned where that is on a GPU."""
    on_gpu = like.device.type == "cuda"
    # a step within inference mode makes tensors that no other step could write
    with torch.inference_mode(False):
        memory = torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=on_gpu)
    return Piece(memory, CopyEvent(like.device) if on_gpu else NoEvent())


GIVEN_UP: list[Piece] = []
"""Pieces of an Upload that was dropped within a capture, until another is written.

Where pinned memory is freed, torch records an event on each stream that copied from it. On a stream
that a CUDA graph is being captured on, that event can never be queried: the next pin_memory(), of
anybody, fails with "invalid argument".
"""


class Upload:
    """A tensor on the device that the host writes again and again, while earlier copies wait.

    pin_memory() and .to() in each step took 0.07 ms on an H200's host. There are as many pieces of
    memory as the host has ever been writes ahead of the device.

    Args:
        tensor: contiguous; it is written and read on one stream, current at every write.
        new: makes a piece of memory of the tensor's shape and dtype.
    """

    def __init__(
        self, tensor: torch.Tensor, new: Callable[[torch.Tensor], Piece] = new_piece
    ) -> None:
        self.tensor, self._new = tensor, new
        self._pieces: deque[Piece] = deque()

    def write(self, array: numpy.ndarray, first: int = 0, last: int | None = None) -> None:
        """Copies an array's rows from `first` up to `last` into the tensor's, after what is queued.

        Args:
            array: of the tensor's shape and dtype; it may change as soon as this returns.
            first: the first row.
            last: the row behind the last; None for all.
        """
        GIVEN_UP.clear()
        oldest_is_done = bool(self._pieces) and self._pieces[0].copied.query()
        piece = self._pieces.popleft() if oldest_is_done else self._new(self.tensor)
        target, source = self.tensor, piece.tensor
        piece.array[first:last] = array[first:last]
        if first or last is not None:
            target, source = target[first:last], source[first:last]
        target.copy_(source, non_blocking=True)
        piece.copied.record()
        self._pieces.append(piece)  # not where the copy failed

    def __del__(self) -> None:
        """Within a capture the pinned memory outlives this."""
        pinned = [piece for piece in self._pieces if piece.tensor.is_pinned()]
        if pinned and torch.cuda.is_current_stream_capturing():
            GIVEN_UP.extend(pinned)
