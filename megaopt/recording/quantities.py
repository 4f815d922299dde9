"""The tensors of an optimizer, by parameter and quantity, whatever class it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from megaopt.params.dtensor import local_of
from megaopt.recording.places import Known, Parameters

RENAMED = {"master_param": "master"}
"""What libraries call quantities, where the recording calls them something else."""
PLAIN = (torch.Tensor, torch.nn.Parameter)


class Held(NamedTuple):
    """A tensor of this rank, and what it is."""

    known: Known
    quantity: str
    tensor: torch.Tensor
    """In the rank's own memory."""


def flattened(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in a value: those of lists and dicts, and the inner ones of subclasses."""
    if isinstance(value, torch.Tensor):
        local = local_of(value)
        if type(local) in PLAIN or not hasattr(local, "__tensor_flatten__"):
            yield name, local
            return
        for inner in local.__tensor_flatten__()[0]:
            yield from flattened(f"{name}.{inner}", getattr(local, inner))
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from flattened(f"{name}.{key}", each)
    elif isinstance(value, (list, tuple)):
        for i, each in enumerate(value):
            yield from flattened(f"{name}.{i}", each)


class Source:
    """An optimizer whose steps are recorded."""

    def __init__(self, optimizer: torch.optim.Optimizer, number: int, known: Parameters) -> None:
        self.optimizer, self.number, self._parameters = optimizer, number, known
        self.step = 0

    def params(self) -> Iterator[tuple[torch.Tensor, Known]]:
        """The parameters in the groups' order, and what is known of each."""
        for i, group in enumerate(self.optimizer.param_groups):
            for j, param in enumerate(group["params"]):
                yield param, self._parameters.known(param, f"param_groups.{i}.{j}")

    def names(self) -> list[list[str]]:
        """The parameters' names, group by group."""
        found = iter(self.params())
        return [[next(found)[1].name for _ in group["params"]] for group in self.groups]

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The optimizer's own."""
        groups: list[dict[str, Any]] = self.optimizer.param_groups
        return groups

    def gradients(self) -> list[Held]:
        """The gradients that the optimizer reads; of sparse ones a dense copy."""
        name = "decoupled_grad" if getattr(self.optimizer, "use_decoupled_grad", False) else "grad"
        found = ((param, known, getattr(param, name, None)) for param, known in self.params())
        return [
            Held(known, "grad", local_of(grad.to_dense() if grad.is_sparse else grad))
            for _, known, grad in found
            if grad is not None
        ]

    def weights(self) -> list[Held]:
        """The parameters, and the tensors of their state, without counts on the host."""
        return [held for param, known in self.params() for held in self._of(param, known)]

    def _of(self, param: torch.Tensor, known: Known) -> Iterator[Held]:
        for name, tensor in flattened("weight", param.detach()):
            yield Held(known, name, tensor)
        for key, value in self.optimizer.state.get(param, {}).items():
            for name, tensor in flattened(RENAMED.get(key, str(key)), value):
                if tensor.dim() or tensor.device.type != "cpu":
                    yield Held(self._parameters.of_state(param, known, tensor), name, tensor)


def count_of(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> int | None:
    """The number of the last update of a group, as the optimizer counts, where the host has it."""
    counts = [group.get("step")]
    counts += [optimizer.state.get(param, {}).get("step") for param in group["params"]]
    for count in counts:
        if isinstance(count, torch.Tensor) and count.device.type == "cpu":
            return int(count)
        if isinstance(count, int):
            return count
    return None
