"""Makes the batches of a step: everything checked, states completed, parameters sorted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from megaopt.float8.convert import REPLACED
from megaopt.kernels.backends import BACKENDS
from megaopt.kernels.step.batch import Formats
from megaopt.kernels.step.preparation import Request
from megaopt.params import ParamView
from megaopt.params.dtensor import local_of
from megaopt.state.memory import check_memory
from megaopt.state.owned import Owned
from megaopt.state.tensors import State, completed_state, state_name, written_tensors
from megaopt.state.watch import Grads, grads_of
from megaopt.step.batches import Batch, Batches
from megaopt.step.counts import StepRows, first_count, rows_of
from megaopt.step.float8 import Float8Batch, plan_formats
from megaopt.step.gradients import check_readable, check_written_grads, resolved
from megaopt.step.low_rank import matrix_batch
from megaopt.step.preparations import Prepared
from megaopt.step.ranks.float8 import Agreement
from megaopt.step.sharded import ShardedBatch

Kind = tuple[torch.device, Formats, bool, Any]
"""What the parameters of a batch have in common: device, formats, whether copies are stepped, and
what their views say."""
CheckParam = Callable[[torch.Tensor, str], None]


@dataclass
class StepRun:
    """One step on its way."""

    owned: Owned
    """Of the optimizer that steps."""
    request: Request
    """What gradients go through first, and when nothing is stepped."""
    rows: list[tuple[float, ...]] | None
    """The groups' scalars; None where they are made on the device."""
    batches: Batches
    grads: Grads
    """Of each parameter."""
    prepared: Prepared = field(default_factory=dict)
    ready: list[Any] = field(default_factory=list)
    """For each batch the groups' scalars as its plan takes them."""

    @property
    def counted_groups(self) -> list[dict[str, Any]]:
        """The groups, and one for each count of parameters that is not their group's."""
        return [*self.owned.groups, *self.batches.counts.groups(self.owned.groups)]

    def make_ready(self) -> None:
        """Takes the memory of all launches, so that none of them fails for it after another."""
        self.ready = [batch.plan.ready(self.rows) for batch in self.batches.batches]

    def launch(self) -> None:
        """Steps all batches."""
        self.batches.refresh(self.owned.groups, self.counts, self.prepared)
        for batch, rows in zip(self.batches.batches, self.ready, strict=True):
            scalars, controls = self.prepared[batch.device]
            batch.plan.step(rows if scalars is None else scalars, controls)

    def finish(self) -> None:
        """Weights become fp8 where they are kept so; all results go where they belong."""
        for quantized in self.batches.quantized:
            quantized.quantize()
        for fed in self.batches.fed:
            fed.copy_results()

    def count(self) -> None:
        """The step is whole."""
        self.batches.forget()
        if self.rows is not None:
            for each in (*self.owned.groups, *self.batches.counts.counted):  # also empty groups
                each["step"] += 1

    def add_rows(self) -> None:
        """Puts the scalars of those counts behind the groups'."""
        if self.rows is not None:
            self.rows += self.owned.rows(self.batches.counts.groups(self.owned.groups))

    @property
    def counts(self) -> list[int] | None:
        """How many steps each group has taken; None where that is on the device."""
        return None if self.rows is None else [group["step"] for group in self.owned.groups]


@dataclass
class Collected:
    """What a step will work on, before anything has changed."""

    kinds: dict[Kind, list[int]]
    """Places of parameters by the kind of their batch."""
    states: dict[torch.Tensor, State]
    """What states become."""

    @property
    def places(self) -> list[int]:
        """Of all parameters that are stepped, in order."""
        return sorted(place for places in self.kinds.values() for place in places)


def collect(owned: Owned, state: Mapping[Any, State], grads: Grads, check: CheckParam) -> Collected:
    """Checks parameters, gradients and states, and sorts what is stepped.

    Args:
        owned: the optimizer's.
        state: the optimizer's; it stays as it is.
        grads: of each parameter, None where it has none.
        check: raises where the optimizer cannot own a parameter.

    Raises:
        ValueError: something is not allowed.
        RuntimeError: an fp8 weight was put in the place of a parameter.
    """
    if owned.options.capturable:
        owned.check_one_device()
    _check_gradients(owned, grads, check)
    external = owned.external_masters()
    owned.check_places()
    makes = owned.options.makes_state
    chosen = [i for i, g in enumerate(grads) if g is not None or makes(owned.params[i])]
    with owned.room(state, chosen):
        found = _collected(owned, state, grads, external, chosen)
    labels = dict(zip(owned.params, zip(owned.views, owned.labels, strict=True), strict=True))
    written = [(*labels[param], made) for param, made in found.states.items()]
    check_memory([each for view, name, own in written for each in written_tensors(view, own, name)])
    return found


