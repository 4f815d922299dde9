"""Where the tensors of a batch come from: parameters, their gradients and their states."""

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
class Source:
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
        if shards is not None:
            return dict(zip(("grad", "weight", *self.names), shards, strict=True))
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
            sharded=self.sharded,
        )

    def _own_shapes(self, slot: str) -> list[torch.Size] | None:
        """Those of scales, packed codes and moments of matrix rules; None: the parameters' own."""
        reshaped = self.formats.matrix is not None and state_name(slot) != MASTER
        if reshaped or self.formats.is_reshaped(slot):
            return [each.shape for each in self.tensors(slot)]
        return None
