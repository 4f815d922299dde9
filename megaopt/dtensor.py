"""DTensor parameters: each rank steps its own shard; what is split over ranks and how.

torch.distributed.tensor is never imported here: before somebody else has, there is no DTensor.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from megaopt.batches import Batch, state_name
from megaopt.kernels.step.batch import Buffers
from megaopt.kernels.step.watch import Grads, Wanted, fit
from megaopt.options import Options

Split = tuple[Any, tuple[int, ...]]
"""Over which dimensions of which device mesh a tensor is split."""
PLAIN = {torch.Tensor, torch.nn.Parameter}
"""What a shard may be: other classes of tensors may have no memory of their own."""


def dtensor_class() -> Any:
    """What isinstance is asked for."""
    return getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())


def is_dtensor(value: object) -> bool:
    """Whether it is a torch.distributed.tensor.DTensor."""
    return isinstance(value, dtensor_class())


def local_of(value: Any) -> Any:
    """The shard of this rank, in its own memory; anything but a DTensor as it is."""
    return waited(value._local_tensor) if is_dtensor(value) else value


def waited(local: Any) -> Any:
    """A shard that a collective may still be making, once it is there."""
    functional = sys.modules.get("torch.distributed._functional_collectives")
    kind = getattr(functional, "AsyncCollectiveTensor", ())
    return local.wait() if isinstance(local, kind) else local


def locals_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter's state with each tensor's own shard."""
    return {name: local_of(value) for name, value in state.items()}


def sharded_as(param: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """A shard as the DTensor whose mesh and placements are the parameter's; plain for a plain one.

    The memory is the shard's. The class is called as FSDP2 calls it: DTensor.from_local moves what
    it gets to the mesh's kind of device, and shards that FSDP2 offloads lie on the CPU.
    """
    if not is_dtensor(param):
        return local
    own: Any = param
    meta = own._spec.tensor_meta._replace(dtype=local.dtype)
    spec = replace(own._spec, tensor_meta=meta)
    made: torch.Tensor = dtensor_class()(local.detach(), spec, requires_grad=False)
    return made


def sharded_state(
    param: torch.Tensor, state: Mapping[str, Any], known: Sequence[Any] = ()
) -> dict[str, Any]:
    """A parameter's state of shards as one of DTensors; those whose shards are known stay objects.

    Args:
        param: whose state it is.
        state: what `locals_of` gave, with what was added to it.
        known: DTensors whose shards may be in the state.
    """
    if not is_dtensor(param):
        return dict(state)
    objects = {id(local_of(value)): value for value in known if isinstance(value, torch.Tensor)}
    made = {}
    for name, value in state.items():
        is_tensor = isinstance(value, torch.Tensor)
        made[name] = objects.get(id(value), value)
        if is_tensor and not is_dtensor(made[name]):
            made[name] = sharded_as(param, value)
    return made


def same_sharding(value: Any, param: Any) -> bool:
    """Whether two tensors are split alike: plain both, or DTensors of one mesh and placements."""
    found, wanted = getattr(value, "_spec", None), getattr(param, "_spec", None)
    if found is wanted:  # of plain tensors none; FSDP2 gives every gradient its parameter's
        return True
    if found is None or wanted is None:
        return False
    names = ("placements", "mesh", "shard_order")  # not every torch has the last
    return all(getattr(found, n, None) == getattr(wanted, n, None) for n in names)


def check_sharding(value: Any, param: Any, where: str) -> None:
    """Raises ValueError for a tensor that is not split over ranks as the parameter is.

    Also for a DTensor whose shard is a subclass: it may have no memory of its own.
    """
    if not isinstance(value, torch.Tensor):
        return
    if not same_sharding(value, param):
        raise ValueError(
            f"{where}: {_sharding(value)} is not allowed: {_sharding(param)}{_hint(param)}"
        )
    local = local_of(value)
    if is_dtensor(value) and type(local) not in PLAIN:
        raise ValueError(
            f"{where}: the shard of a DTensor must be a plain torch.Tensor, got "
            f"{type(local).__name__}"
        )


def _sharding(value: Any) -> str:
    if not is_dtensor(value):
        return f"a plain tensor of shape {tuple(value.shape)}"
    return f"a DTensor of placements {tuple(value.placements)} on {value.device_mesh}"


def _hint(param: Any) -> str:
    if not is_dtensor(param):
        return ""
    return (
        ", the parameter's; redistribute(placements=...) changes a DTensor's, and "
        "distribute_tensor(..., param.device_mesh, param.placements) splits a whole tensor"
    )


def check_dtensor(
    param: Any, where: str, options: Options, moments: tuple[str, ...], masters: bool
) -> None:
    """Raises ValueError for a DTensor parameter that cannot be stepped shard by shard."""
    local = param._local_tensor
    if type(local) not in PLAIN:
        raise ValueError(
            f"{where}: a DTensor of {type(local).__name__} is not allowed: of a plain torch.Tensor"
        )
    if any(placement.is_partial() for placement in param.placements):
        raise ValueError(
            f"{where}: placements {tuple(param.placements)} are not allowed: Shard and Replicate; "
            "a Partial is the weight only when the ranks' are added up"
        )
    formats = {
        **{f"{name}_dtype": options.moment_format(name) for name in moments},
        "master_weight_dtype": options.master_format(param.dtype, masters),
    }
    for name, form in formats.items():
        if form.scaled:
            raise ValueError(
                f"{where}: {name}={getattr(options, name)} is not allowed for a DTensor: each "
                "rank's shard would have a scale of its own, and neither bits nor checkpoints "
                "would be independent of the number of ranks; torch.float32"
                + (" or torch.bfloat16" if name != "master_weight_dtype" else "")
            )


def split_of(param: Any) -> Split | None:
    """What the parameter is split over; None for a plain or fully replicated one."""
    if not is_dtensor(param):
        return None
    dims = tuple(i for i, p in enumerate(param.placements) if not p.is_replicate())
    return (param.device_mesh, dims) if dims else None


@dataclass
class ShardedBatch(Batch):
    """Parameters of which some are DTensors: it steps the shards of this rank.

    DTensors have no memory of their own, and looking at their attributes is slow: this batch looks
    at the shards itself, once a step, instead of the watch.
    """

    _seen: Buffers = field(default_factory=dict)
    _wanted: Wanted | None = None

    watched = False

    @property
    def addresses(self) -> list[Any]:
        """None: `enter` hands over the shards."""
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
        if self._wanted is None:  # the first look: everything was just checked
            shapes = [local.shape for local in self._seen["weight"]]
            wanted = replace(super().wanted(), shapes=shapes, scales=[False] * len(whole))
            self._wanted = replace(wanted, names=[])
        return fit(self._wanted, list(self._seen.values()))

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
