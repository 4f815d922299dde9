"""What parameters are called in every layout, and which of their elements a rank holds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from megaopt.kernels.place import place_of_box
from megaopt.params.dtensor import local_of, shard_box
from megaopt.recording import megatron
from megaopt.recording.pieces import Piece, cut, whole

WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
"""Names that wrappers put between those of the model."""


class Known(NamedTuple):
    """What is known of a tensor."""

    name: str
    """Canonical: of its parameter, or of the module whose output it is."""
    shape: tuple[int, ...]
    """The whole tensor's, over all ranks."""
    pieces: tuple[Piece, ...] | None
    """What this rank has; None where nobody knows its place, and it is the rank's own."""


class Owner(NamedTuple):
    """What an optimizer's parameter is to the model."""

    known: Known
    quantity: str
    """It is the model's "weight" itself, or its "master"."""
    weight: torch.Tensor | None = None
    """The model's own where the parameter is a master; it gets its values after the step."""


def canonical(name: str) -> str:
    """A parameter's or module's name without what wrappers put into it."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def of_tensor(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[Piece, ...]]:
    """The whole shape of a tensor or DTensor, and the pieces that this rank has."""
    shape, shard = tuple(tensor.shape), shard_box(tensor)
    if shard is None:
        return shape, whole(shape)
    return shape, tuple(box(shape, *shard)) if math.prod(shard[1]) else ()


def box(shape: Sequence[int], start: Sequence[int], size: Sequence[int]) -> Iterator[Piece]:
    """The pieces of a part that is cut in any dimensions; at least one element."""
    steps = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    first = sum(begin * step for begin, step in zip(start, steps, strict=True))
    place = place_of_box(0, first, size, shape)
    if place is not None:
        yield Piece(0, math.prod(size), place)
        return
    numel = math.prod(size[1:])
    for i in range(size[0]):  # slices, which are cut in a dimension less
        for begin, count, inner in box(shape[1:], start[1:], size[1:]):
            moved = inner._replace(first=inner.first + (start[0] + i) * steps[0])
            yield Piece(i * numel + begin, count, moved)


class Parameters:
    """The parameters of models: their names and places, looked up once each.

    Args:
        names: canonical names by the names that the models have.
        vocabulary: rows of Megatron's embedding that are not padding; None: all.
    """

    def __init__(self, names: Mapping[str, str], vocabulary: int | None) -> None:
        self.models: list[torch.nn.Module] = []
        self._map, self._vocabulary = names, vocabulary
        self._names: dict[torch.Tensor, str] = {}
        self._owners: dict[torch.Tensor, Owner] = {}

    def add(self, model: torch.nn.Module) -> None:
        """Learns the names of a model, in the place of models that it holds.

        A name that an earlier model has gets the model's number before it.
        """
        inside = set(model.modules())
        self.models = [each for each in self.models if each not in inside] + [model]
        self._names, taken = {}, set[str]()
        for number, each in enumerate(self.models):
            own: dict[torch.Tensor, str] = {}
            for path, param in each.named_parameters():
                name = self.name(each, path)
                own[param] = f"model{number}.{name}" if name in taken else name
            self._names = {**own, **self._names}
            taken.update(own.values())
        self._owners.clear()

    def name(self, model: torch.nn.Module, name: str) -> str:
        """The canonical name of a parameter or module."""
        found = canonical(megatron.global_name(model, name))
        return self._map.get(found, found)

    def has(self, param: Any) -> bool:
        """Whether it is a parameter of the models."""
        return isinstance(param, torch.Tensor) and param in self._names

    def owner(self, param: torch.Tensor, default: str) -> Owner:
        """What a parameter of an optimizer is; default: its name where no model knows it."""
        if param not in self._owners:
            self._owners[param] = self._found(param, default)
        return self._owners[param]

    def _found(self, param: torch.Tensor, default: str) -> Owner:
        if param in self._names:
            return Owner(self._known(param), "weight")
        shard = megatron.shard_of(param, self._names)
        if shard is None:
            name = self._map.get(default, default)
            return Owner(Known(name, *of_tensor(param)), "weight")
        known = self._known(shard.weight)
        if known.pieces is not None:
            known = known._replace(pieces=cut(known.pieces, shard.begin, shard.end))
        if not shard.is_master:
            return Owner(known, "weight")
        return Owner(known, "master", shard.weight)

    def known(self, param: torch.Tensor) -> Known:
        """What is known of a model's parameter."""
        return self._known(param)

    def _known(self, param: torch.Tensor) -> Known:
        name = self._names[param]
        part = megatron.part_of(param, name, self._vocabulary)
        return Known(name, *(part or of_tensor(param)))


def of_state(param: torch.Tensor, known: Known, tensor: torch.Tensor) -> Known:
    """What is known of a tensor of a parameter's state."""
    if local_of(tensor) is not tensor:
        return Known(known.name, *of_tensor(tensor))
    if tensor.numel() == local_of(param).numel():
        return known
    shape = tuple(tensor.shape)
    together = known.pieces == whole(known.shape)
    return Known(known.name, shape, whole(shape) if together else None)
