"""The source of a batch's tensors: parameters, their gradients and their states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch

from megaopt.kernels.chunks.batch import Buffers, Formats
from megaopt.params.dtensor import local_of
from megaopt.state.tensors import MASTER, state_name
from megaopt.state.watch import Grads, Guards, Shards


@dataclass
class FormatGroup:
    """Parameters of one device and one combination of formats."""

    formats: Formats
    positions: list[int]
    """Places among all the optimizer's parameters."""
    params: list[torch.Tensor]
    states: list[dict[str, Any]]
    sharded: bool
    """Some parameters are DTensors: their shards are stepped."""
    staged: bool
    """Some tensors are not contiguous."""

    def __post_init__(self) -> None:
        self.names = {slot: state_name(slot) for slot in self.formats.state_slots}

    def buffers(self, grads: Grads, shards: Shards | None) -> Buffers:
        """The tensors in use now, by slot; shards: what the watch saw of DTensors."""
        # the watch has taken them out of DTensors already
        if shards is not None:
            return dict(zip(("grad", "weight", *self.names), shards, strict=True))
        # plain tensors, looked up anew, as states may be edited between steps
        buffers: Buffers = {
            "grad": [grads[position] for position in self.positions],  # type: ignore[misc]
            "weight": self.params,
        }
        for slot, name in self.names.items():
            buffers[slot] = [state[name] for state in self.states]
        return buffers

    def tensors(self, slot: str) -> list[torch.Tensor]:
        """Returns the tensors of a slot's results, weights or states; of DTensors the shards."""
        name = self.names.get(slot)
        tensors = self.params if name is None else [state[name] for state in self.states]
        return list(map(local_of, tensors)) if self.sharded else tensors

    # --- what must be as it was

    def guards(self, rows: Sequence[numpy.ndarray] = ()) -> Guards:
        """The facts of the tensors as they are now, when the batch is made.

        rows: int64, one for each slot, for the watch to note addresses in.
        """
        # in the order of slots: gradients, weights, then what states have
        slots = self.formats.slots
        device = self.params[0].device
        state_tensors = [self.tensors(slot) for slot in self.formats.state_slots]
        shapes = [local_of(param).shape for param in self.params]
        return Guards(
            positions=self.positions,
            names=list(self.names.values()),
            dtypes=[self.formats.dtype(slot) for slot in slots],
            scales=[None, None, *map(self._own_shapes, self.formats.state_slots)],
            shapes=shapes,
            devices=[device, device, *(tensors[0].device for tensors in state_tensors)],
            contiguous=not self.staged,
            addresses=list(rows),
            sharded=self.sharded,
        )

    def _own_shapes(self, slot: str) -> list[torch.Size] | None:
        """Returns shapes of scales, packed codes and matrix moments; None: the parameters'."""
        reshaped = self.formats.matrix is not None and state_name(slot) != MASTER
        if reshaped or self.formats.is_reshaped(slot):
            return [tensor.shape for tensor in self.tensors(slot)]
        return None
