"""The groups that an optimizer is given: what may be in them."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any

import torch

from megaopt.options.checks import one_of, refuse, same, shown
from megaopt.options.options import VARIANTS, Options, check_group, check_group_options


class States(defaultdict[torch.Tensor, Any]):
    """`state`: false until one has content.

    torch.distributed.checkpoint leaves out the step that makes the states where `if state`, and all
    ranks have to take that step together: an entry that one rank made by looking is no state.
    """

    def __bool__(self) -> bool:
        return any(self.values())


def entries_of(name: str, values: Any) -> Any:
    """What torch takes as parameters, in a list of its own; groups are copied.

    Raises TypeError where torch would fail without a message.
    """
    if isinstance(values, (torch.Tensor, set)):
        return values  # torch takes or refuses it
    wanted = f"{name} must be tensors, (name, tensor) pairs or groups"
    if isinstance(values, torch.nn.Module) and not isinstance(values, torch.nn.ParameterList):
        raise TypeError(f"{wanted}, got a {type(values).__name__}: pass its parameters()")
    try:
        each = iter(values)
    except TypeError:
        raise TypeError(f"{wanted}, got {shown(values)}") from None
    entries = [dict(entry) if isinstance(entry, dict) else entry for entry in each]
    for index, entry in enumerate(entries):
        if isinstance(entry, tuple) and (len(entry) != 2 or not isinstance(entry[0], str)):
            raise TypeError(
                f"{name}[{index}] must be a tensor or a (name, tensor) pair, got {shown(entry)}"
            )
    return entries


def new_group(param_group: Any) -> dict[str, Any]:
    """A copy of a group to be added, for torch to write into."""
    if not isinstance(param_group, dict) or "params" not in param_group:
        raise TypeError(f"param_group must be a dict with 'params', got {shown(param_group)}")
    return {**param_group, "params": entries_of("params", param_group["params"])}


def _check_duplicates(params: list[torch.Tensor], where: str) -> None:
    """Raises ValueError where a parameter stands in a group twice, which would step it twice."""
    places: dict[int, int] = {}
    for place, param in enumerate(params):
        first = places.setdefault(id(param), place)
        if first != place:
            raise ValueError(
                f"{where}: each parameter must be there once, got one at {first} and {place}"
            )


def check_names(names: Any, count: int, where: str) -> None:
    """Raises ValueError unless they are the names of so many parameters, or None."""
    if names is None:
        return
    is_list = isinstance(names, (list, tuple)) and all(isinstance(name, str) for name in names)
    if not is_list or len(names) != count:
        refuse(f"{where}: param_names", f"a list of {count} names", names)


def check_new_group(group: dict[str, Any], options: Options, where: str) -> None:
    """Raises ValueError for a group that the optimizer cannot have; its parameters apart."""
    _check_duplicates(group["params"], where)
    check_names(group.get("param_names"), len(group["params"]), where)
    check_keys(group, options, where)
    check_group(group, options, where, lr_is_needed=False)
    check_group_options(group, options, where)


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


def check_keys(group: Mapping[str, Any], options: Options, where: str) -> None:
    """Raises ValueError for a key of torch's groups that asks for another optimizer."""
    one_of(f"{where}: differentiable", group.get("differentiable", False), [False])
    own = getattr(options, "adam_w_mode", None)
    decoupled = group.get("decoupled_weight_decay", own)  # of torch's AdamW
    if own is not None and not same(decoupled, own):
        refuse(f"{where}: decoupled_weight_decay", f"adam_w_mode, {own}", decoupled)


def hints_of(given: Mapping[str, Any], options: Options, where: str) -> dict[str, str]:
    """Finds what to warn of in a new group: a message by each key that may be a mistake.

    Other libraries keep their own keys in groups (Megatron's wd_mult, SAM's rho, a scheduler's
    initial_lr): unknown keys are kept, and nothing is said of them unless they are like one of the
    optimizer's, which is not there itself, or those of another optimizer of this package.

    given: the group as the user made it, without what the optimizer's defaults add.
    """
    names = options.names_but_step
    own = (*names, *options.OF_ALL, *options.TAKEN, *KEYS)
    hints = {}
    for name, value in given.items():
        if name in own or hasattr(options, str(name)):
            continue
        idle, meant, reason = OF_OTHERS.get(name), _meant(str(name), own), ""
        if idle is None and meant is not None and meant not in given:
            reason = f"did you mean {meant!r}?"
        elif idle is not None and not any(same(value, each) for each in idle):
            reason = "it asks for another optimizer of this package;"
        if reason:
            hints[name] = (
                f"{where}: {name!r} is kept, and no step reads it, got {shown(value)}: {reason} "
                f"groups here have {', '.join(names)}"
            )
    return hints


def _meant(name: str, own: Collection[str]) -> str | None:
    """Which of the optimizer's keys another one may be a misspelling of."""
    if name in OTHERS:
        return None
    meant = MISNAMED.get(name)
    return meant if meant in own else next((key for key in own if _is_slip(name, key)), None)


def _is_slip(name: str, known: str) -> bool:
    """Whether a name is another but for case, hyphens, underscores and one edit.

    An edit is a letter missing, too many, or another, or letters in another order. Most pairs of
    short names are one edit apart: there a letter may be missing, doubled, or a last s.
    """
    name, known = (each.lower().replace("-", "").replace("_", "") for each in (name, known))
    longer, shorter = (name, known) if len(name) >= len(known) else (known, name)
    at = len(os.path.commonprefix([longer, shorter]))
    is_one_off = shorter[at + (len(longer) == len(shorter)) :] == longer[at + 1 :]
    if len(known) <= SHORT:
        is_one_off &= len(name) not in (1, len(known)) and {*name} <= {*known, "s"}
    return is_one_off or sorted(name) == sorted(known)
