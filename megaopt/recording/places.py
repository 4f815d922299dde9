"""Names of parameters in every layout, and the elements of them that a rank holds."""

from __future__ import annotations

import itertools
import math
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from megaopt.kernels.place import place_of_box
from megaopt.kernels.shards import local_of, shard_box
from megaopt.recording import megatron
from megaopt.recording.pieces import ShardRange, cut, whole

WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Names that wrappers put between those of the model."""
MODULE = "module"
"""The name that DistributedDataParallel and others put there; users' models may have it too."""


class Known(NamedTuple):
    """A tensor's name, whole shape and pieces, as far as they are known."""

    name: str
    """The canonical name of its parameter, or of the module whose output it is."""
    shape: tuple[int, ...]
    """The whole tensor's, over all ranks."""
    pieces: tuple[ShardRange, ...] | None
    """The pieces that this rank has; None where nobody knows its place: it is this rank's alone."""


class ParameterRole(NamedTuple):
    """The relation of an optimizer's parameter to the model."""

    placement: Known
    quantity: str
    """The parameter is the model's "weight" itself, or its "master"."""
    weight: torch.Tensor | None = None
    """The model's weight of a parameter that is a master; it gets its values after the step."""


def canonical(names: Iterable[str]) -> dict[str, str]:
    """The names of one model's parameters or modules without what wrappers put into them.

    Where two would be one, they keep what tells them apart.
    """
    short_names, begin = _without(WRAPPERS, {name: name for name in names}), f"{MODULE}."
    while short_names and all(name.startswith(begin) for name in short_names.values()):
        short_names = {name: short.removeprefix(begin) for name, short in short_names.items()}
    return _without((MODULE,), short_names)


def _without(parts: Sequence[str], names: Mapping[str, str]) -> dict[str, str]:
    """Short names without these parts, as far as no two become one."""
    shorter = dict[str, str]()
    for name, short in names.items():
        shorter[name] = ".".join(part for part in short.split(".") if part not in parts)
    counts = Counter(shorter.values())
    return {name: shorter[name] if counts[shorter[name]] == 1 else names[name] for name in names}


def of_tensor(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[ShardRange, ...]]:
    """The whole shape of a tensor or DTensor, and the pieces that this rank has."""
    shape = tuple(tensor.shape)
    if local_of(tensor) is tensor:
        return shape, whole(shape)
    start, size = shard_box(tensor)
    return shape, tuple(box(shape, start, size)) if math.prod(size) else ()


def box(shape: Sequence[int], start: Sequence[int], size: Sequence[int]) -> Iterator[ShardRange]:
    """The pieces of a part that is cut in any dimensions; at least one element."""
    steps = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    first = sum(begin * step for begin, step in zip(start, steps, strict=True))
    place = place_of_box(0, first, size, shape)
    if place is not None:
        yield ShardRange(0, math.prod(size), place)
        return
    numel = math.prod(size[1:])
    for i in range(size[0]):  # slices, which are cut in a dimension less
        for begin, count, inner in box(shape[1:], start[1:], size[1:]):
            moved = inner._replace(first=inner.first + (start[0] + i) * steps[0])
            yield ShardRange(i * numel + begin, count, moved)


