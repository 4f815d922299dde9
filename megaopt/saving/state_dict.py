"""State dicts: ours, exact to the bit, and those of TransformerEngine and torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from megaopt.kernels.formats import MASTERS
from megaopt.kernels.refusals import is_dense, listed, refuse, same, shown
from megaopt.kernels.rules import RULES
from megaopt.kernels.rules.matrix import CAPTURED_ENERGY, PROJECTION, SECOND_MOMENT
from megaopt.kernels.shards import local_of
from megaopt.options.checks import COUNT, NOT_NEGATIVE, number
from megaopt.options.groups import States, check_names
from megaopt.options.options import (
    BESIDE,
    FORMATS,
    VARIANTS,
    Options,
    check_group,
    check_param_numbers,
    check_seed,
    check_variant,
)
from megaopt.params import ParamView
from megaopt.params.dtensor import check_sharding, locals_of
from megaopt.params.names import plain_names
from megaopt.params.view import SCALE, STEP
from megaopt.saving.formats import (
    FROZEN,
    MASTERS_KEPT,
    MAXIMIZE,
    check_count,
    check_formats,
    check_same,
    in_our_blocks,
    marks_of,
    said_by,
    sized_contract,
    text_of,
)
from megaopt.saving.parse import NOT_MADE, WRITTEN, Saved, taken_apart
from megaopt.state.masters import has_master
from megaopt.state.owned import Owned
from megaopt.state.tensors import MASTER, State, encoded, shape_of, state_name
from megaopt.state.writes import ExternalWrites
from megaopt.step.collect import check_rule, completed_states
from megaopt.step.counts import GivenCounts, new_count
from megaopt.step.probing import is_asked_by_torch, loads_frozen, on_any_rank

# Keys of a group in a state dict, by policy, beside an optimizer's marks and VARIANTS.
# torch's and TransformerEngine's groups: implementation choices that move no number.
IGNORED = ("foreach", "fused", "capturable", "differentiable")
# what only some kinds of optimizer have, and these in every group
TELLING = ("betas", "eps", "momentum")
# what states of this package's optimizers have; other names are their users' own
NAMES = {
    *(MASTER, PROJECTION, CAPTURED_ENERGY, SECOND_MOMENT, STEP),
    *(name for rule in RULES.values() for name in rule.moments),
}

StateOf = Mapping[Any, Mapping[str, Any]]


@dataclass
class Loaded:
    """A state dict, checked and converted, ready to be taken over."""

    states: States
    groups: list[dict[str, Any]]
    written: list[int]
    """Places of parameters whose weights were written before the state dict was made."""
    masters: list[tuple[torch.Tensor, torch.Tensor]]
    """The caller's masters, and what is written into them."""
    hints: dict[str, str]
    """Warnings by name: of what no step reads in another library's states."""


