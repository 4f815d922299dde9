"""The groups that an optimizer is given: what may be in them."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch

from megaopt.kernels.refusals import one_of, refuse, same, shown
from megaopt.options.options import MISSING, VARIANTS, Options, check_group
from megaopt.options.placement import STATE_DEVICE, placement_of
from megaopt.options.replicas import REPLICAS, checked_replicas


class States(defaultdict[torch.Tensor, Any]):
    """`state`: false until one has content.

    torch.distributed.checkpoint leaves out the step that makes the states where `if state`, and all
    ranks have to take that step together: an entry that one rank made by looking is no state.
    """

    def __bool__(self) -> bool:
        return any(self.values())


def entries_of(name: str, values: Any) -> Any:
    """Returns what torch takes as parameters, in a new list; groups are copied.

    Raises TypeError where torch would fail without a message.
    """
    if isinstance(values, (torch.Tensor, set)):
        return values  # torch takes or refuses it
    requirement = f"{name} must be tensors, (name, tensor) pairs or groups"
    if isinstance(values, torch.nn.Module) and not isinstance(values, torch.nn.ParameterList):
        raise TypeError(f"{requirement}, got a {type(values).__name__}: pass its parameters()")
    try:
        iterator = iter(values)
    except TypeError:
        raise TypeError(f"{requirement}, got {shown(values)}") from None
    # copies of groups: torch writes into them
    entries = [dict(entry) if isinstance(entry, dict) else entry for entry in iterator]
    for index, entry in enumerate(entries):
        if isinstance(entry, tuple) and (len(entry) != 2 or not isinstance(entry[0], str)):
            raise TypeError(
                f"{name}[{index}] must be a tensor or a (name, tensor) pair, got {shown(entry)}"
            )
    return entries


def check_names(names: Any, count: int, where: str) -> None:
    """Raises ValueError unless they are the names of so many parameters, or None."""
    if names is None:
        return
    is_list = isinstance(names, (list, tuple)) and all(isinstance(name, str) for name in names)
    if not is_list or len(names) != count:
        refuse(f"{where}: param_names", f"a list of {count} names", names)


def taken_from(group: dict[str, Any], options: Options, where: str) -> tuple[Any, Any]:
    """Takes out of a new group what is no number of a step, and what loads would look for there.

    Returns:
        The Placement of its states, and who has copies of its parameters; MISSING for what it does
        not say.
    """
    placement = ranks = MISSING
    if STATE_DEVICE in group:
        device = group.pop(STATE_DEVICE)
        if not options.OFFLOADS and device is not None:
            allowed = "None: this optimizer's states are on the card"
            refuse(f"{where}: {STATE_DEVICE}", allowed, device)
        placement = placement_of(device, f"{where}: {STATE_DEVICE}")
    if REPLICAS in options.TAKEN and REPLICAS in group:
        ranks = checked_replicas(group.pop(REPLICAS), f"{where}: {REPLICAS}")
    return placement, ranks


def check_new_group(group: dict[str, Any], options: Options, where: str) -> None:
    """Raises ValueError for a group that the optimizer cannot have; its parameters apart."""
    # a parameter that stands in a group twice would be stepped twice
    places: dict[int, int] = {}
    for place, param in enumerate(group["params"]):
        first = places.setdefault(id(param), place)
        if first != place:
            raise ValueError(
                f"{where}: each parameter must be there once, got one at {first} and {place}"
            )
    check_names(group.get("param_names"), len(group["params"]), where)
    # keys of torch's groups that ask for another optimizer
    one_of(f"{where}: differentiable", group.get("differentiable", False), [False])
    adam_w_mode = getattr(options, "adam_w_mode", None)
    decoupled = group.get("decoupled_weight_decay", adam_w_mode)  # of torch's AdamW
    if adam_w_mode is not None and not same(decoupled, adam_w_mode):
        refuse(f"{where}: decoupled_weight_decay", f"adam_w_mode, {adam_w_mode}", decoupled)
    check_group(group, options, where, lr_is_needed=False)
    # what is one choice for all groups
    for name in ("master_weights", "use_decoupled_grad"):
        if name in group:
            raise ValueError(
                f"{where}: {name} must be an argument of the optimizer, not of a group, got "
                f"{shown(group[name])}"
            )


# --- keys that are not the optimizer's


MISNAMED = {
    "learning_rate": "lr",
    "epsilon": "eps",
    "beta": "betas",
    "beta1": "betas",
    "beta2": "betas",
    "correct_bias": "bias_correction",
}
"""Names of the same things elsewhere, too far from ours to be typing errors of them."""

OF_OTHERS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("momentum", "dampening", "nesterov", "betas", "ns_steps"), ()),
    "use_muon": (None, False),
    "rank": (None,),
    "replicas": (None,),
}
"""Keys by which groups ask for another optimizer of this package, where the optimizer has none of
that name; with the values that ask for nothing."""

KEYS = ("param_numbers", "state_device", *VARIANTS)
"""Keys that a group of any optimizer may have beside its numbers."""

OTHERS = ("prox_type",)  # torchao's
"""Keys of other libraries that are near one of ours."""

SHORT = 3
"""Letters of a short name."""


def hints_of(group: Mapping[str, Any], options: Options, where: str) -> dict[str, str]:
    """Finds what to warn of in a new group: a message by each key that may be a mistake.

    Other libraries keep their own keys in groups (Megatron's wd_mult, SAM's rho, a scheduler's
    initial_lr): unknown keys are kept, and nothing is said of them unless they are like one of the
    optimizer's, which is not there itself, or those of another optimizer of this package.

    group: the group as the user made it, without what the optimizer's defaults add.
    """
    # keys of this optimizer, and those that a group of any may have
    names = options.names_but_step
    keys = (*names, *options.OF_ALL, *options.TAKEN, *KEYS)
    hints = {}
    for name, value in group.items():
        if name in keys or hasattr(options, str(name)):
            continue
        # the optimizer's key that this one may be a misspelling of; None: no such
        word = str(name)
        meant = None if word in OTHERS else MISNAMED.get(word)
        if meant not in keys and word not in OTHERS:
            meant = None
            # the same but for case, hyphens, underscores and one edit: a letter missing, too many,
            # or another, or letters in another order
            plain = word.lower().replace("-", "").replace("_", "")
            for option in keys:
                key = option.lower().replace("-", "").replace("_", "")
                # behind the common beginning: one letter more, or one other letter, and the rest
                longer, shorter = (plain, key) if len(plain) >= len(key) else (key, plain)
                at = len(os.path.commonprefix([longer, shorter]))
                is_slip = shorter[at + (len(longer) == len(shorter)) :] == longer[at + 1 :]
                # most pairs of short names are one edit apart: there a letter may be missing,
                # doubled, or a last s
                if len(key) <= SHORT:
                    is_slip &= len(plain) not in (1, len(key)) and {*plain} <= {*key, "s"}
                if is_slip or sorted(plain) == sorted(key):
                    meant = option
                    break
        # idle: values of another optimizer's key that ask for nothing
        idle, reason = OF_OTHERS.get(name), ""
        if idle is None and meant is not None and meant not in group:
            reason = f"did you mean {meant!r}?"
        elif idle is not None and not any(same(value, idle_value) for idle_value in idle):
            reason = "it asks for another optimizer of this package;"
        if reason:
            hints[name] = (
                f"{where}: {name!r} is kept, and no step reads it, got {shown(value)}: {reason} "
                f"groups here have {', '.join(names)}"
            )
    return hints
