"""Notes what tensors were at the last look: they move, and may become others, from step to step."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy
import torch

from megaopt.kernels.native import same_objects
from megaopt.kernels.shards import PLAIN, dtensor_class, waited
from megaopt.params.dtensor import same_sharding

KIND = operator.attrgetter("dtype", "device", "layout")
GRAD, WEIGHT = 0, 1
"""Their places among a batch's tensors; weights may be wrappers of fp8 codes."""

Grads = Sequence[torch.Tensor | None]
"""The gradient of each parameter, None where it has none."""


@dataclass(frozen=True)
class Guards:
    """Facts of a batch's tensors that must still hold: guards, as torch.compile has them.

    Something else needs another kernel, other tables, or an error message.
    """

    positions: list[int]
    """Places of the batch's parameters among all."""
    names: list[str]
    """The names of the tensors of a parameter's state that take part."""
    dtypes: list[torch.dtype]
    """The dtypes of the gradients, of the weights, and of each of the state's tensors."""
    scales: list[list[torch.Size] | None]
    """The shapes of scales or packed codes, by dtype and parameter; None: a tensor has its
    parameter's shape."""
    shapes: list[torch.Size]
    """The shape of each parameter."""
    devices: list[torch.device]
    """One for each dtype: states may be in host memory."""
    contiguous: bool
    """Whether all have to be contiguous."""
    addresses: list[numpy.ndarray]
    """int64 rows, one for each dtype, to note addresses in; empty where nobody reads them."""
    sharded: bool = False
    """Some parameters are DTensors: of these, their gradients and states shards are looked at."""


Shards = list[list[torch.Tensor]]
"""The tensors that are stepped, by dtype of a batch's guards: of DTensors their shards."""


class Seen(NamedTuple):
    """The findings of a look where everything fits."""

    moved: list[bool]
    """Whether an address of each batch is not the one of the last look."""
    elsewhere: bool
    """Whether the address of a weight is another."""
    written: list[int]
    """The places of the counted tensors whose version is not the one that was noted."""
    grads: Callable[[], Grads]
    """Gives the gradients, which most steps need no Python objects for. To hold until they have
    been read: a property may have made them for this step alone."""
    shards: Sequence[Shards | None]
    """The shards of each batch with DTensors, None for others; to hold as long."""


@dataclass
class Watch:
    """Looks at all tensors of an optimizer, step after step; remembers nothing but addresses.

    Everything is looked at each time: `param.data = ...` gives a parameter another layout, or
    another dtype, at the same address, and groups and states are anyone's to edit.
    """

    params: tuple[torch.Tensor, ...]
    sizes: list[int]
    """The number of parameters of each group."""
    states: tuple[Mapping[str, Any] | None, ...]
    """The state of each parameter, None for those that had no gradient."""
    keys: tuple[object, ...]
    """The keys of the optimizer's whole state, in its order."""
    values: tuple[object, ...]
    batches: list[Guards]
    find: Callable[[], Any]
    """Gives the extension once it is there; None until then, while the twin in Python serves."""
    awaits: bool = True
    """Whether somebody builds the extension: each step asks for it until it is there."""
    counted: list[torch.Tensor] = field(default_factory=list)
    """Tensors whose version counters are compared."""
    noted: numpy.ndarray = field(default_factory=lambda: numpy.zeros(0, dtype=numpy.int64))
    """Their versions, int64."""

    module: Any = None
    """The extension."""
    _asks: bool = True
    """Whether the next look asks for the extension."""
    _guards: list[Any] = field(default_factory=list)
    """The batches' guards as the extension has them, and what it calls for DTensors."""
    _sharding: tuple[Any, ...] = ()

    def look(
        self, param_groups: Sequence[Mapping[str, Any]], state: Mapping[Any, Any], decoupled: bool
    ) -> Seen | None:
        """Notes where the tensors of this step lie.

        Args:
            param_groups: the optimizer's, as they are now.
            state: the optimizer's, as it is now.
            decoupled: whether gradients are in decoupled_grad.

        Returns:
            None if anything is not what it was but for its address. Then the batches have to be
            made anew: some addresses are noted, others are not.
        """
        # goes over to the extension, which notes what its twin does, once it is there: it may have
        # been built since the last step
        if self._asks:
            # it reads past what a subclass of dict may do
            is_plain = all(type(state) in (dict, type(None)) for state in self.states)
            self.module = self.find() if is_plain else None
            self._asks = self.awaits and is_plain and self.module is None
            if self.module is not None:
                fields = [vars(guards).values() for guards in self.batches]
                self._guards = [self.module.Guards(*values) for values in fields]
                if any(guards.sharded for guards in self.batches):
                    self._sharding = dtensor_class(), same_sharding, waited
        try:  # contextlib.suppress takes half a microsecond
            # what a subclass of torch.Tensor has to say of its shape takes it 3 microseconds
            with torch._C.DisableTorchFunctionSubclass():
                if self.module is None:
                    return self._look(param_groups, state, decoupled)
                # what was there when the batches were made, and what is there now
                was = (self.params, self.sizes, self.states, self.keys, self.values)
                now = (param_groups, state, decoupled, self.counted, self.noted)
                facts = self.module.look(self._guards, *was, *now, self._sharding)
        except (RuntimeError, TypeError, KeyError):
            return None  # a nested tensor has no shape, a group no list of parameters
        if facts is None:
            return None
        # None for gradients: they are in .grad, and may be fetched from there
        moved, elsewhere, written, grads, shards = facts
        fetch = partial(grads_of, self.params, False) if grads is None else lambda: grads
        return Seen(moved, elsewhere, written, fetch, shards)

    def count_up(self) -> None:
        """Counts all versions up after a step, which kernels do not, and notes them."""
        if self.module is not None:
            self.module.count_versions_up(self.counted, self.noted)
            return
        with torch._C.DisableTorchFunctionSubclass():
            torch.autograd.graph.increment_version(self.counted)
            self.noted[:] = [tensor._version for tensor in self.counted]

    def _look(
        self, param_groups: Sequence[Mapping[str, Any]], state: Mapping[Any, Any], decoupled: bool
    ) -> Seen | None:
        """The extension's twin."""
        # groups, parameters and states must be the very objects
        if [len(group["params"]) for group in param_groups] != self.sizes or not (
            same_objects([p for group in param_groups for p in group["params"]], self.params)
            and same_objects(state.keys(), self.keys)
            and same_objects(state.values(), self.values)
        ):
            return None
        grads = grads_of(self.params, decoupled)
        # other parameters have gradients now: other batches
        if [grad is None for grad in grads] != [state is None for state in self.states]:
            return None
        # all batches are checked before any address is noted
        moved, elsewhere = [], False
        batch_slots, shards = [], []
        for guards in self.batches:
            # one list of tensors a slot: gradients, weights, then the state's by name
            states: list[Any] = [self.states[place] for place in guards.positions]
            slots: list[list[Any]]
            slots = [[of[place] for place in guards.positions] for of in (grads, self.params)]
            slots += [[state.get(name) for state in states] for name in guards.names]
            shards.append(shards_of(slots) if guards.sharded else None)
            if guards.sharded:
                if shards[-1] is None:
                    return None
                slots = shards[-1]
            if not fit(guards, slots):
                return None
            batch_slots.append(slots)
        # addresses go straight into the rows of the plans' tables
        for guards, slots in zip(self.batches, batch_slots, strict=True):
            has_moved = False
            for slot, (row, tensors) in enumerate(zip(guards.addresses, slots, strict=False)):
                now = list(map(torch.Tensor.data_ptr, tensors))
                if now != row.tolist():
                    row[:], has_moved = now, True
                    elsewhere |= slot == WEIGHT
            moved.append(has_moved)
        # counters that somebody else's writes have raised
        noted = enumerate(zip(self.counted, self.noted.tolist(), strict=True))
        written = [place for place, (tensor, version) in noted if tensor._version != version]
        return Seen(moved, elsewhere, written, lambda: grads, shards)


