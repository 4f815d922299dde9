"""Optimizers that take another library's arguments: what their names and arguments stand for.

Each name is a class statement, in a module for each library, which says all of it: the optimizer of
this package, the arguments with their defaults in order (`takes`), what values of arguments stand
for (`means`), and options that are fixed.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, TypedDict

import torch
from typing_extensions import Unpack

from megaopt.kernels.refusals import one_of
from megaopt.optimizer import FusedOptimizer

PACKAGE = "megaopt.integration."
Meanings = Mapping[str, Mapping[Any, Mapping[str, Any]]]
"""The options of this package that each value of an argument stands for; others are refused."""

ADAM = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0, "amsgrad": False}
ADAMW = {**ADAM, "weight_decay": 1e-2}
"""torch's arguments of Adam and AdamW, as torchao, bitsandbytes and galore_torch have them."""
IN_BLOCKS = {"exp_avg_dtype": "block_e4m3", "exp_avg_sq_dtype": "block_e5m3"}
IN_BLOCKS |= {"momentum_buffer_dtype": "block_e4m3"}
"""Moments of 8 bits, of whatever rule."""


class DropInOptions(TypedDict, total=False):
    """The arguments of all these optimizers, for type checkers; a name's own are in `takes`."""

    lr: float | torch.Tensor
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    momentum: float
    dampening: float
    nesterov: bool
    amsgrad: bool
    optim_bits: int
    args: Any
    min_8bit_size: int
    is_paged: bool
    percentile_clipping: int
    block_wise: bool
    decouple_lr: bool
    quantize: bool
    compress_state_dict: bool
    master_weight_bits: int | None
    check_numerics: bool
    fused: bool
    block_size: int
    bf16_stochastic_round: bool
    seed: int


class DropIn(FusedOptimizer):
    """Takes the arguments of another library's optimizer; the bits are this package's.

    Arguments that this package's optimizer has too go to it, and so do the options that others
    stand for. A library's direct subclass documents its arguments.
    """

    __signature__: ClassVar[inspect.Signature | None] = None
    _takes: ClassVar[inspect.Signature]
    _means: ClassVar[Meanings] = {}
    _fixed: ClassVar[Mapping[str, Any]] = {}

    def __init_subclass__(
        cls, takes: Mapping[str, Any] | None = None, means: Meanings | None = None, **fixed: Any
    ) -> None:
        """Reads a row.

        Args:
            takes: arguments and their defaults in order; behind "*" they are given by name alone.
                None: those of the base.
            means: what values of arguments stand for, beside what the base says.
            fixed: options of this package's optimizer, likewise.
        """
        super().__init_subclass__()
        cls._means, cls._fixed = {**cls._means, **(means or {})}, {**cls._fixed, **fixed}
        if "__init__" in vars(cls):
            cls.__signature__ = None
        if takes is not None:
            kind: Any = inspect.Parameter.POSITIONAL_OR_KEYWORD
            parameters = [inspect.Parameter("params", kind)]
            for name, default in takes.items():
                if name == "*":
                    kind = inspect.Parameter.KEYWORD_ONLY
                    continue
                text = DropInOptions.__annotations__[name].__forward_arg__
                parameters.append(inspect.Parameter(name, kind, default=default, annotation=text))
            cls._takes = cls.__signature__ = inspect.Signature(parameters)
        # help() shows the library's arguments behind what a class of this package is
        doc = str(cls.__doc__)
        library = next(base for base in cls.__mro__ if DropIn in base.__bases__)
        if cls.__module__.startswith(PACKAGE) and library is not cls and "Args:" not in doc:
            cls.__doc__ = f"{doc}\n\n{inspect.cleandoc(str(library.__doc__))}"

    def __init__(
        self, params: Iterable[Any], *arguments: Any, **options: Unpack[DropInOptions]
    ) -> None:
        bound = self._takes.bind(params, *arguments, **options)
        bound.apply_defaults()
        keywords = dict(bound.arguments)
        for name, meanings in self._means.items():
            if name in bound.arguments:
                value = bound.arguments[name]
                one_of(name, value, meanings)
                keywords |= meanings[value]
        keywords |= {**self._translated(bound.arguments), **self._fixed}
        init = super().__init__
        parameters: Any = inspect.signature(init).parameters
        init(**{name: value for name, value in keywords.items() if name in parameters})

    def _translated(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """The options that the arguments ask for; raises ValueError for what is not here."""
        return {}
