"""The arguments of constructors: made into Options, and shown by help() and inspect.signature."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar

from megaopt.options.checks import one_of, refuse, shown
from megaopt.options.choices import MasterWeights
from megaopt.options.options import FLAGS, OF_OPTIMIZERS, Options

Kind = TypeVar("Kind", bound=Options)
Class = TypeVar("Class", bound=type)


def options_of(
    optimizer: Any, kind: type[Kind], given: Mapping[str, Any]
) -> tuple[dict[str, Any], Kind, MasterWeights]:
    """Sorts a constructor's arguments; sets use_decoupled_grad on the optimizer.

    Args:
        optimizer: that is being made.
        kind: of its options.
        given: the arguments by name, as locals() has them: `options` is the dict of those of
            SharedOptions or StepOptions. Other names are left out.

    Returns:
        The numbers of groups, the options, and master_weights.

    Raises:
        TypeError: options have a name that the optimizer does not take.
        ValueError: an option is out of its range, or contradicts another.
    """
    for name, value in given["options"].items():
        if name not in kind.ARGUMENTS:
            allowed = ", ".join(kind.ARGUMENTS)
            more = " (groups have it)" if name in kind.MATRIX_KEYS else ""
            raise TypeError(f"argument {name!r}{more} must be one of {allowed}, got {shown(value)}")
    own = {field.name: given[field.name] for field in fields(kind) if field.name in given}
    found: dict[str, Any] = {**OF_OPTIMIZERS, **own, **given["options"]}
    one_of("differentiable", found.pop("differentiable"), [False])
    for name in ("foreach", "fused"):
        value = found.pop(name)
        if value is not None and not isinstance(value, bool):
            refuse(name, "None, True or False", value)
    masters = found.pop("master_weights")
    decoupled = found.pop("use_decoupled_grad")
    one_of("use_decoupled_grad", decoupled, FLAGS)
    optimizer.use_decoupled_grad = decoupled
    options = kind(**found)
    numbers = {n: given[n] for n in options.names_but_step if n in given}
    betas = numbers.get("betas")
    if isinstance(betas, Sequence) and not isinstance(betas, (list, tuple, str)):
        numbers["betas"] = tuple(betas)  # a configuration library's list, such as Hydra's
    return numbers, options, masters


def takes(kind: type[Options], *shared: type) -> Callable[[Class], Class]:
    """Shows each of an optimizer's **options in its class's signature and docstring.

    kind: of its options. shared: SharedOptions, and what is based on it.
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
            docs = [inspect.cleandoc(each.__doc__ or "") for each in shared]
            parts = [doc.partition("Args:\n")[2] for doc in docs]
            optimizer.__doc__ = "\n".join([first, *parts]) + raises + errors
        return optimizer

    return show
