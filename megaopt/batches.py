"""The tensors that a step works on: checked, completed, sorted by format, kept while they fit."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy
import torch

from megaopt.float8.ranks import Agreement
from megaopt.kernels.backends import Plan
from megaopt.kernels.formats import GRADS, names
from megaopt.kernels.step.batch import Buffers, Formats
from megaopt.kernels.step.watch import Grads, Wanted, Watch, finder_for, is_plain_class
from megaopt.options import has_shared_elements

MASTER = "master_param"
SCALE = "_scale"


def state_name(slot: str) -> str:
    """Under which name a parameter's state holds the tensor of a slot: moments under their own."""
    return {"master": MASTER, "master" + SCALE: MASTER + SCALE}.get(slot, slot)


@dataclass
class Batch:
    """The parameters of one device and one combination of formats."""

    formats: Formats
    plan: Plan
    positions: list[int]
    """Places among all the optimizer's parameters."""
    params: list[torch.Tensor]
    states: list[dict[str, Any]]
    staged: bool
    """Some tensors are not contiguous: the step works on copies and copies the results back."""
    _copies: Buffers = field(default_factory=dict)
    _written_grads: list[torch.Tensor] = field(default_factory=list)
    """The gradients that the step stores unscaled."""
    watched: ClassVar[bool] = True
    """The watch looks at its tensors; otherwise `fits` does."""

    def fits(self, grads: Grads) -> bool:
        """Whether tensors that the watch does not look at are what the batch was made for."""
        return True

    @property
    def device(self) -> torch.device:
        """Of all its tensors."""
        return self.params[0].device

    def enter(self, grads: Grads, writes_grads: bool = False) -> None:
        """Before a step: a plan that works on tensors gets them; copies where they are staged."""
        if not self.addresses:
            own = self.buffers(grads)
            if self.staged:
                self._written_grads = own["grad"] if writes_grads else []
                own = {slot: [t.contiguous() for t in ts] for slot, ts in own.items()}
                self._copies = own
            self.plan.look(own)

    def leave(self, controls: torch.Tensor | None = None) -> None:
        """After a step: the results are copied back to staged tensors."""
        copies = self._leave_grads()
        for slot in copies.keys() - {"grad"}:
            copy_back(self._tensors(slot), copies[slot])

    def _leave_grads(self) -> Buffers:
        """Copies unscaled gradients back, and lets go of all copies, which it returns."""
        copies, self._copies = self._copies, {}
        grads, self._written_grads = self._written_grads, []
        if grads:
            copy_back(grads, copies["grad"])
        return copies

    def abandon(self) -> None:
        """In place of `leave`, where nothing was stepped."""
        self._copies, self._written_grads = {}, []

    def why_not_captured(self) -> str | None:
        """None where a CUDA graph can repeat the step of contiguous tensors, else the reason."""
        return None

    def _own_states(self, slot: str) -> list[torch.Tensor]:
        name = state_name(slot)
        return [state[name] for state in self.states]

    def _tensors(self, slot: str) -> list[torch.Tensor]:
        return self.params if slot == "weight" else self._own_states(slot)

    @property
    def addresses(self) -> list[numpy.ndarray]:
        """The plan's rows of addresses, by slot; empty where it is given tensors instead."""
        rows = {} if self.staged else self.plan.addresses
        return [rows[slot] for slot in self.formats.slots] if rows else []

    @property
    def names(self) -> list[str]:
        """What the slots after gradient and weight are called in a parameter's state."""
        return [state_name(slot) for slot in self.formats.state_slots]

    def buffers(self, grads: Grads) -> Buffers:
        """The tensors in use now, by slot."""
        own: Buffers = {
            "grad": [grads[position] for position in self.positions],  # type: ignore[misc]
            "weight": self.params,
        }
        for slot in self.formats.state_slots:
            own[slot] = self._own_states(slot)
        return own

    def wanted(self) -> Wanted:
        """What the tensors are now, at which the batch was made."""
        slots = self.formats.slots
        return Wanted(
            positions=self.positions,
            names=self.names,
            dtypes=[self.formats.dtype(slot) for slot in slots],
            scales=[slot.endswith(SCALE) for slot in slots],
            shapes=[param.shape for param in self.params],
            device=self.params[0].device,
            contiguous=not self.staged,
            addresses=self.addresses,
        )


