"""Makes the batches of a step: everything checked, states completed, parameters sorted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from megaopt.kernels.backends import BACKENDS
from megaopt.kernels.chunks.batch import Formats
from megaopt.kernels.shards import local_of
from megaopt.options.placement import MASTER, REPLACED, STEP
from megaopt.params import ParamView, view_of
from megaopt.params.dtensor import locals_of
from megaopt.state.memory import check_memory
from megaopt.state.owned import Owned
from megaopt.state.ownership import widened
from megaopt.state.tensors import State, completed_state, state_name, written_tensors
from megaopt.state.watch import Grads, grads_of
from megaopt.state.writes import ExternalWrites, warn_caller
from megaopt.step.batch import Batch, Batches
from megaopt.step.counts import StepRows, new_count, rows_of
from megaopt.step.gradients import check_readable, resolved
from megaopt.step.probing import is_asked_by_torch

NO_GRADIENTS = "no gradients"
"""The mark among the warnings given: steps without gradients were warned of, or are meant."""

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
    places: list[int]
    """The places of all parameters that are stepped."""
    staged: set[int]
    """The ones of which copies are stepped."""


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
    views, labels = owned.views, owned.labels
    places = [place for place, grad in enumerate(grads) if grad is not None]
    # places with a gradient, or whose state is made without one
    kind, chosen = owned.options.makes_states, places
    if kind in ("all", "trainable"):
        chosen = [
            place
            for place, (view, grad) in enumerate(zip(views, grads, strict=True))
            if grad is not None
            or ((kind == "all" or view.param.requires_grad) and not view.is_idle)
        ]
    # nothing else says that the model has other parameters than those on meta
    on_meta = [] if places else [i for i, view in enumerate(views) if view.local.is_meta]
    owned.check_steppable([*chosen, *on_meta])
    # a parameter that to_float8 took out of its model is stepped by nobody
    for view, label in zip(views, labels, strict=True):
        if REPLACED in vars(view.param):
            raise RuntimeError(
                f"{label} must be a weight of the model, got one that to_float8 has replaced, "
                f"{getattr(view.param, REPLACED)!r}: make the optimizer after to_float8"
            )
    if check is not None:
        check(owned, places)
    # dtype, shape, device and split of each gradient against its parameter's
    for view, grad, label in zip(views, grads, labels, strict=True):
        if grad is not None:
            view.check_shared(label)
            check_readable(grad, view.param, label)
    # then masters and random bits
    external = owned.external_masters()
    if owned.options.draws:
        owned.check_places()
    # pinned memory for all states that are to be in host memory, in one piece a device
    collected = Collected({}, {}, places, set())
    is_apart = any(views[place].home is not None for place in chosen)
    with owned.room(state, chosen) if is_apart else nullcontext():
        _sort(owned, state, grads, external, chosen, collected)
    # everything that the step will write, to be sure that no element is written twice
    named = dict(zip(owned.params, zip(views, labels, strict=True), strict=True))
    written = [(*named[param], completed) for param, completed in collected.states.items()]
    check_memory(
        [
            tensor
            for view, name, completed in written
            for tensor in written_tensors(view, completed, owned.state_names(view), name)
        ]
    )
    return collected


def _sort(
    owned: Owned,
    state: Mapping[Any, State],
    grads: Grads,
    external: Any,
    chosen: Sequence[int],
    collected: Collected,
) -> None:
    """Completes the states of the chosen parameters, and sorts those with gradients by kind."""
    # of each parameter: its formats, its state as it will be, and the batch that it goes into
    for place in chosen:
        view, grad = owned.views[place], grads[place]
        old_state = state.get(view.param, {})
        if owned.options.MATRIX is not None:
            check_rule(owned, view, old_state, owned.labels[place])
        # the gradient's dtype is part of them: another one makes another kernel
        formats = owned.formats(view) if grad is None else owned.formats(view, grad.dtype)
        # old tensors stay, missing ones are made; nothing is taken over yet
        new_state = completed_state(view, old_state, formats, external[place], owned.labels[place])
        if owned.options.counts_apart and STEP not in old_state:
            new_state[STEP] = new_count(owned)
        collected.states[view.param] = new_state
        # without a gradient there is a state, and no batch
        if grad is None:
            continue
        # kernels take addresses of contiguous tensors: one gap, and copies of all are stepped. fp8
        # weights get copies in Float8, and torch computes with tensors of one device
        device, is_staged = view.param.device, False
        if formats.cast is None:
            is_staged = view.home is not None and owned.backend(device) == "reference"
            stored = [new_state[state_name(slot)] for slot in formats.state_slots]
            tensors = (view.param, grad, *stored)
            is_staged = is_staged or not all(local_of(t).is_contiguous() for t in tensors)
        if is_staged:
            collected.staged.add(place)
        # a rank's strides are its own matter: they must not split a batch that ranks meet for
        meets = view.matrix is not None and view.split is not None
        placement = None if view.home is None else view.home.placement
        # the mesh; of fp8 weights ranks, library, and whether there are codes along columns
        shared: tuple[object, ...] = (view.split,)
        if view.weight is not None:
            shared = view.group, type(view.weight), view.weight.columnwise is not None
        kind = (device, formats, is_staged and not meets, (shared, placement))
        collected.kinds.setdefault(kind, []).append(place)


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
            if owned.options.counts_apart and STEP not in old_state:
                completed[view.param][STEP] = new_count(owned)
    return completed


def new_batches(
    owned: Owned,
    state: Any,
    grads: Grads,
    check: Check | None,
    writes: ExternalWrites,
    recorded: tuple[Sequence[str], bool],
) -> Batches:
    """Checks everything, completes the states, and makes the batches of a step.

    Args: as for `collect`. writes: notices who else writes the weights. recorded: quantities of
        which digests are recorded, and whether passes of their own make those.
    """
    # checks alone: nothing has changed if one of these raises
    collected = collect(owned, state, grads, check)
    if not collected.kinds:
        _warn_without_gradients(owned, writes.warning_keys)
    writes.warn_without_masters(owned, collected.states)
    take_over(owned, state, collected.states, writes)  # now that nothing was refused
    # version counters of the weights that these batches write
    writes.follow(owned.params, collected.places, writes, state)
    # which row of scalars each parameter takes, then a batch for each kind
    counts = StepRows()
    if owned.options.counts_apart:
        counts = rows_of(owned, state, collected.places)
    batches = [_batch(owned, state, collected, kind, counts) for kind in collected.kinds]
    masters = owned.masters if isinstance(owned.masters, (list, tuple)) else None
    choices = owned.options.MATRIX_KEYS, owned.options.MATRIX_MARKS
    all_batches = Batches(batches, owned.groups, state, writes, counts, masters, *choices)
    # digests of what a step reads and stores, where somebody records them
    if recorded[0]:
        from megaopt.step.digests import BatchDigests  # few record any

        all_digests = [BatchDigests(batch, owned, *recorded) for batch in batches]
        all_batches.digests = [digests for digests in all_digests if digests.names]
    return all_batches


def _warn_without_gradients(owned: Owned, warnings: set[str]) -> None:
    """Warns once of a step that moves nothing; torch's question for states is no such step."""
    if not owned.params or NO_GRADIENTS in warnings or is_asked_by_torch():
        return
    warnings.add(NO_GRADIENTS)
    names = ("grad", "decoupled_grad", "main_grad")
    elsewhere = [n for n in names if any(getattr(p, n, None) is not None for p in owned.params)]
    where = (
        f"there are gradients in .{elsewhere[0]}, which this optimizer does not read "
        "(use_decoupled_grad=True reads .decoupled_grad, False .grad)"
        if elsewhere
        else "the backward pass must come before step(), zero_grad() after it, and the "
        "optimizer must have the parameters that the model has now: fully_shard and the like "
        "make new ones, so make the optimizer after them. Where batches are left out on "
        "purpose, step_counts='parameter' counts only the steps that a parameter took"
    )
    warn_caller(
        f"none of the {len(owned.params)} parameters has a gradient: this step is counted, and "
        f"moves no weight. Look at this: {where}"
    )


