"""Checks of what a user gives: a refusal names a value, says what is allowed, and shows it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from numbers import Real
from typing import Any, NamedTuple, NoReturn

import torch

from megaopt.kernels.rules.base import round_to_fp32

LONGEST = 120
"""Characters of a value that a message shows."""
MOST = 20
"""Names that a message shows."""

LAST_STEP = 2**31 - 2
"""The largest step count after which one more step still has an int32 number."""

NUMBERS = {
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
}
"""Dtypes of a tensor that stands for a number."""


def refuse(name: str, allowed: str, value: object) -> NoReturn:
    """Raises ValueError: names a value, says what it must be, and shows what it is."""
    raise ValueError(f"{name} must be {allowed}, got {shown(value)}")


@contextmanager
def errors_of(where: str) -> Iterator[None]:
    """Puts this, and a colon, before the message of a ValueError that is raised within."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def shown(value: object) -> str:
    """A value as a message shows it: whatever it is, and short."""
    try:
        if isinstance(value, torch.Tensor) and value.is_nested:
            return f"a nested {value.dtype} tensor on {value.device}"
        if isinstance(value, torch.Tensor) and (value.is_meta or value.numel() != 1):
            kind = "" if value.layout == torch.strided else f" ({value.layout})"
            return f"a {value.dtype} tensor of shape {tuple(value.shape)} on {value.device}{kind}"
        text = repr(value)
    except Exception:  # its own code fails, or it is an int too long to print
        return f"a value of type {type(value).__name__}"
    text = " ".join(text.split()) if "\n" in text else text
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def listed(names: Iterable[object]) -> str:
    """The first names in a row; what is no text as `shown` shows it."""
    texts = [name if isinstance(name, str) else shown(name) for name in names]
    return ", ".join(texts[:MOST]) + (", ..." if len(texts) > MOST else "")


def same(value: object, allowed: object) -> bool:
    """Checks that a value is the allowed one, of its type: 1 is not True, an array is no text."""
    return value is allowed or (isinstance(value, type(allowed)) and value == allowed)


def one_of(name: str, value: object, allowed: Iterable[object]) -> None:
    """Raises ValueError unless the value is one of those allowed."""
    allowed = list(allowed)
    if not any(same(value, choice) for choice in allowed):
        several = "one of " if len(allowed) > 1 else ""
        refuse(name, several + ", ".join(map(str, allowed)), value)


class Range(NamedTuple):
    """The numbers that are allowed, in words and as a function of the fp64."""

    allowed: str
    holds: Callable[[float], bool]


NOT_NEGATIVE = Range(
    "a finite number >= 0 in fp32", lambda value: value >= 0 and round_to_fp32(value) < math.inf
)
POSITIVE = Range("a finite number > 0 in fp32", lambda value: 0 < round_to_fp32(value) < math.inf)
DECAY = Range("a number >= 0 and < 1", lambda value: 0 <= value < 1)
COUNT = Range(
    f"a whole number from 0 to {LAST_STEP}",
    lambda value: 0 <= value <= LAST_STEP and value.is_integer(),
)


def number(name: str, value: Any, allowed: Range) -> float:
    """A number, or tensor of one, as a Python float; ValueError for anything else.

    A tensor that requires a gradient is refused, as the step gives it none.
    """
    as_float: float | None = None  # None: no real number, or too large for fp64
    if isinstance(value, torch.Tensor):
        is_known = is_dense(value) and not value.is_meta and not value.requires_grad
        if is_known and value.dtype in NUMBERS and value.numel() == 1:
            as_float = float(value)
    # Real is slow to ask, and each step asks
    elif not isinstance(value, bool) and isinstance(value, (float, int, Real)):
        with suppress(OverflowError, TypeError, ValueError):
            as_float = float(value)
    if as_float is None or not allowed.holds(as_float):
        refuse(name, allowed.allowed, value)
    return as_float


def is_dense(value: Any) -> bool:
    """Checks for a tensor with a shape and elements in memory: not sparse, not nested."""
    if not isinstance(value, torch.Tensor):
        return False
    return value.layout == torch.strided and not value.is_nested


def has_shared_elements(tensor: torch.Tensor) -> bool:
    """Whether elements of a tensor lie in one place, as expand makes them."""
    return any(s == 0 and n > 1 for s, n in zip(tensor.stride(), tensor.shape, strict=True))