def mark(
    packed: dict[str, Any], owned: Owned, writes: ExternalWrites, counts: GivenCounts, sized: bool
) -> dict[str, Any]:
    """Adds to a state dict what a load compares; leaves out masters that are none.

    torch.distributed.checkpoint flattens tensors and numbers, but no None. Raises ValueError for a
    state that no load would take.

    writes: knows the weights as the last step left them. counts: those in state dicts. sized:
    contracts are tensors, whose sizes torch compares before it loads.
    """
    # a step may still write states that are in host memory
    owned.homes.wait()
    # the same places in all of these: keys of the state dict, params, views, labels
    keys = [key for group in packed["param_groups"] for key in group["params"]]
    place_of = {key: place for place, key in enumerate(keys)}
    state = {
        key: _state(entry, owned, place_of[key], counts) if key in place_of and entry else entry
        for key, entry in packed["state"].items()
    }
    packed_states = zip(owned.params, keys, strict=True)
    states = {p: packed["state"][key] for p, key in packed_states if key in packed["state"]}

    # what the next step would make of each state; a load of ours lets exactly these be missing
    not_made = {}
    for key, view in zip(keys, owned.views, strict=True):
        lacking = _lacking(packed["state"].get(key, {}), owned, view)
        if lacking:
            not_made[key] = lacking

    # options that every load compares; sized: as tensors, whose sizes torch compares
    marks = {name: getattr(owned.options, name) for name in owned.options.MARKS}
    frozen = [""] * len(owned.groups)
    # of the shape that counts on the device have: checkpoints of either load into the other
    shape: tuple[int, ...] = (1,) if sized else ()
    device = torch.device("cpu")
    if sized:
        # that of the state's tensors: torch wants all of a full state dict on one
        entries = [
            state[key][name]
            for key, view in zip(keys, owned.views, strict=True)
            if state.get(key)
            for name in owned.state_names(view)
            if isinstance(state[key].get(name), torch.Tensor)
        ]
        device = entries[0].device if entries else owned.device
        marks["contract"] = sized_contract(owned, device)
        frozen = marked_frozen(owned, states)

    groups = [
        {**group, **marks, **marks_of(owned, live_group["params"], lost)}
        for group, live_group, lost in zip(
            packed["param_groups"], owned.groups, frozen, strict=True
        )
    ]

    # a copy of each group that no load would refuse
    for place, group in enumerate(groups):
        check_param_numbers(group, f"group {place}")
        if not has_its_names(group):
            del group["param_names"]
        if not owned.options.capturable:  # otherwise it is the group's own tensor
            # a count of the state dict's own: checkpoints read into it, the group's is an int
            group[STEP] = counts.new(group[STEP], place, shape, device)

    # weights that were written since the last step, on any rank: a load makes their masters anew
    written = [keys[place] for place in writes.moved_anywhere(owned.params, states)]
    marked = {**packed, "state": state, "param_groups": groups, NOT_MADE: not_made}
    return {**marked, WRITTEN: written} if written else marked


def _state(state: State, owned: Owned, place: int, counts: GivenCounts) -> State:
    """A parameter's state as state dicts have it: what the next step would let go of is left out.

    Raises ValueError for what no load takes.
    """
    view, where = owned.views[place], owned.labels[place]
    formats, names = owned.formats(view), owned.state_names(view)
    # what the next step reads of this state: by name the slot of the formats
    stored = {state_name(slot): slot for slot in formats.state_slots}
    # an fp32 weight may have a left-over master of the time before model.float()
    keeps_master = formats.master.present or _is_wide(view)
    masters = () if formats.master.present else (MASTER, MASTER + SCALE)
    check_rule(owned, view, state, where)
    counted = (STEP,) if owned.options.counts_apart else ()

    # names of ours that no step of this optimizer has: a load would refuse them
    wrong = [name for name in state if name not in (*stored, *view.kept, *masters, *counted)]
    wrong = [name for name in wrong if name in names or _is_ours(name)]
    if wrong:
        raise ValueError(
            f"{where}: its state must have {', '.join((*stored, *view.kept))}, as it is stepped, "
            f"and no other names of this package's, got {listed(wrong)}, which no load takes"
        )

    # matrices: moments of the low shape, which other numbers of the group (rank, say) change
    for name, slot in stored.items() if view.matrix is not None else ():
        value, shape = local_of(state.get(name)), shape_of(slot, formats, view)
        if isinstance(value, torch.Tensor) and tuple(value.shape) != shape:
            refuse(f"{where}: state {name!r}", f"of shape {shape}, as its group says", value)

    # masters that are None are left out: torch.distributed.checkpoint flattens no None
    packed_state = {
        name: value
        for name, value in state.items()
        if not (name == MASTER and value is None) and (keeps_master or name not in masters)
    }
    if counted and any(name in state for name in names):
        # parameters share counts, and a load of a checkpoint writes into each
        count = state[STEP] if STEP in state else new_count(owned)
        on_device = owned.options.capturable
        packed_state[STEP] = count.clone() if on_device else counts.new(count, view.param)
    return packed_state


def has_its_names(group: Mapping[str, Any]) -> bool:
    """Whether a group's param_names, if it has any, are as many as its parameters."""
    names = group.get("param_names")
    if names is None:
        return True
    return isinstance(names, (list, tuple)) and len(names) == len(group["params"])


def _is_ours(name: object) -> bool:
    """Whether states of this package's optimizers have the name, of another kind maybe."""
    return isinstance(name, str) and name.removesuffix(SCALE) in NAMES


def _is_wide(view: ParamView) -> bool:
    """Whether a weight has no master, but may have had one, which model.float() leaves there."""
    return view.param.dtype == torch.float32 and view.code_dtype is None