def shards_of(slots: Sequence[list[Any]]) -> Shards | None:
    """The shards of DTensors, once they are there, and plain tensors as they are.

    slots: as of a batch's guards; None where a gradient or state is not split as its parameter is,
    or a shard is no plain tensor.
    """
    # which parameters are DTensors: the same places must be so in all slots
    kind = dtensor_class()
    wrapped = [isinstance(param, kind) for param in slots[WEIGHT]]
    if any([isinstance(tensor, kind) for tensor in tensors] != wrapped for tensors in slots):
        return None
    if not all(map(same_sharding, slots[GRAD], slots[WEIGHT])):
        return None
    shard_slots = []
    for tensors in slots:
        # the shards; a collective may still write one
        pairs = zip(tensors, wrapped, strict=True)
        shards = [tensor._local_tensor if is_wrapped else tensor for tensor, is_wrapped in pairs]
        if not {*map(type, shards)} <= PLAIN:  # some are being made
            shards = [*map(waited, shards)]
            if not {*map(type, itertools.compress(shards, wrapped))} <= PLAIN:
                return None
        shard_slots.append(shards)
    return shard_slots


def fit(guards: Guards, slots: Sequence[list[Any]]) -> bool:
    """Checks that all tensors of a batch are as its guards say."""
    # slot by slot: classes, then shapes, then dtype, device and layout in C
    columns = zip(slots, guards.dtypes, guards.scales, guards.devices, strict=True)
    for slot, (tensors, dtype, scales, device) in enumerate(columns):
        # classes, of which there are one or two; wrappers are allowed for weights alone
        for kind in {*map(type, tensors)}:
            if kind is torch.Tensor or kind is torch.nn.Parameter:
                continue
            if not issubclass(kind, torch.Tensor) or not (slot == WEIGHT or is_plain_class(kind)):
                return False
        # the elements are not what the memory says: negation is pending, or all are 0
        if slot == GRAD and any(grad.is_neg() or grad._is_zerotensor() for grad in tensors):
            return False
        shapes = guards.shapes if scales is None else scales
        if [tensor.shape for tensor in tensors] != shapes:
            return False
        if any(map((dtype, device, torch.strided).__ne__, map(KIND, tensors))):
            return False
        if guards.contiguous and not all(map(torch.Tensor.is_contiguous, tensors)):
            return False
    return True


def is_plain_class(kind: type) -> bool:
    """Whether tensors of this class have memory of their own; wrappers have not."""
    tensor_class: Any = kind
    return tensor_class.__torch_dispatch__ is torch.Tensor.__torch_dispatch__


def grads_of(params: Iterable[torch.Tensor], decoupled: bool) -> list[torch.Tensor | None]:
    """Returns each parameter's gradient, from .decoupled_grad or .grad."""
    if decoupled:
        return [getattr(param, "decoupled_grad", None) for param in params]
    return [param.grad for param in params]