class Batches:
    """All batches of an optimizer, and the watch over what they were made from.

    Args:
        batches: of the parameters that have a gradient.
        param_groups: the optimizer's.
        state: the optimizer's, complete for these parameters.
        agreement: with the ranks that share some of all its parameters; None without such.
    """

    def __init__(
        self,
        batches: list[Batch],
        param_groups: Sequence[Mapping[str, Any]],
        state: Mapping[Any, dict[str, Any]],
        agreement: Agreement | None = None,
    ) -> None:
        self.batches, self.agreement = batches, agreement
        params = tuple(param for group in param_groups for param in group["params"])
        self.meeting: Any = None
        """With the ranks that hold the rest of DTensors; kept, as CUDA graphs read its tables."""
        self._watched = [batch for batch in batches if batch.watched]
        stepped = {position for batch in batches for position in batch.positions}
        self._watch = Watch(
            params=params,
            sizes=[len(group["params"]) for group in param_groups],
            states=tuple(state[p] if i in stepped else None for i, p in enumerate(params)),
            keys=tuple(state.keys()),
            values=tuple(state.values()),
            batches=[batch.wanted() for batch in self._watched],
            find=finder_for(params),
        )

    def look(
        self, param_groups: Sequence[Mapping[str, Any]], state: Mapping[Any, Any], decoupled: bool
    ) -> Grads | None:
        """The gradients for a step with these batches, or None if they do not fit what is there."""
        seen = self._watch.look(param_groups, state, decoupled)
        if seen is None or not all(batch.fits(seen.grads) for batch in self.batches):
            return None
        for batch, moved in zip(self._watched, seen.moved, strict=True):
            batch.plan.stale = batch.plan.stale or moved
        return seen.grads

    def abandon(self) -> None:
        """Nothing is stepped after all."""
        for batch in self.batches:
            batch.abandon()


def copy_back(tensors: Sequence[torch.Tensor], copies: Sequence[torch.Tensor]) -> None:
    """Stores what became of contiguous copies; a contiguous tensor is its own copy."""
    for tensor, copy in zip(tensors, copies, strict=True):
        if copy is not tensor:
            tensor.copy_(copy)


def check_written_grads(grads: Sequence[torch.Tensor | None], wheres: Sequence[str]) -> None:
    """Raises ValueError where unscaled gradients could not take the place of the scaled ones."""
    owners: dict[int, str] = {}
    for grad, where in zip(grads, wheres, strict=True):
        if grad is None or grad.numel() == 0:
            continue
        wanted = f"{where}: with write_unscaled_grads=True the gradient must"
        if has_shared_elements(grad):
            raise ValueError(
                f"{wanted} have memory of its own for each element, got strides {grad.stride()} "
                f"of shape {tuple(grad.shape)}"
            )
        if grad.is_inference():
            raise ValueError(f"{wanted} be no inference tensor, got one")
        owner = owners.setdefault(grad.data_ptr(), where)
        if owner is not where:
            raise ValueError(f"{wanted} be in memory of its own, got that of {owner}'s")


def resolved(grad: Any) -> Any:
    """A gradient that was waited for, and has no sign pending; anything else as it is."""
    collectives = sys.modules.get("torch.distributed._functional_collectives")
    if collectives is not None and isinstance(grad, collectives.AsyncCollectiveTensor):
        grad = grad.wait()
    if type(grad) is not torch.Tensor or grad.layout != torch.strided:
        return grad
    return grad.clone() if grad._is_zerotensor() else grad.resolve_neg()


def check_grad(grad: torch.Tensor, param: torch.Tensor, where: str) -> None:
    """Raises ValueError for a gradient that the step cannot read."""
    if not isinstance(grad, torch.Tensor):
        raise ValueError(f"{where}: {grad!r} as gradient is not allowed: a torch.Tensor")
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


def check_plain(grad: torch.Tensor, where: str) -> None:
    """Raises ValueError for a gradient without memory of its own: a wrapper of other tensors."""
    if not is_plain_class(type(grad)):
        raise ValueError(
            f"{where}: a gradient must be a plain torch.Tensor (or a DTensor of one), got "
            f"{type(grad).__name__}"
        )


def check_state(
    state: dict[str, Any], formats: Formats, param: torch.Tensor, names: dict[str, str], where: str
) -> None:
    """Raises ValueError where a state tensor is not what the formats ask for."""
    for slot in formats.state_slots:
        tensor = state[names[slot]]
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(
                f"{where}: state {names[slot]!r} is {tensor!r}; allowed: a torch.Tensor"
            )
        shape = (1,) if slot.endswith(SCALE) else tuple(param.shape)
        wanted = (formats.dtype(slot), shape, param.device)
        found = (tensor.dtype, tuple(tensor.shape), tensor.device)
        if found != wanted:
            raise ValueError(
                f"{where}: state {names[slot]!r} is {found[0]} of shape {found[1]} on {found[2]}; "
                f"allowed: {wanted[0]} of shape {wanted[1]} on {wanted[2]}"
            )