def _lacking(state: Mapping[str, Any], owned: Owned, view: ParamView) -> list[str]:
    """The names of what the next step would make of a parameter's state."""
    needs_master = owned.options.master_format(
        view.param.dtype, owned.wants_masters, view.code_dtype
    ).present
    names = (*owned.moments(view), MASTER, *view.kept)
    return [
        name
        for name in names
        if name not in state or (name == MASTER and needs_master and state[name] is None)
    ]


def incomplete(owned: Owned, state: StateOf) -> list[int]:
    """Places of parameters whose states have something, and lack what the next step would make.

    torch.distributed.checkpoint saves, and reads, what there is. Raises ValueError for a weight
    that became fp32 since the last step, and has not taken its master's value yet.
    """
    places = []
    for place, view in enumerate(owned.views):
        param_state = state.get(view.param, {})
        # a left-over fp32 master: a checkpoint would have the weight without the master's bits
        if _is_wide(view) and param_state.get(MASTER) is not None:
            raise ValueError(
                f"{owned.labels[place]}: its state must have no master, as it became fp32 since "
                "the last step, got one: call initialize_states() before get_optimizer_state_dict, "
                "which gives the weight its value"
            )
        # something of ours is there, and not all
        if any(name in param_state for name in owned.state_names(view)) and _lacking(
            param_state, owned, view
        ):
            places.append(place)
    return places


def load(state_dict: Any, owned: Owned, state: Mapping[Any, State]) -> Loaded:
    """Returns what an optimizer takes over of a state dict; both stay as they are.

    Raises ValueError as FusedOptimizer.load_state_dict. state: the optimizer's.
    """
    owned.homes.wait()
    # containers and keys first: what follows finds each in its place
    saved = taken_apart(state_dict, [len(group["params"]) for group in owned.groups])
    options = owned.options
    # contract may be bytes in a tensor, from sized_contract
    for group in saved.groups:
        group.update({name: text_of(group[name]) for name in ("contract",) if name in group})
    # groups of this package's optimizers, whose codes are read as they are; else converted
    is_ours = all("contract" in group for group in saved.groups if group["params"])

    # groups first: their numbers decide formats and shapes of states
    for index, group in enumerate(saved.groups):
        missing = [n for n in TELLING if n in options.names_but_step and n not in group]
        if missing and "contract" not in group and group["params"]:
            raise ValueError(
                f"group {index} of the state dict has no {listed(missing)}, and so is another "
                f"kind of optimizer's: found {listed(group)}"
            )
    groups = [
        _group(saved_group, owned.groups[index], options, _step(saved, options, index), index)
        for index, saved_group in enumerate(saved.groups)
    ]
    for group, names in zip(groups, _names(saved.groups, owned.groups), strict=True):
        group.update(names)

    # the optimizer as it will be after the load: its numbers decide the shapes of states
    arguments = (owned.rule, owned.masters, owned.homes, owned.replicas)
    new = Owned(groups, options, *arguments)
    # a matrix rule may not gain or lose parameters; without such a key in groups the shape alone
    # chooses the rule, and nothing can change
    route_key, _ = options.MATRIX_OFF
    for place, index in enumerate(owned.group_numbers if route_key else ()):
        route = owned.groups[index].get(route_key)
        was_matrix, is_matrix = (side.views[place].matrix is not None for side in (owned, new))
        if route is not None and was_matrix != is_matrix:
            allowed = f"this optimizer's, {route!r}, by which {owned.labels[place]} is stepped"
            saved_route = new.groups[index].get(route_key)
            refuse(f"group {index}: {route_key} of the state dict", allowed, saved_route)

    # new states are built beside the old ones; pinned host memory for them is taken at once
    places = [place for place, key in enumerate(saved.order) if key in saved.states]
    hints: dict[str, str] = {}
    with new.room({}, places):
        states = _states(saved, new, is_ours, hints)

    # a frozen parameter's state that torch has left out is refused, before anything changes
    place_of = {key: place for place, key in enumerate(saved.order)}
    check_frozen(state_dict["param_groups"], owned, state)
    # capturable: lr and step become tensors on the device again
    if options.capturable:
        numbers = owned.device_numbers(groups)
        groups = [{**group, **tensors} for group, tensors in zip(groups, numbers, strict=True)]

    # the caller's masters stay the caller's tensors: what is to be written into each is handed back
    masters = []
    for param, master in zip(owned.params, owned.external_masters(), strict=True):
        param_state = states.get(param, {})
        if master is not None and param_state.get(MASTER) is not None:
            masters.append((local_of(master), local_of(param_state[MASTER])))
            param_state[MASTER] = master
    written = [place_of[key] for key in saved.written]
    extras = {key: _copied(value, f"state {key!r}") for key, value in saved.extras.items()}
    every: dict[Any, Any] = {**states, **extras}
    return Loaded(States(dict, every), groups, written, masters, hints)


