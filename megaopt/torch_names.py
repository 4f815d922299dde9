"""Names that torch's users write: options that move no number, and those that mean another."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megaopt.checks import one_of, refuse, same, shown

if TYPE_CHECKING:
    from megaopt.options import Numbers, Options

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

SIMILAR, SIMILAR_SHORT, SHORT = 0.9, 0.85, 5
"""difflib's ratio from which a key is a typing error: wieght_decay has 0.92 of weight_decay,
no_weight_decay, which libraries put into groups for themselves, 0.89. Of names of at most SHORT
letters the second: rak has 0.86 of rank."""


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
    known, own = (*names, *options.OF_ALL), ", ".join(names)
    for name in group:
        if name not in names and not hasattr(options, str(name)):
            _check_key(name, group[name], known, own, where)


def _check_key(name: str, value: Any, known: Sequence[str], own: str, where: str) -> None:
    idle = OTHER_OPTIMIZERS.get(name)
    if idle is not None and not any(same(value, each) for each in idle):
        allowed = " or ".join(["left out", *map(str, idle)])
        raise ValueError(
            f"{where}: {name!r} must be {allowed}, got {shown(value)}: it asks for another "
            f"optimizer; groups here have {own}"
        )
    meant = _meant(name, known)
    if meant is not None:
        raise ValueError(
            f"{where}: {name!r} must be spelled {meant!r}; of ours are {own}, "
            f"and other libraries' keys may be beside them; got {shown(value)}"
        )


def _meant(name: str, known: Iterable[str]) -> str | None:
    """The known name of which another one is a misspelling; None for any other."""
    if name in MISNAMED and MISNAMED[name] in (*known, "betas"):  # which others refuse
        return MISNAMED[name]
    for each in known:
        plain = str(name).lower().replace("_", "")
        if name != each and (plain == each.replace("_", "") or _is_similar(str(name), each)):
            return each
    return None


def _is_similar(name: str, known: str) -> bool:
    if sorted(name) == sorted(known):  # letters that changed places
        return True
    least = SIMILAR_SHORT if len(known) <= SHORT else SIMILAR
    return difflib.SequenceMatcher(None, name, known).ratio() >= least
