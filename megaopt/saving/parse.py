"""The containers of a state dict, checked before anything in them is looked at."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

from megaopt.kernels.refusals import listed, refuse, shown
from megaopt.options.placement import MASTER

NOT_MADE = "not_made"
"""Key of a state dict: of each parameter that lacks any, the names of the state it has not yet.

It stands beside "state" and "param_groups", so that whoever puts these two together anew drops it.
"""

WRITTEN = "written"
"""Key of a state dict, beside the same: the parameters whose weights were written since the last
step, so that their masters are to take the values. It is there where there are such."""

Key = Hashable
"""A parameter's key in a state dict: its place, or whatever a hook or a framework made of it."""


@dataclass
class Saved:
    """A state dict whose containers are what they must be."""

    states: dict[Key, dict[str, Any]]
    """The states of parameters that have one."""
    groups: list[dict[str, Any]]
    order: list[Key]
    """Keys of all parameters, in group order."""
    not_made: dict[Key, list[str]] | None
    """Names that states lack; None in another optimizer's state dict, or one taken apart."""
    written: list[Key]
    """Parameters whose weights were written since the last step."""
    extras: dict[str, Any]
    """Entries of optimizer.state under text, of no parameter: a wrapper's, Lookahead's say."""


def taken_apart(state_dict: Any, sizes: list[int]) -> Saved:
    """The parts of a state dict; raises ValueError where one is missing or of another kind.

    sizes: how many parameters each of the optimizer's groups has.
    """
    # kinds and keys of the containers, from the outside in
    if not isinstance(state_dict, Mapping):
        refuse("the state dict", "a dict of 'state' and 'param_groups'", state_dict)
    for key in ("state", "param_groups"):
        if key not in state_dict:
            what = listed(state_dict) or "an empty dict"
            raise ValueError(f"the state dict has no {key!r}: found {what}")

    # parameters are matched by their places: as many in each group
    groups = state_dict["param_groups"]
    if not isinstance(groups, (list, tuple)):
        refuse("'param_groups' of the state dict", "a list of dicts", groups)
    for index, group in enumerate(groups):
        if not isinstance(group, Mapping):
            refuse(f"group {index} of the state dict", "a dict", group)
        params = group.get("params")
        if not isinstance(params, (list, tuple)):
            refuse(f"group {index}: 'params' of the state dict", "a list of keys", params)
    groups = [dict(group) for group in groups]
    saved_sizes = [len(group["params"]) for group in groups]
    if saved_sizes != sizes:
        raise ValueError(
            f"the state dict has groups of {saved_sizes} parameters: allowed are this optimizer's, "
            f"{sizes}"
        )

    # no key stands twice
    order = [key for group in groups for key in group["params"]]
    for key in order:
        if not isinstance(key, (int, str)):
            refuse("'params' of the state dict", "whole numbers or names", key)
    if len(set(order)) != len(order):
        refuse("'params' of the state dict", "a key of its own for each parameter", order)
    # torch's numbers have no gaps: one would mean that a parameter was taken out
    numbers = sorted(key for key in order if isinstance(key, int))
    if numbers and numbers[-1] - numbers[0] >= len(numbers):
        refuse("'params' of the state dict", "whole numbers without a gap", order)

    states, extras = _states(state_dict["state"], set(order))
    # the two lists of ours beside "state" and "param_groups"; other libraries have neither
    not_made = state_dict.get(NOT_MADE)
    if not isinstance(not_made, (Mapping, type(None))):
        refuse(f"{NOT_MADE!r} of the state dict", "a dict of names by parameter", not_made)
    for key, names in (not_made or {}).items():
        if not isinstance(names, (list, tuple)) or not all(isinstance(n, str) for n in names):
            refuse(f"{NOT_MADE!r}[{shown(key)}] of the state dict", "a list of names", names)
    keys = state_dict.get(WRITTEN, [])
    are_keys = isinstance(keys, (list, tuple)) and all(isinstance(key, (int, str)) for key in keys)
    if not are_keys or not set(keys) <= set(order):
        refuse(f"{WRITTEN!r} of the state dict", "a list of keys of its parameters", keys)
    not_made = None if not_made is None else dict(not_made)
    return Saved(states, groups, order, not_made, list(keys), extras)


def _states(states: Any, param_keys: set[Key]) -> tuple[dict[Key, dict[str, Any]], dict[str, Any]]:
    """Returns parameters' states, and other entries under text, where parameters have places."""
    if not isinstance(states, Mapping):
        refuse("'state' of the state dict", "a dict by parameter", states)
    param_states, extras = {}, {}
    # where a framework uses names as keys, text is no sign of an entry of no parameter
    goes_by_names = any(isinstance(key, str) for key in param_keys)
    for key, state in states.items():
        # another wrapper's entry, as Lookahead's
        if isinstance(key, str) and not goes_by_names:
            extras[key] = state
            continue
        if key not in param_keys:
            raise ValueError(
                f"state {shown(key)} of the state dict belongs to no parameter of its groups"
            )
        if not isinstance(state, Mapping):
            refuse(f"state {shown(key)} of the state dict", "a dict by name", state)
        # unflattened by torch.distributed.checkpoint, what was None comes back as {}
        lost = {n for n, v in state.items() if isinstance(v, dict) and not v}
        lost &= {*state} if goes_by_names else {MASTER}
        values = {name: value for name, value in state.items() if name not in lost}
        if values:  # otherwise someone looked: optimizer.state makes an entry for whom it lacks
            param_states[key] = values
    return param_states, extras


def is_ours(groups: Any) -> bool:
    """Whether the groups of a state dict are of this package's optimizers."""
    is_list = isinstance(groups, (list, tuple)) and len(groups) > 0
    return is_list and all(isinstance(group, Mapping) and "contract" in group for group in groups)


def with_states(state_dict: Any, read: Callable[[Mapping[str, Any], str], Any]) -> Any:
    """A state dict of what `read` gives for each state and its name; the given one stays.

    What is no state dict of another library's, and states that are no mappings, are passed on as
    they are.
    """
    states = state_dict.get("state") if isinstance(state_dict, Mapping) else None
    if not isinstance(states, Mapping) or is_ours(state_dict.get("param_groups")):
        return state_dict
    new_states = {
        key: read(state, f"state {key!r}") if isinstance(state, Mapping) else state
        for key, state in states.items()
    }
    return {**state_dict, "state": new_states}