def _states(
    saved: Saved, owned: Owned, is_ours: bool, hints: dict[str, str]
) -> dict[torch.Tensor, State]:
    """The states of parameters, checked and converted; hints: gets what to warn of, by name."""
    take = _ours if is_ours else _foreign
    states: dict[torch.Tensor, State] = {}
    places = zip(saved.order, owned.views, owned.labels, owned.group_numbers, strict=True)
    # some states count and others do not: one may have lost its count
    any_counts = any(STEP in state for state in saved.states.values())
    for key, view, where, group in places:
        # marks: what the group says of formats, by name; other libraries' groups say nothing
        marks = said_by(saved.groups[group], where) if is_ours else {}
        # the optimizer's part of the state, and what its users put there
        names, both = owned.state_names(view), saved.states.get(key, {})
        state = {n: value for n, value in both.items() if n in names or _is_ours(n)}
        users = {n: value for n, value in both.items() if n not in state}
        # gradients of the other sign
        check_same(marks, MAXIMIZE, owned.options.maximize, where)

        # no state although the optimizer had made one: a framework has lost it
        if not state and saved.not_made is not None:
            unmade = saved.not_made.get(key, [])
            lost = [name for name in owned.moments(view) if name not in unmade]
            if lost:
                raise ValueError(
                    f"{where}: the state dict must have its {' and '.join(lost)}, got no state; "
                    f"only parameters in its {NOT_MADE!r} may have none"
                )

        # what users keep in the state is carried along; in another library's it is likely a mistake
        if users:
            states[view.param] = {
                name: _carried(value, view, f"{where}: {shown(name)}")
                for name, value in users.items()
            }
            if not is_ours:
                hints |= {
                    str(name): f"{where}: {name!r} of the state dict is kept, and no step reads it"
                    for name in users
                }

        if state:
            # DTensors of another mesh or placements are refused, before shards are looked at
            for name in (*owned.moments(view), MASTER):
                check_sharding(state.get(name), view.param, f"{where}: {name!r} in the state dict")
            # names that the saved state may lack, as a step had not made them yet
            not_made = (saved.not_made or {}).get(key, [])
            if is_ours:
                check_formats(saved.groups[group], marks, state, owned, view, where)
            # older versions gave none to states that are not complete
            check_count(marks, state, any_counts and not not_made, where)

            # from here on this rank's shards, no DTensors any more
            tensors = locals_of(state)
            count = tensors.pop(STEP, None)
            # older versions chose other moments for blocks
            if is_ours:
                tensors = in_our_blocks(marks, tensors, owned, view, where)

            # checked copies in the formats of this optimizer, on the parameter's device
            new_state = take(tensors, owned, view, where, not_made)
            # torch.distributed.checkpoint leaves out unsaid what the optimizer has not
            if is_ours and MASTER not in not_made and has_master(view, owned.options):
                check_same(marks, MASTERS_KEPT, owned.wants_masters, where)
            # DTensors again, and what users keep beside
            states[view.param] = {**view.wrap_state(new_state), **states.get(view.param, {})}

            # the parameter's own count: int32 of shape (); with capturable (1,), on the device
            if owned.options.counts_apart:
                own_count = owned.groups[group]["step"] if count is None else count
                states[view.param][STEP] = new_count(owned, int(own_count))
    return states


