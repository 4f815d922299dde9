"""The ranks that hold the other parts of parameters, found by the parameters alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from megaopt.params import ParamView


class Sharers(NamedTuple):
    """Ranks that hold the other parts of some parameters."""

    device: torch.device
    split: Any
    """The mesh and its dimensions that split DTensors, or None."""
    group: Any
    """The process group of fp8 weights, or None."""


def is_exchanged(view: ParamView) -> bool:
    """Whether ranks send each other parts of a matrix in every step."""
    is_whole = view.matrix is not None and view.matrix.rule.is_whole
    return is_whole and view.split is not None


def sharers_of(views: Iterable[ParamView]) -> list[Sharers]:
    """Returns whom a rank may meet: those who hold other parts of these parameters; each once."""
    shared = [view for view in views if view.split is not None or view.group is not None]
    return [*dict.fromkeys(Sharers(view.param.device, view.split, view.group) for view in shared)]
