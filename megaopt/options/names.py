"""Keys of groups that are mistakes: misspelled ones, and those that ask for another optimizer."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from megaopt.options.checks import one_of, refuse, same, shown

if TYPE_CHECKING:
    from megaopt.options.options import Options

MISNAMED = {
    "learning_rate": "lr",
    "epsilon": "eps",
    "beta": "betas",
    "beta1": "betas",
    "beta2": "betas",
    "correct_bias": "bias_correction",
}
"""Names of the same things elsewhere, too far from ours to be typing errors of them."""

OTHER_OPTIMIZERS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("momentum", "dampening", "nesterov", "betas"), ()),
    # NAdam's, Adadelta's, ASGD's, Rprop's and Muon's
    **dict.fromkeys(("momentum_decay", "rho", "lambd", "etas", "ns_steps"), ()),
    "use_muon": (None, False),  # of Muon with an Adam for the rest
    "rank": (None,),  # GaLore's
}
"""Keys of groups that ask for another rule where ours has none of that name; with the values that
ask for nothing."""

KEYS = (
    *("lr", "betas", "eps", "weight_decay", "bias_correction", "momentum", "dampening", "nesterov"),
    *("rank", "update_proj_gap", "scale", "proj_type", "amsgrad", "maximize", "step", "seed"),
    *("param_numbers", "state_device"),
)
"""What a group of any optimizer of the package may say: a misspelling is a mistake for all."""

OTHERS = ("steps", "prox_type")  # the second is torchao's
"""Keys of other libraries that are near one of ours."""

SHORT = 3
"""Letters of a short name."""


def check_keys(group: Mapping[str, Any], options: Options, where: str) -> None:
    """Raises ValueError for a key of a new group that is a mistake, or asks for another optimizer.

    Other libraries keep their own keys in groups (Megatron's wd_mult, a scheduler's initial_lr):
    unknown keys are let through unless they are like ours.
    """
    one_of(f"{where}: differentiable", group.get("differentiable", False), [False])
    own = getattr(options, "adam_w_mode", None)
    decoupled = group.get("decoupled_weight_decay", own)  # of torch's AdamW
    if own is not None and not same(decoupled, own):
        refuse(f"{where}: decoupled_weight_decay", f"adam_w_mode, {own}", decoupled)
    names = options.names_but_step
    own = (*names, *options.OF_ALL)
    for name in group:
        if name not in names and not hasattr(options, str(name)):
            _check_key(name, group[name], own, ", ".join(names), where)


def _check_key(name: str, value: Any, known: Collection[str], own: str, where: str) -> None:
    idle = OTHER_OPTIMIZERS.get(name)
    if idle is not None and not any(same(value, each) for each in idle):
        allowed = " or ".join(["left out", *map(str, idle)])
        raise ValueError(
            f"{where}: {name!r} must be {allowed}, got {shown(value)}: it asks for another "
            f"optimizer; groups here have {own}"
        )
    every = (*known, *KEYS)
    meant = MISNAMED.get(name)
    if meant not in (*known, "betas"):  # which others refuse
        meant = None
    if meant is None and name not in (*every, *OTHERS):
        meant = next((each for each in every if _is_slip(str(name), each)), None)
    if meant is not None:
        raise ValueError(
            f"{where}: {name!r} must be spelled {meant!r}; of ours are {own}, "
            f"and other libraries' keys may be beside them; got {shown(value)}"
        )


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
