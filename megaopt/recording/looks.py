"""Looks at the tensors of a list, and at an optimizer's groups and states, in one call."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy
import torch

from megaopt.kernels import native
from megaopt.kernels.native import is_worth_building, same_objects

Tensors = Sequence[torch.Tensor | None]
VERSION, VALUES = operator.attrgetter("_version"), operator.methodcaller("values")
KIND: list[Any] = [torch.Tensor.numel, *map(operator.attrgetter, ("dtype", "device", "layout"))]
"""The facts that make tensors alike; one by one, as one call for each tensor takes longer."""
NOTHING = torch.empty(0)


class Looked(NamedTuple):
    """The findings of a look at tensors."""

    addresses: numpy.ndarray | None
    """int64 [n], where each tensor's elements lie, one behind the other, as their bits are; None
    where those of one do not. The next look writes into it."""
    moved: list[int]
    """Places of tensors that lie elsewhere than at the last look."""
    written: list[int]
    """Places of those that were written since, as far as torch counts writes."""


class Looks:
    """Looks at lists of tensors that are alike, again and again.

    Args:
        tensors: with memory of their own; None where there must be none.
    """

    def __init__(self, tensors: Tensors) -> None:
        self._absent = [tensor is None for tensor in tensors]
        self._kind = _kind(tensors)
        self._is_worth_building = is_worth_building(_there(tensors))
        self._addresses = numpy.zeros(len(tensors), numpy.int64)
        self._versions = numpy.zeros(len(tensors), numpy.int64)
        self._module: Any = None
        self._native: Any = None

    def look(self, tensors: Tensors) -> Looked | None:
        """Notes where tensors lie, and their versions; None where one is of another kind."""
        if self._module is None:
            self._module = native.get(self._is_worth_building)
            if self._module is None:
                return self._look(tensors)
            # the extension takes None for the size of an absent tensor, and no layouts
            numels, *rest, _ = self._kind
            sizes = [None if no else numel for no, numel in zip(self._absent, numels, strict=True)]
            self._native = self._module.Kinds(sizes, *rest)
        # int64 rows for addresses and versions are written in place
        tensor_list = tensors if type(tensors) is list else [*tensors]
        facts = self._module.look_at(self._native, tensor_list, self._addresses, self._versions)
        return None if facts is None else self._looked(*facts)

    def _looked(self, in_order: bool, moved: list[int], written: list[int]) -> Looked:
        return Looked(self._addresses if in_order else None, moved, written)

    def _look(self, tensors: Tensors) -> Looked | None:
        """The extension's twin."""
        if [tensor is None for tensor in tensors] != self._absent or _kind(tensors) != self._kind:
            return None
        all_tensors = _there(tensors)
        # elements one behind the other, and bits that say what they are
        in_order = all(map(torch.Tensor.is_contiguous, all_tensors))
        in_order = in_order and not any(
            tensor.is_neg() or tensor._is_zerotensor() for tensor in all_tensors
        )
        addresses = list(map(torch.Tensor.data_ptr, all_tensors))
        try:
            versions = list(map(VERSION, all_tensors))
        except RuntimeError:  # tensors of inference mode have none
            versions = [0 if tensor.is_inference() else tensor._version for tensor in all_tensors]
        moved, written = _noted(self._addresses, addresses), _noted(self._versions, versions)
        return self._looked(in_order, moved, written)


def _there(tensors: Tensors) -> list[torch.Tensor]:
    return [NOTHING if tensor is None else tensor for tensor in tensors]


def _kind(tensors: Tensors) -> tuple[list[Any], ...]:
    return tuple(list(map(fact, _there(tensors))) for fact in KIND)


def _noted(row: numpy.ndarray, now: list[int]) -> list[int]:
    """Notes numbers in an int64 row; the places of those that are others."""
    before = row.tolist()
    row[:] = now
    return [] if now == before else [i for i, number in enumerate(now) if number != before[i]]


def same_params(
    groups: Sequence[Mapping[str, Any]], params: tuple[torch.Tensor, ...], sizes: list[int]
) -> bool:
    """Whether groups have these very parameters; sizes: how many each of them has."""
    module = native.get(is_worth_building=False)
    if module is not None:
        return bool(module.same_params(groups, params, sizes))
    lists = [group["params"] for group in groups]
    return [*map(len, lists)] == sizes and same_objects([*itertools.chain(*lists)], params)


class SameStates:
    """Tells whether a state has the very entries, and these the very values, that it had."""

    def __init__(self, state: Mapping[Any, Any]) -> None:
        # keys, dicts and their values, in order
        self._keys, self._entries = (*state.keys(),), (*state.values(),)
        self.has_dicts = isinstance(state, dict) and all(type(e) is dict for e in self._entries)
        """The state is a dict of dicts; otherwise it cannot be told."""
        self.values = self._now() if self.has_dicts else ()

    def _now(self) -> tuple[Any, ...]:
        return (*itertools.chain.from_iterable(map(VALUES, self._entries)),)

    def are(self, state: Mapping[Any, Any]) -> bool:
        """Checks that a state is the same."""
        module = native.get(is_worth_building=False)
        if module is not None and isinstance(state, dict):
            return bool(module.same_states(state, self._keys, self._entries, self.values))
        # the very objects: keys and dicts first, then all values
        is_same = same_objects(state.keys(), self._keys)
        is_same = is_same and same_objects(state.values(), self._entries)
        return is_same and same_objects(self._now(), self.values)
