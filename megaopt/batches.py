"""The tensors that a step works on: checked, completed, sorted by format, kept while they fit."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from megaopt.kernels.backends import Plan
from megaopt.kernels.formats import GRADS, names
from megaopt.kernels.step.batch import Buffers, Formats
from megaopt.kernels.step.watch import CHANGED

MASTER = "master_param"
SCALE = "_scale"


def state_name(slot: str, moments: tuple[str, str]) -> str:
    """Under which name a parameter's state holds the tensor of a slot."""
    kind = slot.removesuffix(SCALE)
    name = {"master": MASTER, "first": moments[0], "second": moments[1]}[kind]
    return name + SCALE if slot.endswith(SCALE) else name


@dataclass
class Batch:
    """The parameters of one device and one combination of formats."""

    formats: Formats
    plan: Plan
    moments: tuple[str, str]
    positions: list[int]
    """Places among all the optimizer's parameters."""
    params: list[torch.Tensor]
    states: list[dict[str, Any]]
    staged: bool
    """Some tensors are not contiguous: the step works on copies and copies the results back."""
    _copies: Buffers = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        """Of all its tensors."""
        return self.params[0].device

    def enter(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Before a step: staged tensors are copied, and the plan works on the copies."""
        if self.staged:
            own = self.buffers(grads)
            self._copies = {slot: [t.contiguous() for t in ts] for slot, ts in own.items()}
            self.plan.look(self._copies)

    def leave(self) -> None:
        """After a step: the results are copied back to staged tensors."""
        copies, self._copies = self._copies, {}
        for slot in copies.keys() - {"grad"}:
            own = self.params if slot == "weight" else self._own_states(slot)
            for tensor, copy in zip(own, copies[slot], strict=True):
                if copy is not tensor:
                    tensor.copy_(copy)

    def abandon(self) -> None:
        """In place of `leave`, where nothing was stepped."""
        self._copies = {}

    def _own_states(self, slot: str) -> list[torch.Tensor]:
        return [state[state_name(slot, self.moments)] for state in self.states]

    def buffers(self, grads: Sequence[torch.Tensor | None]) -> Buffers:
        """The tensors in use now, by slot."""
        own: Buffers = {
            "grad": [grads[position] for position in self.positions],  # type: ignore[misc]
            "weight": self.params,
        }
        for slot in self.formats.slots[2:]:
            own[slot] = self._own_states(slot)
        return own

    def fits(self, grads: Sequence[torch.Tensor | None]) -> bool:
        """Whether the tensors are still what the batch was made for; notes their addresses."""
        try:
            own = self.buffers(grads)
        except KeyError:
            return False
        if self.staged:
            return self._alike(own)
        return self.plan.look(own) != CHANGED or self._alike(own)

    def _alike(self, buffers: Buffers) -> bool:
        """Whether each tensor has its slot's dtype and its parameter's shape and device."""
        for slot, tensors in buffers.items():
            dtype = self.formats.dtype(slot)
            for tensor, param in zip(tensors, self.params, strict=True):
                shape = (1,) if slot.endswith(SCALE) else param.shape
                if tensor.dtype != dtype or tensor.shape != shape or tensor.device != param.device:
                    return False
                if tensor.layout != torch.strided or not (self.staged or tensor.is_contiguous()):
                    return False
        return True


@dataclass
class Batches:
    """All batches of an optimizer, with what they were made from."""

    batches: list[Batch]
    params: list[torch.Tensor]
    groups: list[int]
    absent: list[bool]
    """For each parameter, whether it had no gradient."""
    states: list[dict[str, Any]]
    """Every value of the optimizer's state, in its order."""

    def fit(
        self,
        params: Sequence[torch.Tensor],
        groups: Sequence[int],
        grads: Sequence[torch.Tensor | None],
        states: Sequence[dict[str, Any]],
    ) -> bool:
        """Whether a step with these can use the batches as they are."""
        return (
            same_objects(params, self.params)
            and groups == self.groups
            and same_objects(states, self.states)
            and [grad is None for grad in grads] == self.absent
            and all(batch.fits(grads) for batch in self.batches)
        )


def same_objects(some: Sequence[object], others: Sequence[object]) -> bool:
    """Whether two sequences hold the very same objects in one order."""
    return len(some) == len(others) and all(map(operator.is_, some, others))


def check_grad(grad: torch.Tensor, param: torch.Tensor, where: str) -> None:
    """Raises ValueError for a gradient that the step cannot read."""
    if grad.layout != torch.strided:
        raise ValueError(
            f"{where}: a gradient of layout {grad.layout} is not allowed: torch.strided"
        )
    if grad.dtype not in GRADS:
        raise ValueError(
            f"{where}: a gradient of dtype {grad.dtype} is not allowed: {names(GRADS)}"
        )
    if grad.shape != param.shape:
        raise ValueError(
            f"{where}: a gradient of shape {tuple(grad.shape)} is not allowed: the parameter's, "
            f"{tuple(param.shape)}"
        )
    if grad.device != param.device:
        raise ValueError(
            f"{where}: a gradient on {grad.device} is not allowed: the parameter's, {param.device}"
        )


def check_state(
    state: dict[str, Any], formats: Formats, param: torch.Tensor, names: dict[str, str], where: str
) -> None:
    """Raises ValueError where a state tensor is not what the formats ask for."""
    for slot in formats.slots[2:]:
        tensor = state[names[slot]]
        shape = (1,) if slot.endswith(SCALE) else tuple(param.shape)
        wanted = (formats.dtype(slot), shape, param.device)
        found = (tensor.dtype, tuple(tensor.shape), tensor.device)
        if found != wanted:
            raise ValueError(
                f"{where}: state {names[slot]!r} is {found[0]} of shape {found[1]} on {found[2]}; "
                f"allowed: {wanted[0]} of shape {wanted[1]} on {wanted[2]}"
            )
