"""The tensors that a step works on: checked, completed, sorted by format, kept while they fit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import numpy
import torch

from megaopt.kernels.backends import Plan
from megaopt.kernels.step.batch import Buffers, Formats
from megaopt.options.groups import given_numbers, shaping_numbers
from megaopt.state.tensors import state_name
from megaopt.state.watch import WEIGHT, Grads, Guards, Watch, finder_for, same_objects
from megaopt.step.counts import StepRows
from megaopt.step.ranks.float8 import Agreement


class Undo:
    """Copies of what a step of many calls is about to write: it is whole, or it never was."""

    def __init__(self) -> None:
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def keep(self, tensors: Iterable[torch.Tensor]) -> None:
        """Copies tensors before they are written."""
        self._kept += [(tensor, tensor.detach().clone()) for tensor in tensors]

    def restore(self) -> None:
        """Puts back what was kept, which takes no memory."""
        for tensor, before in self._kept:
            tensor.detach().copy_(before)
        self.forget()

    def forget(self) -> None:
        """Lets the copies go."""
        self._kept = []


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
    apart: list[str] = field(default_factory=list)
    """Slots whose tensors are in host memory, while the weights are on a card."""
    _host_addresses: list[list[int]] = field(default_factory=list)
    """Of each of these, at the last look."""
    undo: Undo = field(default_factory=Undo)
    """Copies of what the step on its way writes, as it was before."""
    watched: ClassVar[bool] = True
    """The watch looks at its tensors; otherwise `fits` does."""

    def fits(self, grads: Grads) -> bool:
        """Whether tensors that the watch does not look at are what the batch was made for."""
        return True

    @cached_property
    def device(self) -> torch.device:
        """Of all its tensors."""
        return self.params[0].device

    @property
    def quantizes(self) -> bool:
        """Whether the weights become fp8 after the step."""
        return self.formats.cast is not None

    def weights_at(self) -> bytes:
        """The weights' addresses, as this step found them."""
        rows = self.addresses
        row = rows[WEIGHT] if rows else numpy.array([t.data_ptr() for t in self._weights()])
        return row.tobytes()

    def _weights(self) -> list[torch.Tensor]:
        """The weights' memory, where the plan is given tensors."""
        return self.params

    def stage_inputs(self, grads: Grads, writes_grads: bool = False) -> None:
        """Before a step of a plan without addresses: it gets tensors, copies where staged."""
        own = self.buffers(grads)
        self._keep(own, writes_grads)
        if self.staged:
            self._written_grads = own["grad"] if writes_grads else []
            own = {slot: [self._input(t) for t in ts] for slot, ts in own.items()}
            self._copies = own
        self.plan.look(own)

    def _keep(self, own: Buffers, writes_grads: bool) -> None:
        """Copies what the step writes, if it is many calls, of which any may fail."""
        self.undo.forget()
        if self.plan.many_calls:
            self.undo.keep(t for slot in own if slot != "grad" or writes_grads for t in own[slot])

    def _input(self, tensor: torch.Tensor) -> torch.Tensor:
        """What the plan is given: addresses of host memory serve kernels, and not torch."""
        return (tensor if self.plan.addresses else tensor.to(self.device)).contiguous()

    def host_memory_moved(self) -> bool:
        """Whether a state in host memory is elsewhere than before: it may not be pinned there."""
        if not self.apart:
            return False
        rows = {} if self.staged or not self.watched else self.plan.addresses
        now = [
            rows[slot].tolist() if rows else list(map(torch.Tensor.data_ptr, self._tensors(slot)))
            for slot in self.apart
        ]
        before, self._host_addresses = self._host_addresses, now
        return before not in ([], now)

    @cached_property
    def _devices(self) -> list[torch.device]:
        """Of gradients, weights, and each of the state's tensors."""
        own = [self._tensors(slot)[0].device for slot in self.formats.state_slots]
        return [self.device, self.device, *own]

    def refresh(
        self,
        groups: Sequence[Mapping[str, Any]],
        counts: Sequence[int] | None,
        controls: torch.Tensor | None = None,
    ) -> None:
        """Before a step: projections whose turn it is are made anew, and those that are missing.

        Args:
            groups: the optimizer's.
            counts: the steps that each group has taken, which say whose turn it is; None: nobody's.
            controls: the step's, which may leave it out; None: it does not.
        """

    def quantize(self) -> None:
        """After a step, and after ranks have put amaxes together: the weights become fp8."""

    def copy_results(self) -> None:
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
        """Lets go of all copies where nothing was stepped; then there is no `copy_results`."""
        self._copies, self._written_grads = {}, []
        self.undo.forget()

    def take_back(self) -> None:
        """Puts everything back as it was before a step that failed; no `copy_results` follows."""
        self.undo.restore()
        self.abandon()

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

    def _own_shapes(self, slot: str) -> list[torch.Size] | None:
        """Those of scales and packed codes, as they are now; None for other slots."""
        if not self.formats.is_reshaped(slot):
            return None
        return [each.shape for each in self._tensors(slot)]

    def guards(self) -> Guards:
        """What the tensors are now, at which the batch was made."""
        slots = self.formats.slots
        return Guards(
            positions=self.positions,
            names=self.names,
            dtypes=[self.formats.dtype(slot) for slot in slots],
            scales=[None, None, *map(self._own_shapes, self.formats.state_slots)],
            shapes=[param.shape for param in self.params],
            devices=self._devices,
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
        counts: which rows of scalars the parameters take.
        masters: the caller's list; None without one.
    """

    def __init__(
        self,
        batches: list[Batch],
        param_groups: Sequence[Mapping[str, Any]],
        state: Mapping[Any, dict[str, Any]],
        agreement: Agreement | None = None,
        counts: StepRows | None = None,
        masters: Sequence[torch.Tensor | None] | None = None,
    ) -> None:
        self.batches, self.agreement = batches, agreement
        self._masters, self._entries = masters, None if masters is None else list(masters)
        self.counts = StepRows() if counts is None else counts
        params = tuple(param for group in param_groups for param in group["params"])
        self.meeting: Any = None
        """With the ranks that hold the rest of DTensors; kept, as CUDA graphs read its tables."""
        self.quantized = [batch for batch in batches if batch.quantizes]
        """Those whose weights become fp8 after the step."""
        self.projected = [batch for batch in batches if batch.formats.matrix is not None]
        """Those of rules for whole matrices."""
        self.fed = [batch for batch in batches if not batch.addresses]
        """Those whose plans are given tensors in every step."""
        self.undo = Undo()
        """Copies of the counts on the device, as they were before the step on its way."""
        with torch.inference_mode(False):
            self.vote = torch.zeros(1, dtype=torch.int64, device="cpu")
        """For ranks to say whether one of them failed: a rank without memory has it already."""
        self._shaping = shaping_numbers(param_groups)
        self._draws = any(batch.formats.draws for batch in batches)
        self._given = given_numbers(param_groups) if self._draws else []
        self._watched = [batch for batch in batches if batch.watched]
        self._unwatched = [batch for batch in batches if not batch.watched]
        stepped = {position for batch in batches for position in batch.positions}
        self._watch = Watch(
            params=params,
            sizes=[len(group["params"]) for group in param_groups],
            states=tuple(state[p] if i in stepped else None for i, p in enumerate(params)),
            keys=tuple(state.keys()),
            values=tuple(state.values()),
            batches=[batch.guards() for batch in self._watched],
            find=finder_for(params),
        )

    def look(
        self, param_groups: Sequence[Mapping[str, Any]], state: Mapping[Any, Any], decoupled: bool
    ) -> Grads | None:
        """The gradients for a step with these batches, or None if they do not fit what is there."""
        if self._shaping and shaping_numbers(param_groups) != self._shaping:
            return None
        if self._draws and given_numbers(param_groups) != self._given:
            return None
        if self._masters is not None and not same_objects(self._masters, self._entries or ()):
            return None
        if not self.counts.fit(param_groups):
            return None
        seen = self._watch.look(param_groups, state, decoupled)
        if seen is None:
            return None
        for batch in self._unwatched:
            if not batch.fits(seen.grads):
                return None
        for batch, moved in zip(self._watched, seen.moved, strict=True):
            batch.plan.stale = batch.plan.stale or moved
        elsewhere = [batch.host_memory_moved() for batch in self.batches]
        if any(elsewhere):
            return None
        return seen.grads

    def weights_at(self) -> list[bytes]:
        """Each batch's."""
        return [batch.weights_at() for batch in self.batches]

    def refresh(
        self,
        groups: Sequence[Mapping[str, Any]],
        counts: Sequence[int] | None,
        prepared: Mapping[torch.device, tuple[Any, torch.Tensor | None]],
    ) -> None:
        """Before a step: projections are made anew of its gradients, as each batch says."""
        for batch in self.projected:
            batch.refresh(groups, counts, prepared[batch.device][1])

    def keep_counts(self, groups: Iterable[Mapping[str, Any]]) -> None:
        """Copies the counts on the device, where the host's calls count."""
        self.undo.forget()
        if any(batch.plan.many_calls for batch in self.fed):
            self.undo.keep(group["step"] for group in groups)

    def abandon(self) -> None:
        """Nothing is stepped after all."""
        for batch in self.fed:
            batch.abandon()
        self.undo.forget()

    def take_back(self) -> None:
        """Puts back what many calls wrote in a step that failed on its way."""
        for batch in self.fed:
            batch.take_back()
        self.undo.restore()

    def forget(self) -> None:
        """A step is whole: nothing is taken back any more."""
        for batch in self.fed:
            batch.undo.forget()
        self.undo.forget()


def copy_back(tensors: Sequence[torch.Tensor], copies: Sequence[torch.Tensor]) -> None:
    """Stores what became of contiguous copies; a contiguous tensor is its own copy."""
    for tensor, copy in zip(tensors, copies, strict=True):
        if copy is not tensor:
            tensor.copy_(copy)
