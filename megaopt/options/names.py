"""Names that torch's users write: options that move no number, and those that mean another."""

from __future__ import annotations

import difflib
import os
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from megaopt.options.checks import one_of, refuse, same, shown

if TYPE_CHECKING:
    from megaopt.options.options import Numbers, Options

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

SIMILAR, SHORT, LEAST = 0.9, 5, 4
"""difflib's ratio from which a name of more than SHORT letters is a typing error: wieght_decay has
0.92 of weight_decay, no_weight_decay, which libraries put into groups for themselves, 0.89. Names
of LEAST letters and more may be one edit from another; of shorter ones most pairs are."""


def check_arguments(
    optimizer: str,
    numbers: Numbers,
    *,
    foreach: Any,
    differentiable: Any,
    fused: Any,
    unknown: Mapping[str, Any],
) -> None:
    """Refuses the constructor's arguments of torch that would change something, and unknown ones.

    Raises:
        TypeError: an argument is unknown.
        ValueError: one is known and its value is not allowed.
    """
    for name in unknown:
        hint = _meant(name, numbers.names)
        advice = f"; {hint} is meant" if hint else ""
        raise TypeError(
            f"argument {name!r} must be one of those that megaopt.{optimizer} documents, got "
            f"{shown(unknown[name])}{advice}"
        )
    one_of("differentiable", differentiable, [False])
    for name, value in {"foreach": foreach, "fused": fused}.items():
        if value is not None and not isinstance(value, bool):
            raise ValueError(f"{name} must be None, True or False, got {shown(value)}")


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
    meant = _meant(name, known, KEYS)
    if meant is not None:
        raise ValueError(
            f"{where}: {name!r} must be spelled {meant!r}; of ours are {own}, "
            f"and other libraries' keys may be beside them; got {shown(value)}"
        )


def _meant(name: str, own: Collection[str], others: Collection[str] = ()) -> str | None:
    """The name, of our own and others, of which one is a misspelling; None for any other."""
    if name in MISNAMED and MISNAMED[name] in (*own, "betas"):  # which others refuse
        return MISNAMED[name]
    known = (*own, *others)
    if name in known or name in OTHERS:
        return None
    written = str(name).lower().replace("-", "_")
    return next((each for each in known if _is_similar(written, each)), None)


def _is_similar(name: str, known: str) -> bool:
    plain, own = name.replace("_", ""), known.replace("_", "")
    if sorted(plain) == sorted(own):  # letters that changed places, or none
        return True
    if len(own) < LEAST:
        return _is_short_slip(plain, own)
    if _is_one_edit(plain, own):
        return True
    alike = difflib.SequenceMatcher(None, name, known)
    return len(own) > SHORT and alike.ratio() >= SIMILAR


def _is_short_slip(name: str, known: str) -> bool:
    """Whether a letter of a short name is missing or doubled, or an s follows it."""
    places = range(len(known))
    doubled = [known[:i] + known[i] + known[i:] for i in places]
    missing = [known[:i] + known[i + 1 :] for i in places]
    return name in (*doubled, known + "s") or (len(name) > 1 and name in missing)


def _is_one_edit(name: str, known: str) -> bool:
    """Whether a letter is missing, too many, or another."""
    longer, shorter = (name, known) if len(name) >= len(known) else (known, name)
    at = len(os.path.commonprefix([longer, shorter]))
    return shorter[at + (len(longer) == len(shorter)) :] == longer[at + 1 :]
