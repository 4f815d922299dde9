"""Optimizers that take another library's arguments, from a table of their names and defaults."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, TypedDict

import torch

from megaopt.optimizer import FusedOptimizer
from megaopt.options.checks import one_of

PACKAGE = "megaopt.integration."

IN_BLOCKS = {"exp_avg_dtype": "block_e4m3", "exp_avg_sq_dtype": "block_e5m3"}
IN_BLOCKS |= {"momentum_buffer_dtype": "block_e4m3"}
"""Moments of 8 bits, of whatever rule."""


class DropInOptions(TypedDict, total=False):
    """Arguments that most of these optimizers have."""

    lr: float | torch.Tensor
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    seed: int


class DropIn(FusedOptimizer):
    """Takes the arguments of another library's optimizer; the bits are this package's.

    A class statement gives their names and defaults in order (`takes`), and the options of this
    package's optimizer that are fixed. Arguments that it has too go to it.
    """

    __signature__: ClassVar[inspect.Signature | None] = None
    _signature: ClassVar[inspect.Signature]
    _library: ClassVar[Any]
    """The TypedDict of the library's arguments, whose docstring ends each class's."""
    _keywords: ClassVar[tuple[str, ...]] = ("seed",)
    """Arguments that are given by name alone."""
    _only: ClassVar[dict[str, tuple[Any, ...]]] = {}
    """The values that arguments may have."""
    _fixed: ClassVar[dict[str, Any]] = {}

    def __init_subclass__(cls, takes: Mapping[str, Any] | None = None, **fixed: Any) -> None:
        super().__init_subclass__()
        kind = inspect.Parameter
        if "__init__" in vars(cls):
            cls.__signature__ = None
        if takes is not None:
            cls._fixed, parameters = fixed, [kind("params", kind.POSITIONAL_OR_KEYWORD)]
            for name, default in takes.items():
                how = kind.KEYWORD_ONLY if name in cls._keywords else kind.POSITIONAL_OR_KEYWORD
                text = cls._library.__annotations__[name].__forward_arg__
                parameters.append(kind(name, how, default=default, annotation=text))
            cls._signature = cls.__signature__ = inspect.Signature(parameters)
        if cls.__module__.startswith(PACKAGE) and hasattr(cls, "_signature"):
            cls.__doc__ = f"{cls.__doc__}\n\n{inspect.cleandoc(cls._library.__doc__)}"

    def __init__(self, params: Iterable[Any], *arguments: Any, **options: Any) -> None:
        bound = self._signature.bind(params, *arguments, **options)
        bound.apply_defaults()
        values = bound.arguments
        for name, allowed in self._only.items():
            if name in values:
                one_of(name, values[name], allowed)
        keywords, init = {**values, **self._translated(values), **self._fixed}, super().__init__
        parameters: Any = inspect.signature(init).parameters
        init(**{name: value for name, value in keywords.items() if name in parameters})

    def _translated(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """The options that the arguments ask for; raises ValueError for what is not here."""
        return {}
