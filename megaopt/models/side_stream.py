"""Steps on a stream of their own, beside a backward pass that goes on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class SideStream:
    """One stream a device; what is stepped there is done before what follows the backward pass."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._is_awaited = False

    @contextmanager
    def after(self, grad: torch.Tensor) -> Iterator[None]:
        """Within it, work goes to the side stream, behind all that the device was given so far.

        grad: what that work reads; its memory is not used again before.
        """
        device = grad.device
        side = self._streams.get(device)
        if side is None:
            side = self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            yield
        grad.record_stream(side)
        self._await()

    def join(self) -> None:
        """The current streams wait for what was stepped on the side."""
        self._is_awaited = False
        for device, side in self._streams.items():
            torch.cuda.current_stream(device).wait_stream(side)

    def _await(self) -> None:
        """Joins when the backward pass is over."""
        if self._is_awaited:
            return
        self._is_awaited = True
        try:
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(self.join)
        except RuntimeError:  # no backward pass is going on
            self.join()
