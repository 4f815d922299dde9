"""Refusals of what a user gives: they name a value, say what is allowed, and show it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

import torch

LONGEST = 120
"""Characters of a value that a message shows."""
MOST = 20
"""Names that a message shows."""


def refuse(name: str, allowed: str, value: object) -> NoReturn:
    """Raises ValueError: names a value, says what it must be, and shows what it is."""
    raise ValueError(f"{name} must be {allowed}, got {shown(value)}")


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


def is_dense(value: Any) -> bool:
    """Checks for a tensor with a shape and elements in memory: not sparse, not nested."""
    if not isinstance(value, torch.Tensor):
        return False
    return value.layout == torch.strided and not value.is_nested
