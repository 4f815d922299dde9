"""What tensors were when last looked at: they move, and may turn into others, from step to step."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy
import torch

from megaopt.kernels.step import native

SAME, MOVED, CHANGED = 0, 1, 2
"""All as they were; only addresses differ; a dtype, size, device or the contiguity differs."""

_dtype: Callable[[torch.Tensor], torch.dtype] = operator.attrgetter("dtype")
_device: Callable[[torch.Tensor], torch.device] = operator.attrgetter("device")


class Watch:
    """Looks at a list of tensors, always of the same length, step after step.

    Args:
        count: how many tensors.
        fresh: whether new tensors come at every step (gradients): then dtype, size and contiguity
            are looked at each time; otherwise only when an address differs, since nothing but
            another tensor has another dtype.
        module: the extension that native.build made, or None for the twin in Python.
    """

    def __init__(self, count: int, fresh: bool, module: Any = None) -> None:
        self.addresses = numpy.full(count, -1, dtype=numpy.int64)
        self._fresh, self._module = fresh, module
        self._known: list[Any] = [[], []]
        self._native = [numpy.zeros(count, dtype=numpy.int64) for _ in range(2)]

    def look(self, tensors: list[torch.Tensor]) -> int:
        """SAME, MOVED or CHANGED since the last look; the first gives CHANGED."""
        if self._module is not None:
            return int(self._module.look(tensors, self.addresses, *self._native))
        now = list(map(torch.Tensor.data_ptr, tensors))
        moved = now != self._known[0]
        kinds = self._known[1]
        if moved or self._fresh:
            kinds = [
                list(map(_dtype, tensors)),
                list(map(torch.Tensor.numel, tensors)),
                list(map(torch.Tensor.is_contiguous, tensors)),
                list(map(_device, tensors)) if moved else kinds[3],
            ]
        changed = kinds != self._known[1]
        self._known = [now, kinds]
        if moved:
            self.addresses[:] = now
        return CHANGED if changed else MOVED if moved else SAME


def module_for(count: int) -> Any:
    """The extension where so many tensors are worth building it, and it can be built; else None."""
    return native.build()[0] if count >= native.WORTH_BUILDING else None


def grads_of(params: list[torch.Tensor]) -> list[torch.Tensor | None]:
    """Each parameter's .grad."""
    module = module_for(len(params))
    if module is not None:
        found: list[torch.Tensor | None] = module.grads(params)
        return found
    return [param.grad for param in params]
