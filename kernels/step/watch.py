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

_QUALITIES: tuple[Callable[[torch.Tensor], object], ...] = (
    operator.attrgetter("dtype"),
    operator.attrgetter("shape"),
    torch.Tensor.is_contiguous,
    operator.attrgetter("device"),
)


class Watch:
    """Looks at a list of tensors, always of the same length, step after step.

    Everything is looked at each time: `param.data = ...` gives a parameter another layout, or
    another dtype, at the same address.

    Args:
        count: how many tensors.
        module: the extension that native.build made, or None for the twin in Python.
    """

    def __init__(self, count: int, module: Any = None) -> None:
        self.addresses = numpy.full(count, -1, dtype=numpy.int64)
        self._module = module
        self._kinds: Any = None
        if module is not None:
            self._kinds = [numpy.zeros(count, dtype=numpy.int64) for _ in range(2)]

    def look(self, tensors: list[torch.Tensor]) -> int:
        """SAME, MOVED or CHANGED since the last look; the first gives CHANGED."""
        if self._module is not None:
            return int(self._module.look(tensors, self.addresses, *self._kinds))
        try:
            now = list(map(torch.Tensor.data_ptr, tensors))
        except RuntimeError:  # a sparse tensor has none
            return CHANGED
        kinds = [list(map(quality, tensors)) for quality in _QUALITIES]
        changed, moved = kinds != self._kinds, now != self.addresses.tolist()
        self._kinds, self.addresses[:] = kinds, now
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
