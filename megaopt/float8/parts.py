"""The fp8 weights behind parameters, and the tensors behind those, looked at in every step."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from megaopt.float8.foreign import ForeignWeight, foreign_weight
from megaopt.float8.shard import Float8Shard
from megaopt.float8.weight import TENSORS, Float8Weight

Weight = Float8Weight | ForeignWeight
Reader = Callable[[], Sequence[Any]]

OWN = operator.attrgetter(*TENSORS)
PLAIN = (torch.Tensor, torch.nn.Parameter)


def weight_of(param: torch.Tensor) -> Weight | None:
    """The fp8 weight that a parameter is or is a part of; None for a plain one."""
    whole = param.weight if isinstance(param, Float8Shard) else param
    if isinstance(whole, Float8Weight):
        return whole
    return None if type(whole) in PLAIN else foreign_weight(whole)


def start_of(param: torch.Tensor) -> int:
    """Which of the weight's elements is the parameter's first."""
    return param.start if isinstance(param, Float8Shard) else 0


def weight_and_codes(param: torch.Tensor) -> tuple[Weight, torch.Tensor]:
    """The weight that a parameter is or is a part of, and the parameter's codes, flat, a view."""
    weight, start = weight_of(param), start_of(param)
    assert weight is not None
    return weight, weight.data8.view(-1)[start : start + param.numel()]


def reader_of(param: torch.Tensor, weight: Weight) -> Reader:
    """Reads, in about a microsecond, all tensors that a parameter's weight is made of now."""
    made_of = partial(OWN, weight) if isinstance(weight, Float8Weight) else weight.made_of
    if isinstance(param, Float8Shard):
        return lambda: (param.weight, *made_of())
    return made_of


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
        self.weights: list[Weight] = []
        self.codes: list[torch.Tensor] = []

    def look(self) -> None:
        """Finds weights and codes anew if any tensor is another, or lies elsewhere, than before."""
        now = [tensor for reader in self._readers for tensor in reader()]
        same = len(now) == len(self._seen) and all(map(operator.is_, now, self._seen))
        if not self._readers or not same or _addresses(now) != self._addresses:
            found = [weight_and_codes(param) for param in self._params]
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