class Parameters:
    """The parameters of models and optimizers: their names and places, looked up once each.

    No two that are there at one time have one name.

    Args:
        names: canonical names by the names that the models have.
        vocabulary: rows of Megatron's embedding that are not padding; None: all.
    """

    def __init__(self, names: Mapping[str, str], vocabulary: int | None) -> None:
        self.models: list[torch.nn.Module] = []
        self._map, self._vocabulary = names, vocabulary
        self.names: dict[torch.Tensor, str] = {}
        """The canonical names of the models' parameters."""
        self._modules: dict[torch.nn.Module, set[str]] = {}
        """Names of modules, by the model that they are of."""
        self._owners: dict[int, dict[torch.Tensor, ParameterRole]] = {}
        """The owners of each optimizer's parameters."""
        self._loose: dict[int, dict[torch.Tensor, str]] = {}
        """Names of each optimizer's parameters that no model knows."""
        self._last: dict[str, weakref.ref[torch.Tensor]] = {}
        """The last parameter of an optimizer that had a name."""

    def add(self, model: torch.nn.Module) -> None:
        """Learns the names of a model, which takes the place of models that it holds.

        A name that an earlier model has gets the model's number before it. Raises ValueError where
        two parameters of a model have one name, as a map may give it to them.
        """
        inside = set(model.modules())
        models = [earlier for earlier in self.models if earlier not in inside] + [model]
        names, taken = dict[torch.Tensor, str](), set[str]()
        for number, member in enumerate(models):
            paths = dict(member.named_parameters())
            short = self._short(member, paths)
            pairs = ((param, short[path]) for path, param in paths.items())
            member_names: dict[torch.Tensor, str] = {p: _apart(n, number, taken) for p, n in pairs}
            names = {**member_names, **names}
            taken.update(member_names.values())
        self.models, self.names = models, names
        self._modules = {root: names for root, names in self._modules.items() if root not in inside}
        self._owners.clear()

    def _short(self, model: torch.nn.Module, paths: Iterable[str]) -> dict[str, str]:
        """The canonical names of a model's parameters or modules, by their paths.

        Raises ValueError where the map makes one name of two.
        """
        whole = {path: megatron.global_name(model, path) for path in paths}
        counts = Counter(whole.values())
        whole = {path: name if counts[name] == 1 else path for path, name in whole.items()}
        short = canonical(whole.values())
        names = {path: short[name] for path, name in whole.items()}
        # as the map has them, which must not make one name of two
        mapped = {path: self._map.get(name, name) for path, name in names.items()}
        counts = Counter(mapped.values())
        double = next((name for name, count in counts.items() if count > 1), None)
        if double is not None:
            refuse_one_name(double, [names[path] for path in mapped if mapped[path] == double])
        return mapped

    def modules(self, model: torch.nn.Module, paths: Sequence[str]) -> dict[str, str]:
        """The canonical names of modules of a model, by their paths."""
        name_sets = (names for root, names in self._modules.items() if root is not model)
        taken, number = set[str]().union(*name_sets), self.models.index(model)
        short = self._short(model, paths)
        names = {path: _apart(short[path], number, taken) for path in paths}
        self._modules[model] = set(names.values())
        return names

    def has(self, param: Any) -> bool:
        """Returns whether something is a parameter of the models."""
        return isinstance(param, torch.Tensor) and param in self.names

    def owners(
        self, number: int, params: Sequence[torch.Tensor], labels: Sequence[str]
    ) -> list[ParameterRole]:
        """Returns what the parameters of an optimizer are to the models.

        Args:
            number: the optimizer's number.
            params: the optimizer's parameters now; earlier ones may lose their names to them.
            labels: names of the parameters that no model knows. A label that another parameter
                has, as where this one moved to another group, gets a number behind it.

        Raises ValueError where a map gives one of them a name that another parameter has.
        """
        owners = self._owners.get(number, {})
        names = {param: name for loose in self._loose.values() for param, name in loose.items()}
        self._owners[number] = {}
        self._loose[number] = {param: names[param] for param in params if param in names}
        for param, label in zip(params, labels, strict=True):
            owner = owners.get(param) or self._found(number, param, label)
            self._owners[number][param] = owner
        return [self._owners[number][param] for param in params]

    def forget(self, number: int) -> None:
        """Looks up what the parameters of an optimizer are anew, when it asks next."""
        self._owners.pop(number, None)

    def came_anew(self, owners: Mapping[torch.Tensor, ParameterRole]) -> list[str]:
        """Returns the names whose last parameter was another one, and notes these as the last."""
        last = {o.placement.name: self._last.get(o.placement.name) for o in owners.values()}
        pairs = [(param, owner.placement.name) for param, owner in owners.items()]
        self._last.update((name, weakref.ref(param)) for param, name in pairs)
        return [n for param, n in pairs if (ref := last[n]) is not None and ref() is not param]

    def _found(self, number: int, param: torch.Tensor, label: str) -> ParameterRole:
        if param in self.names:
            return ParameterRole(self.known(param), "weight")
        shard = megatron.shard_of(param, self.names)
        if shard is None:
            # no model knows it: a name of its own, which it keeps
            loose = self._loose[number]
            if loose.get(param) is None:
                names = itertools.chain(*map(dict.values, self._loose.values()))
                taken, choice = {*self.names.values(), *names}, self._map.get(label, label)
                labels = [key for key, name in self._map.items() if name == choice and key != label]
                is_used = choice in self.names.values() or (labels and choice in taken)
                if choice != label and is_used:
                    refuse_one_name(choice, [label, "another parameter"])
                numbered = (f"{label}.{i}" for i in itertools.count(1))
                choices = itertools.chain([choice], numbered)
                loose[param] = next(name for name in choices if name not in taken)
            return ParameterRole(Known(loose[param], *of_tensor(param)), "weight")
        # a part of a model's parameter: its shard, or its master
        placement = self.known(shard.weight)
        if placement.pieces is not None:
            placement = placement._replace(pieces=cut(placement.pieces, shard.begin, shard.end))
        if not shard.is_master:
            return ParameterRole(placement, "weight")
        return ParameterRole(placement, "master", shard.weight)

    def known(self, param: torch.Tensor) -> Known:
        """Returns a model's parameter's name, whole shape and pieces."""
        name = self.names[param]
        part = megatron.part_of(param, name, self._vocabulary)
        return Known(name, *(part or of_tensor(param)))


def _apart(name: str, number: int, taken: set[str]) -> str:
    """A name with the model's number before it where it is taken."""
    while name in taken:
        name = f"model{number}.{name}"
    return name


def refuse_one_name(name: str, whose: Sequence[str]) -> None:
    """Raises ValueError for a map that gives several tensors one name."""
    text = " and ".join(whose)
    raise ValueError(f"names must leave each tensor a name of its own, got {name!r} for {text}")


def of_state(param: torch.Tensor, placement: Known, tensor: torch.Tensor) -> Known:
    """Returns the name, whole shape and pieces of a tensor of a parameter's state."""
    if local_of(tensor) is not tensor:
        return Known(placement.name, *of_tensor(tensor))
    if tensor.numel() == local_of(param).numel():
        return placement
    shape = tuple(tensor.shape)
    together = placement.pieces == whole(placement.shape)
    return Known(placement.name, shape, whole(shape) if together else None)
