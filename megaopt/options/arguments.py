"""The arguments of constructors: made into Options, and shown by help() and inspect.signature."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar

from megaopt.kernels.refusals import one_of, refuse, shown
from megaopt.options.choices import MasterWeights
from megaopt.options.options import FLAGS, OF_OPTIMIZERS, Options

Kind = TypeVar("Kind", bound=Options)

USUAL = (
    "rank update_proj_gap scale proj_type dtype weight_rounding nonfinite capturable seed backend"
)
"""The arguments by name that are used most: behind the positional ones they make ten."""
THEMES = {
    "Args: the rule": "bias_correction adam_w_mode decoupled_weight_decay betas adam_eps method "
    "precision second_moment kernel refresh stagger contract maximize",
    "Args: masters, formats and rounding": "master_weights master_weight_dtype weight_rounding "
    "store_param_remainders momentum_buffer_dtype exp_avg_dtype exp_avg_sq_dtype seed direct_cast",
    "Args: gradients": "nonfinite use_decoupled_grad round_scaled_grads write_unscaled_grads",
    "Args: states and steps": "makes_states step_counts state_device replicas on_external_write "
    "capturable backend",
}
"""The arguments that docstrings list behind these ten, by theme."""


def options_of(
    optimizer: Any, kind: type[Kind], arguments: Mapping[str, Any]
) -> tuple[dict[str, Any], Kind, MasterWeights]:
    """Sorts a constructor's arguments; sets use_decoupled_grad on the optimizer.

    Args:
        optimizer: the one that is being made.
        kind: the class of its options.
        arguments: the arguments by name, as locals() has them: `options` is the dict of those of
            SharedOptions or StepOptions. Other names are left out.

    Returns:
        The numbers of groups, the options, and master_weights.

    Raises:
        TypeError: options have a name that the optimizer does not take.
        ValueError: an option is out of its range, or contradicts another.
    """
    # other names would pass silently through **options
    for name, value in arguments["options"].items():
        if name not in kind.ARGUMENTS:
            allowed = ", ".join(kind.ARGUMENTS)
            more = " (groups have it)" if name in kind.MATRIX_KEYS else ""
            raise TypeError(f"argument {name!r}{more} must be one of {allowed}, got {shown(value)}")

    # fields of the options: arguments of their own, then those of **options
    kind_values = {
        field.name: arguments[field.name] for field in fields(kind) if field.name in arguments
    }
    values: dict[str, Any] = {**OF_OPTIMIZERS, **kind_values, **arguments["options"]}
    # names of torch's that change nothing here
    one_of("differentiable", values.pop("differentiable"), [False])
    for name in ("foreach", "fused"):
        value = values.pop(name)
        if value is not None and not isinstance(value, bool):
            refuse(name, "None, True or False", value)

    # masters belong to the optimizer and not to its options: a list of tensors, maybe
    masters = values.pop("master_weights")
    decoupled = values.pop("use_decoupled_grad")
    one_of("use_decoupled_grad", decoupled, FLAGS)
    optimizer.use_decoupled_grad = decoupled

    options = kind(**values)
    # lr, betas and so on: the defaults of groups
    numbers = {n: arguments[n] for n in options.names_but_step if n in arguments}
    betas = numbers.get("betas")
    if isinstance(betas, Sequence) and not isinstance(betas, (list, tuple, str)):
        numbers["betas"] = tuple(betas)  # a configuration library's list, such as Hydra's
    return numbers, options, masters


def show_options(optimizer: type, kind: type[Options], *shared: type) -> None:
    """Shows each of an optimizer's **options in its class's signature and docstring, by theme.

    kind: the class of its options. shared: SharedOptions, and what is based on it.
    """
    # the signature without **options, which is its last parameter
    init: Any = vars(optimizer)["__init__"]
    signature = inspect.signature(init)
    *parameters, _ = signature.parameters.values()
    defaults = {**OF_OPTIMIZERS, **{field.name: field.default for field in fields(kind)}}
    for name, annotation in shared[-1].__annotations__.items():
        # forward references as text, as the annotations of others are
        text = getattr(annotation, "__forward_arg__", annotation)
        parameters.append(
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=defaults[name], annotation=text
            )
        )
    init.__signature__ = signature.replace(parameters=parameters)
    # what the constructor takes beside self and params
    kind.ARGUMENTS = tuple(parameter.name for parameter in parameters[2:])
    if optimizer.__doc__:
        # the class's argument docs and those of the shared options, by name
        first, raises, errors = inspect.cleandoc(optimizer.__doc__).partition("\n\nRaises:")
        docs = [first, *(inspect.cleandoc(options.__doc__ or "") for options in shared)]
        entries = "\n".join(doc.partition("Args:\n")[2] for doc in docs)
        texts = {
            entry.partition(":")[0]: entry.rstrip()
            for entry in re.split(r"^    (?=\w+: )", entries, flags=re.MULTILINE)
        }
        # ten come first, then the rest by theme
        positional = [p.name for p in parameters[1:] if p.kind is p.POSITIONAL_OR_KEYWORD]
        usual = [*positional, *(name for name in USUAL.split() if name in texts)][:10]
        shown_doc = first.partition("\n\nArgs:\n")[0]
        for title, names in {"Args:": " ".join(usual), **THEMES}.items():
            section = [texts.pop(name) for name in names.split() if name in texts]
            if section:
                shown_doc = "\n    ".join([f"{shown_doc}\n\n{title}", *section])
        optimizer.__doc__ = shown_doc + raises + errors
