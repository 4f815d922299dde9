"""Digests of what a step reads and stores: out of its launch, or in passes of their own."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megaopt.kernels.chunks.batch import Formats
from megaopt.kernels.digest.codes import initial
from megaopt.kernels.digest.launch import Digests, StepDigests
from megaopt.kernels.place import Place
from megaopt.kernels.shards import local_of
from megaopt.kernels.step.launch import TritonPlan
from megaopt.params import ParamView
from megaopt.state.owned import Owned
from megaopt.state.tensors import state_name
from megaopt.state.watch import Grads
from megaopt.step.batch import Batch

BESIDE_STATE = ("grad", "weight")


class BatchDigests:
    """The digests of a batch's chosen slots.

    Those that the launch does not sum up come from passes of their own: over gradients before the
    step, which may write them, and over the rest behind it; without `passes` it is left out.
    """

    def __init__(self, batch: Batch, owned: Owned, quantities: Sequence[str], passes: bool) -> None:
        self.batch, self.is_known = batch, False
        # slots of the batch by the names that users know; some are chosen
        names = {slot: state_name(slot) for slot in batch.formats.state_slots}
        names = {**{slot: slot for slot in BESIDE_STATE}, **names}
        self.names = {slot: name for slot, name in names.items() if name in quantities}
        """The names of the quantities that have digests, by slot."""
        # each parameter's part on this rank, and its place in the whole
        views = [owned.views[place] for place in batch.positions]
        pairs = zip(views, batch.positions, strict=True)
        places = [view.place(owned.numbers[position]) for view, position in pairs]
        # whether passes are launches, and which slots the step's launch sums up itself
        self._launches = owned.backend(batch.device) == "triton" and batch.device.type == "cuda"
        plan, chosen = batch.plan, [slot for slot in self.names if slot in batch.formats.by_slot]
        self._launched: torch.Tensor | None = None
        if isinstance(plan, TritonPlan) and chosen:  # torch's plans have no launch to add to
            self._launched = plan.sum_digests(chosen, places)
        slots = batch.plan.digest_slots if isinstance(batch.plan, TritonPlan) else ()
        self._of_launch = {slot: self.names[slot] for slot in slots}
        # only what costs no pass of its own
        if not passes:
            self.names = self._of_launch
        # int64 [parameters, 1, 2]: what the lengths add to digests
        self._initial = initial([v.local.numel() for v in views], batch.device)[:, None, :2]
        self._places = {slot: _places(views, batch.formats, slot, places) for slot in self.names}
        self._own_passes: dict[str, Digests] = {}
        self._by_slot: dict[str, torch.Tensor] = {}

    def begin(self, grads: Grads) -> None:
        """Prepares the launch's digests, and makes those of gradients, before the launch."""
        # the launch adds to it: int64 [parameters, slots of the launch, 2]
        if self._launched is not None:
            self._launched.copy_(self._initial.expand_as(self._launched))
        # gradients come first, as a step may write them unscaled
        self._look([slot for slot in self.names if slot == "grad"], grads)

    def finish(self, grads: Grads) -> None:
        """Makes the digests that the launch does not add up, after the step."""
        self.is_known = True
        self._look([slot for slot in self.names if slot != "grad"], grads)

    def _look(self, slots: Sequence[str], grads: Grads) -> None:
        for slot in slots:
            if slot not in self._of_launch:
                self._by_slot[slot] = self._digest(slot, grads)

    def _digest(self, slot: str, grads: Grads) -> torch.Tensor:
        tensors = self._tensors(slot, grads)
        # tables on the device, made at the first pass over a slot
        if slot not in self._own_passes:
            self._own_passes[slot] = Digests(tensors, self._places[slot], self._launches)
        return self._own_passes[slot](tensors)[:, :2]

    def _tensors(self, slot: str, grads: Grads) -> list[torch.Tensor]:
        if slot == "grad":
            return [local_of(grads[place]) for place in self.batch.positions]
        # digests are of what is stored, fp8 codes here
        if slot == "weight" and self.batch.float8 is not None:
            return list(self.batch.float8.codes)
        return self.batch.tensors(slot)

    def leave_out(self, grads: Grads) -> None:
        """Makes the digests of a step that the host leaves out."""
        self.is_known = True
        # no launch runs: passes look at all slots, and fill in for the launch
        digests = {slot: self._digest(slot, grads) for slot in self.names}
        self._by_slot = digests
        # into the memory that `read` gives, in the launch's order
        if self._launched is not None:
            columns = [digests[slot] for slot in self._of_launch]
            self._launched.copy_(torch.stack(columns, 1))

    def read(self) -> StepDigests:
        """The digests of the last step."""
        # columns of the launch, then those of passes
        slots = [slot for slot in self._by_slot if slot not in self._of_launch]
        parts = [] if self._launched is None else [self._launched]
        parts += [self._by_slot[slot][:, None] for slot in slots]
        quantities = [*self._of_launch.values(), *(self.names[slot] for slot in slots)]
        return StepDigests(self.batch.params, tuple(quantities), torch.cat(parts, 1))


def _places(
    views: Sequence[ParamView], formats: Formats, slot: str, places: list[Place]
) -> list[Place]:
    """Returns the places of a slot's tensors in their whole ones."""
    # moments of a matrix rule may be of another shape than the parameter
    if formats.matrix is not None and slot not in (*BESIDE_STATE, "master"):
        pairs = zip(places, views, strict=True)
        places = [view.place(place.number, slot) for place, view in pairs]
    form = formats.by_slot.get(slot.removesuffix("_scale"))
    if form is None:
        return places
    # scales count blocks, packed codes several elements each
    together = form.block if slot.endswith("_scale") else form.packed
    return [
        Place(number, first // together, max(run // together, 1), stride // together)
        if together
        else Place(0)
        for number, first, run, stride in places
    ]
