"""Ranks that hold copies of plain parameters, and divide the making of updates among them."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from megaopt.kernels.refusals import refuse

REPLICAS = "replicas"
"""The argument, and the key of a group that says something else than the optimizer."""
ALLOWED = (
    "None, or a torch.distributed.ProcessGroup or DeviceMesh that this rank is in and whose ranks "
    "all hold the same parameters and gradients"
)


@dataclass(eq=False)
class Replicas:
    """The ranks that hold copies of an optimizer's parameters."""

    default: Any = None
    """A ProcessGroup or DeviceMesh (`checked_replicas`), of parameters whose group says nothing;
    None: no others are known."""
    groups: dict[torch.Tensor, Any] = field(default_factory=dict)
    """The ranks of parameters that have others than `default`."""
    _meshes: dict[Any, Any] = field(default_factory=dict)

    def __deepcopy__(self, memo: dict[int, Any]) -> Replicas:
        """Copies the parameters; the ranks stay the same, and meet as before."""
        duplicate = Replicas(self.default)
        pairs = self.groups.items()
        duplicate.groups = {copy.deepcopy(param, memo): ranks for param, ranks in pairs}
        return duplicate

    def __reduce__(self) -> Any:
        """Pickles replicas without ranks, as a process group belongs to its process."""
        return Replicas, ()

    def of(self, param: torch.Tensor) -> Any:
        """A mesh of the ranks that hold copies of a parameter; None where nobody else does."""
        ranks = self.groups.get(param, self.default)
        if ranks is None or ranks.size() == 1:
            return None
        if isinstance(ranks, DeviceMesh):
            return ranks
        # a mesh of one dimension is made once for each group and kind of device
        key = ranks, param.device.type
        if key not in self._meshes:
            self._meshes[key] = DeviceMesh.from_group(*key)
        return self._meshes[key]


def checked_replicas(ranks: Any, where: str = REPLICAS) -> Any:
    """The ranks, or None; ValueError for anything else."""
    if ranks is None:
        return None
    is_mesh = isinstance(ranks, DeviceMesh)
    is_group = isinstance(ranks, getattr(dist, "ProcessGroup", ()))  # not in every torch
    if not (is_group or (is_mesh and ranks.get_coordinate() is not None)):
        refuse(where, ALLOWED, ranks)
    return ranks
