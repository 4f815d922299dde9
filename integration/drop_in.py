"""Shows and checks the arguments of another library's optimizers, from a table of each."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, ClassVar

from megaopt.optimizer import FusedOptimizer
from megaopt.options.checks import one_of

PACKAGE = "megaopt.integration."


class _Face:
    """The signature of a class that has no constructor of its own."""

    def __get__(self, instance: object, kind: Any) -> inspect.Signature | None:
        is_ours = kind.__init__.__module__.startswith(PACKAGE) and hasattr(kind, "_face")
        return kind._face if is_ours else None


class DropIn(FusedOptimizer):
    """Takes the arguments of another library's optimizer; the bits are this package's.

    A subclass names them, with their defaults, as its face. Those that are no arguments of the
    optimizer of this package that it stands for, `_options` translates.
    """

    __signature__ = _Face()
    _face: ClassVar[inspect.Signature]
    _keywords: tuple[str, ...] = ("seed",)
    """Arguments that are given by name alone."""
    _allowed: ClassVar[dict[str, tuple[Any, ...]]] = {}
    """Names, of arguments that may have few values, these."""
    _shared: ClassVar[str] = ""
    """Ends each class's docstring: the same for all of the library's optimizers."""
    _fixed: ClassVar[dict[str, Any]] = {}
    """Options of this package's optimizer that are the same for all of the class."""

    def __init_subclass__(cls, face: Mapping[str, Any] | None = None, **more: Any) -> None:
        super().__init_subclass__(**more)
        kind = inspect.Parameter
        if face is not None:
            found = [kind("params", kind.POSITIONAL_OR_KEYWORD)]
            for name, default in face.items():
                by_name = name in cls._keywords
                how = kind.KEYWORD_ONLY if by_name else kind.POSITIONAL_OR_KEYWORD
                found.append(kind(name, how, default=default))
            cls._face = inspect.Signature(found)
        if cls.__module__.startswith(PACKAGE) and hasattr(cls, "_face"):
            cls.__doc__ = f"{inspect.cleandoc(cls.__doc__ or '')}\n\n{cls._shared}"

    def __init__(self, *arguments: Any, **named: Any) -> None:
        bound = self._face.bind(*arguments, **named)
        bound.apply_defaults()
        given = bound.arguments
        for name, allowed in self._allowed.items():
            if name in given:
                one_of(name, given[name], allowed)
        init: Any = super().__init__
        init(given.pop("params"), **{**self._options(given), **self._fixed})

    def _options(self, given: dict[str, Any]) -> dict[str, Any]:
        """Arguments of this package's optimizer; ValueError for what is not here."""
        return given

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over a state dict of this package's, of torch's or of the library's optimizer.

        The library's moments of 8 or 4 bits are read as fp32 values and stored in the formats here,
        to nearest; others likewise, exactly where the format is as wide.

        Raises:
            ValueError: as megaopt.FusedAdam.load_state_dict; codes without their map or scales.
                Nothing has changed then.
        """
        super().load_state_dict(self._read(state_dict))

    def _read(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """The library's state dict in this package's names; anything else as it is."""
        return state_dict