def take_over(
    owned: Owned, state: Any, completed: Mapping[torch.Tensor, State], writes: ExternalWrites
) -> None:
    """Takes over completed states; masters that they lacked were made of their weights."""
    # who had no master, or had a state without one
    lacking = [param for param in completed if state.get(param, {}).get(MASTER) is None]
    if not owned.has_external_masters:
        params = [param for param in lacking if completed[param].get(MASTER) is not None]
        # who sets one to None asks for a new one
        lost = [param for param in params if MASTER not in state.get(param, {})]
        writes.warn_of_lost_masters(owned, lost)
    # masters made here follow their weights until a first step is counted
    writes.unstepped |= {id(param) for param in lacking if not state.get(param)}
    # all values first: an error leaves everything as it is
    weights = {param: view_of(param).local for param in completed}
    values = {p: widened(weights[p], locals_of(state.get(p, {}))) for p in completed}
    for param, new_state in completed.items():
        value = values[param]
        # a weight that became fp32 takes its master's value: it is its own master now
        if new_state.get(MASTER) is None and value is not None:
            weights[param].copy_(value)
        state[param].update(new_state)
    writes.match(lacking, state)


def _batch(
    owned: Owned, state: Mapping[Any, State], collected: Collected, kind: Kind, counts: StepRows
) -> Batch:
    # the parameters of one kind, in the groups' order
    (device, formats, *_), places = kind, collected.kinds[kind]
    views = [owned.views[place] for place in places]
    params, states = [view.param for view in views], [state[view.param] for view in views]
    # of each parameter: elements on this rank, row of scalars, and where random bits begin
    numels = [view.local.numel() for view in views]
    rows = [counts.by_place.get(place, owned.group_numbers[place]) for place in places]
    spots = None
    if formats.draws or formats.block:
        spots = [v.place(owned.numbers[place]) for v, place in zip(views, places, strict=True)]
    backend = BACKENDS[owned.backend(device)]
    plan_of: Any = partial(backend.plan, numels=numels, groups=rows, device=device, places=spots)
    # fp8 weights have tensors behind the parameters
    is_float8 = formats.cast is not None
    plan: Any = None
    float8: Any = None
    matrices: Any = None
    extents = None
    if is_float8:
        from megaopt.step.float8 import Float8, plan_formats  # where there are such weights

        float8 = Float8(formats, places, params, states)
        extents = [view.extent for view in views]
    if formats.matrix is not None:
        # only optimizers with a rule for matrices load what steps them
        from megaopt.step.matrix import matrices_of

        # matrices in fp8: the matrix plan steps masters, the other one casts them
        if is_float8:
            from megaopt.kernels.matrix.cast import CastMatrixPlan, master_formats

            matrices = matrices_of(owned, master_formats(formats), places, states)
            plan = CastMatrixPlan(formats, matrices.plan, partial(plan_of, extents=extents))
        else:
            matrices = matrices_of(owned, formats, places, states)
            plan = matrices.plan
    # plain weights: one plan, and one launch, for all of them
    elif not is_float8:
        plan = plan_of(formats, owned.rule)
    # fp8 weights: codes are stepped as they are, or through fp32 values
    else:
        planned = plan_formats(formats, views[0], backend.steps_codes)
        plan = plan_of(planned, owned.rule, extents=extents)
    staged, sharded = not collected.staged.isdisjoint(places), any(v.is_sharded for v in views)
    tensors = formats, places, params, states, sharded, staged
    batch = Batch(*tensors, plan, float8, matrices)
    # slots in host memory, whose addresses are looked at in each step
    if views[0].home is not None:
        placement = views[0].home.placement
        batch.apart = [slot for slot, name in batch.names.items() if name in placement]
    return batch


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
