"""The arguments of constructors: made into Options, and shown by help() and inspect.signature."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, TypeVar

from megaopt.options.checks import one_of, refuse, shown
from megaopt.options.choices import MasterWeights
from megaopt.options.options import FLAGS, OF_OPTIMIZERS, Options

Kind = TypeVar("Kind", bound=Options)
Class = TypeVar("Class", bound=type)


def options_of(
    optimizer: Any, kind: type[Kind], given: Mapping[str, object], **own: Any
) -> tuple[Kind, MasterWeights]:
    """Makes an optimizer's options and master_weights; sets use_decoupled_grad on it.

    Args:
        optimizer: that is being made.
        kind: of its options.
        given: the options that the caller named, of SharedOptions or StepOptions.
        **own: the optimizer's own ones.

    Raises:
        TypeError: given has a name that the optimizer does not take.
        ValueError: an option is out of its range, or contradicts another.
    """
    for name in given:
        if name not in kind.ARGUMENTS:
            allowed = ", ".join(kind.ARGUMENTS)
            raise TypeError(f"argument {name!r} must be one of {allowed}, got {shown(given[name])}")
    found: dict[str, Any] = {**OF_OPTIMIZERS, **own, **given}
    one_of("differentiable", found.pop("differentiable"), [False])
    for name in ("foreach", "fused"):
        value = found.pop(name)
        if value is not None and not isinstance(value, bool):
            refuse(name, "None, True or False", value)
    masters = found.pop("master_weights")
    decoupled = found.pop("use_decoupled_grad")
    one_of("use_decoupled_grad", decoupled, FLAGS)
    optimizer.use_decoupled_grad = decoupled
    return kind(**found), masters


def takes(kind: type[Options], *shared: type) -> Callable[[Class], Class]:
    """Shows each of an optimizer's **options in its class's signature and docstring.

    Args:
        kind: of its options.
        shared: SharedOptions, and what is based on it.
    """

    def show(optimizer: Class) -> Class:
        init: Any = vars(optimizer)["__init__"]
        signature = inspect.signature(init)
        *own, _ = signature.parameters.values()
        defaults = {**OF_OPTIMIZERS, **{field.name: field.default for field in fields(kind)}}
        for name, found in shared[-1].__annotations__.items():
            text = getattr(found, "__forward_arg__", found)
            own.append(
                inspect.Parameter(
                    name, inspect.Parameter.KEYWORD_ONLY, default=defaults[name], annotation=text
                )
            )
        init.__signature__ = signature.replace(parameters=own)
        kind.ARGUMENTS = tuple(each.name for each in own[2:])
        if optimizer.__doc__:
            first, raises, errors = inspect.cleandoc(optimizer.__doc__).partition("\n\nRaises:")
            parts = [_arguments(each.__doc__ or "") for each in shared]
            optimizer.__doc__ = "\n".join([first, *parts]) + raises + errors
        return optimizer

    return show


def _arguments(doc: str) -> str:
    return inspect.cleandoc(doc).partition("Args:\n")[2]
