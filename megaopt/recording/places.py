"""What parameters are called in every layout, and which of their elements a rank holds."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from megaopt.kernels.place import Place
from megaopt.params.dtensor import is_dtensor, local_of

WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
"""Names that wrappers put between those of the model."""


class Piece(NamedTuple):
    """A run of a rank's tensor, and its place in the whole."""

    begin: int
    """In the rank's tensor, flat."""
    numel: int
    place: Place


class Known(NamedTuple):
    """What is known of a parameter."""

    name: str
    shape: tuple[int, ...]
    """Of the whole, over all ranks."""
    pieces: tuple[Piece, ...] | None
    """None: nobody knows where the rank's elements belong, and they are its own."""


def canonical(name: str) -> str:
    """A parameter's or module's name without what wrappers put into it."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def names_of(models: Iterable[torch.nn.Module]) -> dict[torch.Tensor, str]:
    """The canonical name of each parameter; names that would meet stay as they are."""
    found = [(p, name) for model in models for name, p in model.named_parameters()]
    counts = Counter(canonical(name) for _, name in found)
    return {p: canonical(n) if counts[canonical(n)] == 1 else n for p, n in found}


def whole(shape: Sequence[int]) -> tuple[Piece, ...]:
    """The pieces of a tensor that a rank has whole."""
    numel = math.prod(shape)
    return (Piece(0, numel, Place(0)),) if numel else ()


def of_tensor(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[Piece, ...]]:
    """The whole shape of a tensor or DTensor, and the pieces that this rank has."""
    shape = tuple(tensor.shape)
    if not is_dtensor(tensor):
        return shape, whole(shape)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    own: Any = tensor
    size, start = compute_local_shape_and_global_offset(shape, own.device_mesh, own.placements)
    return shape, tuple(box(shape, start, size)) if math.prod(size) else ()


def box(shape: Sequence[int], start: Sequence[int], size: Sequence[int]) -> Iterator[Piece]:
    """The pieces of a part that is cut in any dimensions; at least one element."""
    cut = [dim for dim in range(len(shape)) if size[dim] != shape[dim]]
    steps = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    first = sum(begin * step for begin, step in zip(start, steps, strict=True))
    outer = next((dim for dim, each in enumerate(size) if each != 1), 0)
    if not cut or cut[-1] <= outer:
        yield Piece(0, math.prod(size), Place(0, first))
    elif set(cut) <= {*range(outer + 1), cut[-1]}:
        run = size[cut[-1]] * steps[cut[-1]]
        stride = steps[cut[-1] - 1]
        yield Piece(0, math.prod(size), Place(0, first, run, stride))
    else:  # slices of the outer dimension, each of a form above or cut again
        inner = (*size[:outer], 1, *size[outer + 1 :])
        for i in range(size[outer]):
            begin = (*start[:outer], start[outer] + i, *start[outer + 1 :])
            for piece in box(shape, begin, inner):
                yield piece._replace(begin=i * math.prod(inner) + piece.begin)


class Parameters:
    """The parameters of models: their names and places, looked up once each."""

    def __init__(self, models: Sequence[torch.nn.Module], names: Mapping[str, str]) -> None:
        self._models, self._map = models, names
        self._names: dict[torch.Tensor, str] = {}
        self._known: dict[torch.Tensor, Known] = {}

    def known(self, param: torch.Tensor, default: str) -> Known:
        """A parameter's name, whole shape and pieces; default: its name where no model has it."""
        if param not in self._known:
            if param not in self._names:
                self._names = names_of(self._models)
            name = self._names.get(param, default)
            self._known[param] = Known(self._map.get(name, name), *of_tensor(param))
        return self._known[param]

    def of_state(self, param: torch.Tensor, known: Known, tensor: torch.Tensor) -> Known:
        """The same of a tensor of the parameter's state."""
        if is_dtensor(tensor):
            return Known(known.name, *of_tensor(tensor))
        if tensor.numel() == local_of(param).numel():
            return known
        shape = tuple(tensor.shape)
        together = known.pieces == whole(known.shape)
        return Known(known.name, shape, whole(shape) if together else None)
