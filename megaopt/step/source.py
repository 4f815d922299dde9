"""Where the tensors of a batch come from: parameters, their gradients and their states."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy
import torch

from megaopt.kernels.chunks.batch import Buffers, Formats
from megaopt.params.dtensor import dtensor_class, local_of, same_sharding, waited
from megaopt.params.view import PLAIN
from megaopt.state.tensors import MASTER, state_name
from megaopt.state.watch import Grads, Guards, fit


@dataclass
class Source:
    """Parameters of one device and one combination of formats.

    DTensors have no memory of their own, and looking at their attributes is slow: where some are,
    the source looks at the shards itself, once a step, instead of the watch.
    """

    formats: Formats
    positions: list[int]
    """Places among all the optimizer's parameters."""
    params: list[torch.Tensor]
    states: list[dict[str, Any]]
    sharded: bool
    """Some parameters are DTensors."""
    staged: bool
    """Some tensors are not contiguous."""
    _shards: Buffers = field(default_factory=dict)
    """The shards that `fits` saw."""
    _guards: Guards | None = None
    _addresses: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.names = {slot: state_name(slot) for slot in self.formats.state_slots}

    def buffers(self, grads: Grads) -> Buffers:
        """The tensors in use now, by slot; of DTensors the shards that `fits` saw."""
        if self.sharded:
            seen, self._shards = self._shards, {}
            return seen
        own: Buffers = {
            "grad": [grads[position] for position in self.positions],  # type: ignore[misc]
            "weight": self.params,
        }
        for slot, name in self.names.items():
            own[slot] = [state[name] for state in self.states]
        return own

    def tensors(self, slot: str) -> list[torch.Tensor]:
        """Where a slot's results go: weights, or tensors of the states; of DTensors the shards."""
        name = self.names.get(slot)
        own = self.params if name is None else [state[name] for state in self.states]
        return list(map(local_of, own)) if self.sharded else own

    # --- what must be as it was

    def guards(self, rows: Sequence[numpy.ndarray] = ()) -> Guards:
        """The facts of the tensors as they are now, when the batch is made.

        rows: int64, one for each slot, for the watch to note addresses in.
        """
        slots = self.formats.slots
        device = self.params[0].device
        own = [self.tensors(slot) for slot in self.formats.state_slots]
        shapes = [local_of(param).shape for param in self.params]
        return Guards(
            positions=self.positions,
            names=list(self.names.values()),
            dtypes=[self.formats.dtype(slot) for slot in slots],
            scales=[None, None, *map(self._own_shapes, self.formats.state_slots)],
            shapes=shapes,
            devices=[device, device, *(tensors[0].device for tensors in own)],
            contiguous=not self.staged,
            addresses=list(rows),
        )

    def _own_shapes(self, slot: str) -> list[torch.Size] | None:
        """Those of scales, packed codes and moments of matrix rules; None: the parameters' own."""
        reshaped = self.formats.matrix is not None and state_name(slot) != MASTER
        if reshaped or self.formats.is_reshaped(slot):
            return [each.shape for each in self.tensors(slot)]
        return None

    def fits(self, grads: Grads) -> bool:
        """Whether shards, gradients and states of DTensors are what the batch was made for."""
        kind, whole = dtensor_class(), self._whole(grads)
        dtensors = [isinstance(param, kind) for param in self.params]
        if any([isinstance(t, kind) for t in tensors] != dtensors for tensors in whole.values()):
            return False
        if not all(map(same_sharding, whole["grad"], self.params)):
            return False
        self._shards = {
            slot: [
                tensor._local_tensor if wrapped else tensor
                for tensor, wrapped in zip(tensors, dtensors, strict=True)
            ]
            for slot, tensors in whole.items()
        }
        if not self._have_memory(dtensors):
            return False
        if self._guards is None:  # the first look: everything was just checked
            self._guards = replace(self.guards(), names=[])
        return fit(self._guards, list(self._shards.values()))

    def _whole(self, grads: Grads) -> dict[str, list[Any]]:
        states = {slot: [state.get(n) for state in self.states] for slot, n in self.names.items()}
        return {
            "grad": [grads[position] for position in self.positions],
            "weight": self.params,
            **states,
        }

    def _have_memory(self, dtensors: list[bool]) -> bool:
        """Whether all shards are plain tensors; those that are being made are waited for."""
        for slot, tensors in self._shards.items():
            if not set(map(type, tensors)) <= PLAIN:
                tensors = self._shards[slot] = list(map(waited, tensors))
                shards = itertools.compress(tensors, dtensors)
                if not set(map(type, shards)) <= PLAIN:
                    return False
        return True

    def elsewhere(self) -> bool:
        """Whether a weight that `fits` saw lies elsewhere than at the last look."""
        before, self._addresses = self._addresses, [t.data_ptr() for t in self._shards["weight"]]
        return before != self._addresses
