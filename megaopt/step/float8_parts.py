"""The tensors behind the fp8 weights of parameters, looked at in every step."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from megaopt.params import view_of

Reader = Callable[[], Sequence[Any]]


class Parts:
    """What weights are made of, as the step wants it; views are made once, not in every step.

    Args:
        params: of one batch.
    """

    def __init__(self, params: Sequence[torch.Tensor]) -> None:
        self._params = params
        self._readers: list[Reader] = []
        self._seen: list[Any] = []
        self._addresses: list[int] = []
        self.weights: list[Any] = []
        self.codes: list[torch.Tensor] = []

    def look(self) -> None:
        """Finds weights and codes anew if any tensor is another, or lies elsewhere, than before."""
        now = [tensor for reader in self._readers for tensor in reader()]
        same = len(now) == len(self._seen) and all(map(operator.is_, now, self._seen))
        if not self._readers or not same or _addresses(now) != self._addresses:
            found: list[Any] = [view_of(param) for param in self._params]
            self.weights = [view.weight for view in found]
            self.codes = [view.codes for view in found]
            self._readers = [view.reader() for view in found]
            self._seen = [tensor for reader in self._readers for tensor in reader()]
            self._addresses = _addresses(self._seen)

    def attributes(self, name: str) -> list[Any]:
        """One of each weight's."""
        return [getattr(weight, name) for weight in self.weights]

    def changed(self) -> None:
        """Tells whoever keeps something made of the old codes, and autograd."""
        for weight in self.weights:
            weight.codes_changed()
        torch.autograd.graph.increment_version([weight.owner for weight in self.weights])


def _addresses(tensors: Sequence[Any]) -> list[int]:
    plain = torch.Tensor
    return [each.data_ptr() for each in tensors if type(each) is plain]