def _collected(
    owned: Owned, state: Mapping[Any, State], grads: Grads, external: Any, chosen: Sequence[int]
) -> Collected:
    found = Collected({}, {})
    for place in chosen:
        view, grad = owned.views[place], grads[place]
        formats = owned.formats(view) if grad is None else owned.formats(view, grad.dtype)
        own = state.get(view.param, {})
        made = completed_state(view, own, formats, external[place], owned.labels[place])
        made.update(first_count(owned, own))
        found.states[view.param] = made
        if grad is not None:
            staged = _is_staged(owned, view, grad, formats, made)
            placement = None if view.home is None else view.home.placement
            kind = (view.param.device, formats, staged, (view.batch_key, placement))
            found.kinds.setdefault(kind, []).append(place)
    return found


def completed_states(
    owned: Owned, state: Mapping[Any, State], places: Iterable[int]
) -> dict[torch.Tensor, State]:
    """What the states of parameters become; they stay as they are."""
    external, chosen = owned.external_masters(), list(places)
    made = {}
    with owned.room(state, chosen):
        for place in chosen:
            view, label = owned.views[place], owned.labels[place]
            own, formats = state.get(view.param, {}), owned.formats(view)
            made[view.param] = completed_state(view, own, formats, external[place], label)
            made[view.param].update(first_count(owned, own))
    return made


def _check_gradients(owned: Owned, grads: Grads, check: CheckParam) -> None:
    for view, grad, label in zip(owned.views, grads, owned.labels, strict=True):
        if REPLACED in vars(view.param):
            raise RuntimeError(
                f"{label} must be a weight of the model, got one that to_float8 has replaced, "
                f"{getattr(view.param, REPLACED)!r}: make the optimizer after to_float8"
            )
        if grad is not None:
            check(view.param, label)
            view.check_shared(label)
            check_readable(grad, view.param, label)


def _is_staged(
    owned: Owned, view: ParamView, grad: torch.Tensor, formats: Formats, state: State
) -> bool:
    if formats.cast is not None:
        return False
    if view.home is not None and owned.backend(view.param.device) == "reference":
        return True  # torch computes with tensors of one device
    stored = [state[state_name(slot)] for slot in formats.state_slots]
    return not all(local_of(each).is_contiguous() for each in (view.param, grad, *stored))


def make_batches(owned: Owned, state: Mapping[Any, State], found: Collected) -> Batches:
    """The batches of what was collected; the states are complete."""
    counts = rows_of(owned, state, found.places)
    batches = [_batch(owned, state, kind, places, counts) for kind, places in found.kinds.items()]
    formats = {place: kind[1] for kind, places in found.kinds.items() for place in places}
    agreement = Agreement(owned.views, formats)
    shared = agreement if agreement.signatures else None
    masters = owned.masters if isinstance(owned.masters, (list, tuple)) else None
    return Batches(batches, owned.groups, state, shared, counts, masters)


def _batch(
    owned: Owned, state: Mapping[Any, State], kind: Kind, places: Sequence[int], counts: StepRows
) -> Batch:
    made, home = _batch_of(owned, state, kind, places, counts), owned.views[places[0]].home
    if home is not None:
        slots = kind[1].state_slots
        made.apart = [slot for slot in slots if state_name(slot) in home.placement]
    return made


def _batch_of(
    owned: Owned, state: Mapping[Any, State], kind: Kind, places: Sequence[int], counts: StepRows
) -> Batch:
    device, formats, staged, _ = kind
    views = [owned.views[place] for place in places]
    params = [view.param for view in views]
    numels = [view.local.numel() for view in views]
    rows = [counts.row(place, owned.group_numbers[place]) for place in places]
    spots = [owned.place(place) for place in places] if formats.draws or formats.block else None
    backend = BACKENDS[owned.backend(device)]
    own = (list(places), params, [state[param] for param in params], staged)
    if formats.matrix is not None:
        return matrix_batch(owned, formats, *own)
    if formats.cast is not None:
        extents = [view.extent for view in views]
        planned = plan_formats(formats, views[0], backend.steps_codes)
        plan: Any = backend.plan(planned, owned.rule, numels, rows, device, extents, spots)
        return Float8Batch(formats, plan, *own)
    plan = backend.plan(formats, owned.rule, numels, rows, device, None, spots)
    batch = ShardedBatch if any(view.is_sharded for view in views) else Batch
    return batch(formats, plan, *own)


def resolve_grads(params: Iterable[torch.Tensor], decoupled: bool) -> bool:
    """Waits for gradients that a collective still writes, and makes pending signs real.

    Such a gradient is replaced in its attribute. Returns whether there was any.
    """
    own, found = list(params), False
    for param, grad in zip(own, grads_of(own, decoupled), strict=True):
        plain = resolved(grad)
        if plain is not grad:
            setattr(param, "decoupled_grad" if decoupled else "grad", plain)
            found = True
    return found


def writes_grads(run: StepRun) -> bool:
    """Whether a step stores unscaled gradients, which then have to be fit for it."""
    writes = run.owned.options.write_unscaled_grads and run.request.grad_scale is not None
    if writes:
        check_written_grads([local_of(grad) for grad in run.grads], run.owned.labels)
    return writes
