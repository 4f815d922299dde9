"""The engine of `megaopt galore test` and `muon test`: errors against fp64, and verdicts."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from rich.console import Console
from rich.text import Text

from megaopt.lab import exits
from megaopt.lab.console import coloured

VERDICTS: dict[bool, str | Text] = {True: "within", False: coloured("red", "BEYOND")}
"""Cells of a table, by whether an error is within its bound."""


def current_device() -> torch.device:
    """The GPU at hand, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def distance(tensors: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]) -> float:
    """The norm of all differences from fp64 tensors together."""
    pairs = zip(tensors, exact, strict=True)
    return math.sqrt(
        sum(float((tensor.double() - truth).square().sum()) for tensor, truth in pairs)
    )


def conclude(console: Console, wrong: str | None, right: str) -> int:
    """Prints what is wrong, or that nothing is; returns the exit status."""
    style = "green" if wrong is None else "red"
    console.print(wrong or right, soft_wrap=True, highlight=False, style=style)
    return exits.DONE if wrong is None else exits.DIFFERENT
