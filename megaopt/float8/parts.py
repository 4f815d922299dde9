"""The tensors behind fp8 weights: looked at in every step, found anew where one changed."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from megaopt.float8.foreign import ForeignWeight
from megaopt.float8.shard import Float8Shard
from megaopt.float8.weight import TENSORS, Float8Weight

Weight = Float8Weight | ForeignWeight
Reader = Callable[[], Sequence[Any]]

OWN = operator.attrgetter(*TENSORS)


def reader_of(param: torch.Tensor, weight: Weight) -> Reader:
    """Reads, in about a microsecond, all tensors that a parameter's weight is made of now."""
    made_of = partial(OWN, weight) if isinstance(weight, Float8Weight) else weight.made_of
    if isinstance(param, Float8Shard):
        return lambda: (param.weight, *made_of())
    return made_of


class Parts:
    """What weights are made of, as the step wants it; views are made once, not in every step.

    Args:
        find: gives a parameter's weight and its codes, one-dimensional.
        params: of one batch.
    """

    def __init__(
        self,
        find: Callable[[torch.Tensor], tuple[Weight, torch.Tensor]],
        params: Sequence[torch.Tensor],
    ) -> None:
        self._find, self._params = find, params
        self._readers: list[Reader] = []
        self._seen: list[Any] = []
        self._addresses: list[int] = []
        self.weights: list[Weight] = []
        self.codes: list[torch.Tensor] = []

    def look(self) -> None:
        """Finds weights and codes anew if any tensor is another, or lies elsewhere, than before."""
        now = [tensor for reader in self._readers for tensor in reader()]
        same = len(now) == len(self._seen) and all(map(operator.is_, now, self._seen))
        if not self._readers or not same or _addresses(now) != self._addresses:
            found = [self._find(param) for param in self._params]
            self.weights = [weight for weight, _ in found]
            self.codes = [codes for _, codes in found]
            self._readers = list(map(reader_of, self._params, self.weights))
            self._seen = [tensor for reader in self._readers for tensor in reader()]
            self._addresses = _addresses(self._seen)

    def attributes(self, name: str) -> list[Any]:
        """One of each weight's."""
        return [getattr(weight, name) for weight in self.weights]

    def changed(self) -> None:
        """Tells whoever keeps something made of the old codes, and autograd."""
        for weight in self.weights:
            weight.codes_changed()
        owners = [w if isinstance(w, Float8Weight) else w.owner for w in self.weights]
        torch.autograd.graph.increment_version(owners)


def _addresses(tensors: Sequence[Any]) -> list[int]:
    plain = torch.Tensor
    return [each.data_ptr() for each in tensors if type(each) is plain]