def _carried(value: Any, view: ParamView, where: str) -> Any:
    """A copy of what users keep in a state; tensors on the parameter's device, as torch loads."""
    if isinstance(value, dict):
        return {key: _carried(element, view, where) for key, element in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_carried(element, view, where) for element in value)
    if not isinstance(value, torch.Tensor):
        return _copied(value, where)
    tensor: Any = value.detach()
    is_wrapper = is_traceable_wrapper_subclass(tensor) or tensor.is_meta
    return tensor.clone() if is_wrapper else tensor.to(view.local.device, copy=True)


def _step(saved: Saved, options: Options, index: int) -> int:
    """The step count of a group, which torch keeps with every parameter.

    Where parameters have their own: the group's, or the largest of theirs. Raises ValueError where
    there are several otherwise, and where states have none.
    """
    group, where = saved.groups[index], f"group {index}"
    # torch counts in each state, ours in the group or in both
    states = [saved.states[key] for key in group["params"] if key in saved.states]
    counts = [entry["step"] for entry in (*states, group) if "step" in entry]
    steps = {int(number(f"{where}: step", step, COUNT)) for step in counts}
    if options.counts_apart and steps:
        return int(group.get("step", max(steps)))
    if len(steps) > 1:
        raise ValueError(
            f"{where}: its parameters have step counts {sorted(steps)}; allowed is one "
            "for all, which this optimizer keeps with the group; step_counts='parameter' keeps one "
            "with each"
        )
    if states and not steps and not options.COUNTS_STEPS:
        return 1  # all that matters is that it is not the first
    if states and not steps:
        raise ValueError(f"{where} of the state dict must have a step count, got none")
    return steps.pop() if steps else 0


def _group(
    saved: dict[str, Any], current: dict[str, Any], options: Options, step: int, index: int
) -> dict[str, Any]:
    """The group after the load: what was saved, over what was there; checked."""
    where = f"group {index}"
    if not saved["params"] and "contract" not in saved:
        return {**current}  # torch.distributed.checkpoint has nothing of a group without parameters
    check_variant(saved, options, f"{where} of the state dict")
    # the bits of the saved state must not mean something else here
    saved_marks = {name: saved[name] for name in options.MARKS if name in saved}
    if "decoupled_weight_decay" in saved and "adam_w_mode" in options.MARKS:
        saved_marks["adam_w_mode"] = saved["decoupled_weight_decay"]
    for name, value in saved_marks.items():
        if not same(value, getattr(options, name)):
            raise ValueError(
                f"{where}: the state dict was saved under {name}={shown(value)}; allowed is this "
                f"optimizer's, {getattr(options, name)!r}"
            )
    options.check_saved(saved, where)
    left_out = {*options.MARKS, *VARIANTS, *IGNORED, BESIDE, FORMATS}
    left_out |= {"decoupled_weight_decay", "params", "param_names"}
    # where keys are names, a framework has found each parameter by its own, and left the numbers in
    # the order of the parameters that were saved: this optimizer's stay
    if "param_numbers" in saved and _goes_by_names(saved):
        numbers = saved["param_numbers"]
        if not isinstance(numbers, (list, tuple, type(None))):
            name = f"{where}: param_numbers of the state dict"
            refuse(name, "a list of numbers, or None", numbers)
        if options.draws and numbers and not current.get("param_numbers"):
            raise ValueError(
                f"{where}: param_numbers must be given to this optimizer, as the state dict, which "
                "goes by names, has them, got none"
            )
        left_out.add("param_numbers")
    values = {key: value for key, value in saved.items() if key not in left_out}
    group = {**current, **values, "step": step}
    count = saved.get("step")
    keeps_tensor = isinstance(current.get("lr"), torch.Tensor) and not options.capturable
    if isinstance(count, torch.Tensor) and count.dim() and not keeps_tensor:
        # saved on the device: numbers, until the load is over
        group["lr"] = number(f"{where}: lr", group["lr"], NOT_NEGATIVE)
    check_group(group, options, where, lr_is_needed=options.capturable)
    if "contract" in saved and "seed" in saved:  # kept where nothing draws, for who draws again
        check_seed(saved["seed"], f"{where}: seed")
    copies = {key: _copied(group[key], f"{where}: {shown(key)}") for key in values}
    return {**group, **copies}


def _goes_by_names(saved: Mapping[str, Any]) -> bool:
    """Whether a framework has put the state dict together; by places it is whole."""
    return any(isinstance(key, str) for key in saved["params"])


