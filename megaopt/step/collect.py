"""Makes the batches of a step: everything checked, states completed, parameters sorted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megaopt.kernels.backends import BACKENDS
from megaopt.kernels.chunks.batch import Formats
from megaopt.kernels.matrix.cast import CastMatrixPlan, master_formats
from megaopt.options.placement import REPLACED
from megaopt.params import ParamView
from megaopt.params.dtensor import local_of
from megaopt.state.memory import check_memory
from megaopt.state.owned import Owned
from megaopt.state.ownership import Versions
from megaopt.state.tensors import State, completed_state, state_name, written_tensors
from megaopt.state.watch import Grads, grads_of
from megaopt.step.batch import Batch, Batches
from megaopt.step.counts import StepRows, first_count, rows_of
from megaopt.step.float8 import Float8, plan_formats
from megaopt.step.gradients import check_readable, resolved
from megaopt.step.matrix import matrices_of
from megaopt.step.source import FormatGroup

Kind = tuple[torch.device, Formats, bool, Any]
"""The facts that the parameters of a batch share: device, formats, whether copies are stepped, and
what their views say. Ranks that meet for matrices have the same batches, whatever lies how in
memory: there some may be copies."""
Check = Callable[[Owned, Iterable[int]], None]
"""Raises for parameters, by their places, that the caller cannot step."""


@dataclass
class Collected:
    """The parameters and states of a step, before anything has changed."""

    kinds: dict[Kind, list[int]]
    """Places of parameters by the kind of their batch."""
    states: dict[torch.Tensor, State]
    """The state that each parameter gets, complete."""
    staged: set[int]
    """Places of parameters of which copies are stepped."""

    @property
    def places(self) -> list[int]:
        """The places of all parameters that are stepped, in order."""
        return sorted(place for places in self.kinds.values() for place in places)


def collect(
    owned: Owned, state: Mapping[Any, State], grads: Grads, check: Check | None
) -> Collected:
    """Checks parameters, gradients and states, and sorts what is stepped.

    Args:
        owned: the optimizer's.
        state: the optimizer's; it stays as it is.
        grads: of each parameter, None where it has none.
        check: called with the parameters that have a gradient; None: there is nothing to check.

    Raises:
        ValueError: a parameter, a gradient or a state's tensor cannot be stepped.
        RuntimeError: an fp8 weight was put in the place of a parameter.
    """
    # checks that look at no tensor's elements come first
    if owned.options.capturable:
        owned.check_one_device()
    if owned.options.MATRIX_MARKS:
        owned.check_groups()  # with what parameters say now
    # places with a gradient, or whose state is made without one
    chosen = [i for i, g in enumerate(grads) if g is not None or _makes_state(owned, i)]
    is_any = any(grad is not None for grad in grads)
    # nothing else says that the model has other parameters than those on meta
    on_meta = [] if is_any else [i for i, view in enumerate(owned.views) if view.local.is_meta]
    owned.check_steppable([*chosen, *on_meta])
    # now the gradients themselves, then masters and random bits
    _check_gradients(owned, grads, check)
    external = owned.external_masters()
    owned.check_places()
    # pinned memory for all states that are to be in host memory, in one piece a device
    with owned.room(state, chosen):
        collected = _collected(owned, state, grads, external, chosen)
    # everything that the step will write, to be sure that no element is written twice
    labels = dict(zip(owned.params, zip(owned.views, owned.labels, strict=True), strict=True))
    written = [(*labels[param], completed) for param, completed in collected.states.items()]
    check_memory(
        [
            tensor
            for view, name, completed in written
            for tensor in written_tensors(view, completed, owned.state_names(view), name)
        ]
    )
    return collected


def _makes_state(owned: Owned, place: int) -> bool:
    """Whether a step makes the state of a parameter that has no gradient in it."""
    return owned.options.makes_state(owned.params[place]) and not owned.views[place].is_idle


def _collected(
    owned: Owned, state: Mapping[Any, State], grads: Grads, external: Any, chosen: Sequence[int]
) -> Collected:
    collected = Collected({}, {}, set())
    # of each parameter: its formats, its state as it will be, and the batch that it goes into
    for place in chosen:
        view, grad = owned.views[place], grads[place]
        old_state = state.get(view.param, {})
        check_rule(owned, view, old_state, owned.labels[place])
        # the gradient's dtype is part of them: another one makes another kernel
        formats = owned.formats(view) if grad is None else owned.formats(view, grad.dtype)
        # old tensors stay, missing ones are made; nothing is taken over yet
        new_state = completed_state(view, old_state, formats, external[place], owned.labels[place])
        new_state.update(first_count(owned, old_state))
        collected.states[view.param] = new_state
        # without a gradient there is a state, and no batch
        if grad is not None:
            if _is_staged(owned, view, grad, formats, new_state):
                collected.staged.add(place)
            # a rank's strides are its own matter: they must not split a batch that ranks meet for
            meets = view.matrix is not None and view.split is not None
            staged = place in collected.staged and not meets
            placement = None if view.home is None else view.home.placement
            kind = (view.param.device, formats, staged, (view.batch_key, placement))
            collected.kinds.setdefault(kind, []).append(place)
    return collected


def check_rule(owned: Owned, view: ParamView, state: State, label: str) -> None:
    """Raises ValueError for a state that has moments of another rule of the optimizer."""
    # the group may have asked for another rule since the state was made
    moments = owned.moments(view)
    foreign_moments = [name for name in owned.all_moments if name in state and name not in moments]
    if foreign_moments:
        raise ValueError(
            f"{label}: its state must have {', '.join(moments) or 'no moments'}, as it is stepped, "
            f"got {', '.join(foreign_moments)} of another rule: to go on from new moments, delete "
            "these from optimizer.state[param], and no more, which has its master"
        )


def completed_states(
    owned: Owned, state: Mapping[Any, State], places: Iterable[int]
) -> dict[torch.Tensor, State]:
    """The completed states of parameters; their states themselves stay as they are."""
    external, chosen = owned.external_masters(), list(places)
    owned.check_steppable(chosen)
    completed = {}
    with owned.room(state, chosen):
        # as in a step, for gradients in fp32
        for place in chosen:
            view, label = owned.views[place], owned.labels[place]
            old_state, formats = state.get(view.param, {}), owned.formats(view)
            completed[view.param] = completed_state(
                view, old_state, formats, external[place], label
            )
            completed[view.param].update(first_count(owned, old_state))
    return completed


def _check_gradients(owned: Owned, grads: Grads, check: Check | None) -> None:
    # a parameter that to_float8 took out of its model is stepped by nobody
    for view, label in zip(owned.views, owned.labels, strict=True):
        if REPLACED in vars(view.param):
            raise RuntimeError(
                f"{label} must be a weight of the model, got one that to_float8 has replaced, "
                f"{getattr(view.param, REPLACED)!r}: make the optimizer after to_float8"
            )
    if check is not None:
        check(owned, [place for place, grad in enumerate(grads) if grad is not None])
    # dtype, shape, device and split of each gradient against its parameter's
    for view, grad, label in zip(owned.views, grads, owned.labels, strict=True):
        if grad is not None:
            view.check_shared(label)
            check_readable(grad, view.param, label)


def _is_staged(
    owned: Owned, view: ParamView, grad: torch.Tensor, formats: Formats, state: State
) -> bool:
    # fp8 weights get copies in Float8, not here
    if formats.cast is not None:
        return False
    if view.home is not None and owned.backend(view.param.device) == "reference":
        return True  # torch computes with tensors of one device
    # kernels take addresses of contiguous tensors: one gap, and copies of all are stepped
    stored = [state[state_name(slot)] for slot in formats.state_slots]
    return not all(local_of(tensor).is_contiguous() for tensor in (view.param, grad, *stored))


def make_batches(
    owned: Owned, state: Mapping[Any, State], collected: Collected, versions: Versions
) -> Batches:
    """The batches of what was collected; the states are complete."""
    # which row of scalars each parameter takes, then a batch for each kind
    counts = rows_of(owned, state, collected.places)
    batches = [_batch(owned, state, collected, kind, counts) for kind in collected.kinds]
    masters = owned.masters if isinstance(owned.masters, (list, tuple)) else None
    choices = owned.options.MATRIX_KEYS, owned.options.MATRIX_MARKS
    return Batches(batches, owned.groups, state, versions, counts, masters, *choices)


def _batch(
    owned: Owned, state: Mapping[Any, State], collected: Collected, kind: Kind, counts: StepRows
) -> Batch:
    # the parameters of one kind, in the groups' order
    (device, formats, *_), places = kind, collected.kinds[kind]
    staged = not collected.staged.isdisjoint(places)
    views = [owned.views[place] for place in places]
    params, states = [view.param for view in views], [state[view.param] for view in views]
    source = FormatGroup(formats, places, params, states, any(v.is_sharded for v in views), staged)
    batch = _batch_of(owned, source, counts, BACKENDS[owned.backend(device)])
    # slots in host memory, whose addresses are looked at in each step
    if views[0].home is not None:
        slots = formats.state_slots
        batch.apart = [slot for slot in slots if state_name(slot) in views[0].home.placement]
    return batch


def _batch_of(owned: Owned, source: FormatGroup, counts: StepRows, backend: Any) -> Batch:
    formats, places = source.formats, source.positions
    views = [owned.views[place] for place in places]
    if formats.matrix is not None and formats.cast is None:
        matrices = matrices_of(owned, formats, places, source.states)
        return Batch(source, matrices.plan, matrices=matrices)
    # of each parameter: elements on this rank, row of scalars, and where random bits begin
    numels = [view.local.numel() for view in views]
    rows = [counts.row(place, owned.group_numbers[place]) for place in places]
    spots = [owned.place(place) for place in places] if formats.draws or formats.block else None
    arguments: Any = (owned.rule, numels, rows, views[0].param.device)
    # matrices in fp8: the matrix plan steps masters, the other one casts them
    if formats.matrix is not None:
        matrices = matrices_of(owned, master_formats(formats), places, source.states)
        extents = [view.extent for view in views]

        def make(planned: Formats, rule: Any) -> Any:
            return backend.plan(planned, rule, *arguments[1:], extents, spots)

        plan: Any = CastMatrixPlan(formats, matrices.plan, make)
        float8 = Float8(formats, places, source.params, source.states)
        return Batch(source, plan, float8, matrices)
    # plain weights: one plan, and one launch, for all of them
    if formats.cast is None:
        return Batch(source, backend.plan(formats, *arguments, None, spots))
    # fp8 weights: codes are stepped as they are, or through fp32 values
    planned = plan_formats(formats, views[0], backend.steps_codes)
    plan = backend.plan(planned, *arguments, [view.extent for view in views], spots)
    return Batch(source, plan, Float8(formats, places, source.params, source.states))


def resolve_grads(params: Iterable[torch.Tensor], decoupled: bool) -> bool:
    """Waits for gradients that a collective still writes, and makes pending signs real.

    Such a gradient is replaced in its attribute. Returns whether there was any.
    """
    tensors, is_any_replaced = list(params), False
    # the attribute gets the new tensor, so that the next look finds what was stepped
    for param, grad in zip(tensors, grads_of(tensors, decoupled), strict=True):
        plain = resolved(grad)
        if plain is not grad:
            setattr(param, "decoupled_grad" if decoupled else "grad", plain)
            is_any_replaced = True
    return is_any_replaced
