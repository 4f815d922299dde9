"""The batch of parameters of which some are DTensors."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from megaopt.kernels.step.batch import Buffers
from megaopt.params.dtensor import dtensor_class, local_of, same_sharding, waited
from megaopt.params.view import PLAIN
from megaopt.state.tensors import state_name
from megaopt.state.watch import Grads, Guards, fit
from megaopt.step.batches import Batch


@dataclass
class ShardedBatch(Batch):
    """Parameters of which some are DTensors: it steps the shards of this rank.

    DTensors have no memory of their own, and looking at their attributes is slow: this batch looks
    at the shards itself, once a step, instead of the watch.
    """

    _seen: Buffers = field(default_factory=dict)
    _guards: Guards | None = None

    watched = False

    @property
    def addresses(self) -> list[Any]:
        """Empty: before each step `stage_inputs` gives the plan the shards themselves."""
        return []

    def fits(self, grads: Grads) -> bool:
        """Whether shards, gradients and states are still what the batch was made for."""
        kind, whole = dtensor_class(), self._whole(grads)
        dtensors = [isinstance(param, kind) for param in self.params]
        if any([isinstance(t, kind) for t in tensors] != dtensors for tensors in whole.values()):
            return False
        if not all(map(same_sharding, whole["grad"], self.params)):
            return False
        self._seen = {
            slot: [
                tensor._local_tensor if wrapped else tensor
                for tensor, wrapped in zip(tensors, dtensors, strict=True)
            ]
            for slot, tensors in whole.items()
        }
        if not self._have_memory(dtensors):
            return False
        if self._guards is None:  # the first look: everything was just checked
            shapes = [local.shape for local in self._seen["weight"]]
            guards = replace(super().guards(), shapes=shapes)
            self._guards = replace(guards, names=[])
        return fit(self._guards, list(self._seen.values()))

    def _have_memory(self, dtensors: list[bool]) -> bool:
        """Whether all shards are plain tensors; those that are being made are waited for."""
        for slot, tensors in self._seen.items():
            if not set(map(type, tensors)) <= PLAIN:
                tensors = self._seen[slot] = list(map(waited, tensors))
                shards = itertools.compress(tensors, dtensors)
                if not set(map(type, shards)) <= PLAIN:
                    return False
        return True

    def buffers(self, grads: Grads) -> Buffers:
        """The shards that `fits` saw."""
        seen, self._seen = self._seen, {}
        return seen

    def _weights(self) -> list[torch.Tensor]:
        """The shards that `fits` saw."""
        return self._seen["weight"]

    def _whole(self, grads: Grads) -> dict[str, list[Any]]:
        names = {slot: state_name(slot) for slot in self.formats.state_slots}
        states = {slot: [state.get(n) for state in self.states] for slot, n in names.items()}
        return {
            "grad": [grads[position] for position in self.positions],
            "weight": self.params,
            **states,
        }

    def _tensors(self, slot: str) -> list[torch.Tensor]:
        return list(map(local_of, super()._tensors(slot)))