def _names(
    saved: Sequence[Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The names that each group gets, if any; one that has names keeps them.

    Raises ValueError where parameters found by their place have other names, apart from those of
    wrappers in them. Where keys are names, a framework has found each parameter by its own, and the
    list may be of other ranks.
    """
    # names of each group, None where it has none or keys are the names
    saved_names = [None if _goes_by_names(group) else group.get("param_names") for group in saved]
    for index, (names, group) in enumerate(zip(saved_names, saved, strict=True)):
        check_names(names, len(group["params"]), f"group {index} of the state dict")
    current_names = [group.get("param_names") for group in groups]

    # all names of one side together: which parts of wrappers are dropped depends on all of them
    plain_saved, plain_current = (
        plain_names([name for names in lists if names is not None for name in names])
        for lists in (saved_names, current_names)
    )

    # a group without names takes the saved ones; two lists have to be alike
    updates: list[dict[str, Any]] = []
    for index, (names, current) in enumerate(zip(saved_names, current_names, strict=True)):
        if names is None or current is None:
            updates.append({} if names is None else {"param_names": [*names]})
            continue
        if [plain_saved[name] for name in names] != [plain_current[name] for name in current]:
            raise ValueError(
                f"group {index}: param_names of the state dict must be this optimizer's, "
                f"{shown(current)}, got {shown(names)}; without param_names parameters are taken "
                "by their place"
            )
        updates.append({})
    return updates


def _copied(value: Any, where: str) -> Any:
    try:
        return deepcopy(value)
    except Exception as error:
        raise ValueError(
            f"{where} of the state dict must be what copy.deepcopy copies, got {shown(value)}: "
            f"{type(error).__name__}"
        ) from None


def _ours(
    saved: State, owned: Owned, view: ParamView, where: str, not_made: Sequence[str]
) -> State:
    """A copy of a state of ours on the parameter's device, which must be in our formats."""
    formats = owned.formats(view)
    # the names that the next step reads; "master" also where formats have none
    names = {state_name(slot): slot for slot in (*formats.state_slots, "master")}
    # scale of a left-over fp16 master, beside an fp32 weight
    wide = (MASTER + SCALE,) if _is_wide(view) else ()
    unknown = [name for name in saved if name not in (*names, *view.kept, *wide)]
    if unknown:
        raise ValueError(
            f"{where}: {listed(unknown)} in the state dict; allowed: "
            f"{', '.join((*names, *view.kept))}"
        )

    # what is kept beside moments (projection, NorMuon's second moment), then slot by slot
    state = _kept(saved, view, where, not_made)
    for name, slot in names.items():
        # the weight became fp32 meanwhile: it takes this master's value at the next step
        if name == MASTER and _is_wide(view) and saved.get(name) is not None:
            state |= _left_master(saved, view, where)
        # this optimizer keeps none: None, and a saved one is refused
        elif slot not in formats.slots:
            if saved.get(name) is not None:
                more = " (dtype=torch.float32 keeps masters)" if slot == "master" else ""
                none = f"None, as this optimizer keeps none{more}"
                refuse(f"{where}: {name!r} of the state dict", none, saved[name])
            state[name] = None
        # of the exact dtype and shape
        elif name in saved:
            value, dtype = saved[name], formats.dtype(slot)
            shape = shape_of(slot, formats, view)
            # a matrix of scales was flat in older versions
            shapes = [shape, (math.prod(shape),)] if slot.endswith(SCALE) else [shape]
            fits = _is_readable(value) and value.dtype == dtype and tuple(value.shape) in shapes
            if not fits:
                refuse(f"{where}: {name!r} of the state dict", f"{dtype} of shape {shape}", value)
            state[name] = _copy(value.reshape(shape), view, name)
        # not saved, though a step had made it
        elif name.removesuffix(SCALE) not in not_made:
            more = ""
            if name == MASTER:
                more = (
                    ", as the optimizer that saved it kept no masters: load into one without, and "
                    "set master_weights = True, which makes them of the weights"
                )
            raise ValueError(f"{where}: the state dict has no {name!r}{more}")
    return state


def _left_master(saved: State, view: ParamView, where: str) -> State:
    """The master that a weight had before it became fp32, which the next step gives it."""
    tensors, shapes = {}, {MASTER: view.state_shape(MASTER), MASTER + SCALE: (1,)}
    for name, shape in shapes.items():
        value = saved.get(name)
        if value is None:
            continue
        dtypes = {torch.float32} if name != MASTER else {form.dtype for form in MASTERS.values()}
        if not _is_readable(value) or tuple(value.shape) != shape:
            refuse(f"{where}: {name!r} of the state dict", f"of shape {shape}", value)
        if value.dtype not in dtypes:
            refuse(f"{where}: {name!r} of the state dict", "of a master's dtype", value)
        tensors[name] = _copy(value, view, name)
    return tensors


def _kept(saved: State, view: ParamView, where: str, may_lack: Sequence[str]) -> State:
    """Copies of what a state has beside moments and master, as fp32.

    Raises ValueError for what it lacks: moments of one projection mean nothing under another.
    """
    state: State = {}
    for name, shape in view.kept.items():
        if name not in saved:
            if name not in may_lack:
                raise ValueError(f"{where}: the state dict has no {name!r}")
            continue
        value, label = saved[name], f"{where}: {name!r} of the state dict"
        is_real = _is_readable(value) and value.is_floating_point()
        if not is_real or tuple(value.shape) != shape:
            refuse(label, f"real numbers of shape {shape}", value)
        copy = state[name] = _copy(value, view, name).float()
        if name == PROJECTION and not bool(copy.isfinite().all()):
            refuse(label, "finite numbers", value)
        if name == CAPTURED_ENERGY and not 0 <= float(copy) <= 1:
            refuse(label, "a number from 0 to 1", value)
    return state


def _foreign(
    saved: State, owned: Owned, view: ParamView, where: str, not_made: Sequence[str]
) -> State:
    """Another optimizer's state, its values stored in our formats."""
    formats = owned.formats(view)
    # moments and master alone: scales are ours, and made below by encoding
    names = {state_name(slot): slot for slot in (*formats.moment_names, "master")}
    scales = [name + SCALE for name in names if name + SCALE in saved]
    if scales:
        raise ValueError(
            f"{where}: {', '.join(scales)} in the state dict; allowed in groups with a 'contract'"
        )

    # moments of a projected gradient, or a second moment by rows, mean nothing under another rule
    if PROJECTION in saved and PROJECTION not in view.kept:
        raise ValueError(
            f"{where}: {PROJECTION!r} in the state dict; allowed where a gradient is projected: "
            "moments of a projected gradient are not those of the gradient"
        )
    if SECOND_MOMENT in saved and SECOND_MOMENT not in view.kept:
        raise ValueError(
            f"{where}: {SECOND_MOMENT!r} in the state dict; allowed with second_moment='normuon'"
        )

    state = _kept(saved, view, where, (CAPTURED_ENERGY, *not_made))
    for name, slot in names.items():
        form = formats.by_slot[slot]
        if name == MASTER and not form.present:
            state[name] = None  # TransformerEngine keeps a dead one for fp32 weights
            continue
        value, label = saved.get(name), f"{where}: {name!r} of the state dict"
        if value is None:
            # otherwise made at the next step
            if name != MASTER and name not in not_made:
                refuse(label, "a tensor", value)
            continue
        shape = view.state_shape(name)
        if not _is_readable(value) or tuple(value.shape) != shape:
            refuse(label, f"a tensor of shape {shape}", value)
        # a compensation is floats too: another library's bf16 master would pass for one
        if form.joined and form.dtype is not None and form.dtype.is_floating_point:
            refuse(label, f"none beside masters in the format {form.name!r}", value)
        # the same dtype without a scale: the bits stay; other floats are encoded, with new scales
        if value.dtype == form.dtype and not form.has_scale:
            state[name] = _copy(value, view, name)
        elif form.joined or not value.is_floating_point():
            refuse(label, str(form.dtype), value)
        else:
            new, _ = encoded(name, value.detach(), form, view)
            state.update({key: view.keep(key, tensor) for key, tensor in new.items()})
    return state


def _copy(value: torch.Tensor, view: ParamView, name: str) -> torch.Tensor:
    return view.empty_state(name, tuple(value.shape), value.dtype).copy_(value.detach())


def _is_readable(value: Any) -> bool:
    """Returns whether a value is a tensor with elements to copy, and its dtype says all of them."""
    return is_dense(value) and not value.is_meta and not is_traceable_wrapper_subclass(value)


# --- frozen parameters: torch.distributed.checkpoint saves their states, and leaves them out when
# it loads; a load that would lose one is refused


def marked_frozen(owned: Owned, state: StateOf) -> list[str]:
    """Returns for each group what stands under FORMATS behind its formats, of frozen parameters.

    The places in the group of those whose states are to be kept; nothing where there are none.
    """
    # by group the index of its first parameter; 0 for an empty one
    groups = range(len(owned.groups))
    firsts = [owned.group_numbers.index(g) if owned.groups[g]["params"] else 0 for g in groups]
    places_by_group: dict[int, list[str]] = {}
    for place in _with_news(owned, state, range(len(owned.params))):
        group = owned.group_numbers[place]
        places_by_group.setdefault(group, []).append(str(place - firsts[group]))
    return [
        f", {FROZEN}={' '.join(places_by_group[g])}" if g in places_by_group else "" for g in groups
    ]


def check_frozen(groups: Sequence[Mapping[str, Any]], owned: Owned, state: StateOf) -> None:
    """Raises ValueError where torch leaves out, or has replaced, the state of a frozen parameter.

    groups: of the state dict, as saved. state: the optimizer's, as it is before the load.
    """
    # load_state_dict by hand, and whole state dicts by places, lose nothing
    if not is_asked_by_torch() or not any(map(_goes_by_names, groups)):
        return
    frozen = [place for place, param in enumerate(owned.params) if not param.requires_grad]
    # places of those that were frozen, and had a state to keep, when they were saved
    marked, first = set(), 0
    for saved, group in zip(groups, owned.groups, strict=True):
        marks = said_by(saved, "") if isinstance(saved.get(FORMATS), str) else {}
        places = marks.get(FROZEN, "").split()
        marked |= {first + int(place) for place in places if place.isdecimal()}
        first += len(group["params"])
    # frozen when saved, with a state, and frozen still: torch would leave the state out
    lost = [place for place in frozen if place in marked]
    # or the state here would be replaced by a new one
    held = [place for place in frozen if state.get(owned.params[place])]
    lost = lost or _with_news(owned, state, held)
    if lost and not loads_frozen():
        who = "the checkpoint" if lost[0] in marked else "this optimizer"
        raise ValueError(
            f"{owned.labels[lost[0]]}: requires_grad must be True before get_optimizer_state_dict "
            "and until set_optimizer_state_dict is done, got False: torch.distributed.checkpoint "
            f"loads no state of a frozen parameter, and {who} has one; or load_state_dict of what "
            "state_dict() gave"
        )


def _with_news(owned: Owned, state: StateOf, places: Iterable[int]) -> list[int]:
    """Finds the frozen ones of these places whose states a step would not make anew as they are.

    Ranks with shards of them ask each other, as a checkpoint has what one of them says.
    """
    params = owned.params
    chosen = [i for i in places if not params[i].requires_grad and state.get(params[i])]
    # flags: one bool for each chosen place; ranks with shards of it take the or of theirs
    flags = [not _is_new(owned, state[params[place]], place) for place in chosen]
    any_flags = on_any_rank(flags, [owned.views[place] for place in chosen])
    return [place for place, has in zip(chosen, any_flags, strict=True) if has]


def _is_new(owned: Owned, state: Mapping[str, Any], place: int) -> bool:
    """Whether a state is what the next step would make from nothing for this parameter."""
    try:
        (new_state,) = completed_states(owned, {}, [place]).values()
    except ValueError:  # a master of the caller's that is not its weight's
        return False
    for name, value in state.items():
        parts = [local_of(value), local_of(new_state.get(name))]
        if not all(isinstance(part, torch.Tensor) for part in parts):
            if not all(part is None for part in parts):
                return False
            continue
        if parts[0].dtype != parts[1].dtype or parts[0].shape != parts[1].shape:
            return False
        # as bytes, which torch compares in all dtypes
        codes = [part.detach().contiguous().reshape(-1).view(torch.uint8) for part in parts]
        if not torch.equal(codes[0], codes[1].to(codes[0].device)):
            return False
    return True
