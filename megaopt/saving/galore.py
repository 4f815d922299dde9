"""State dicts of galore_torch's AdamW."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from megaopt.kernels.matrix.galore import PROJECTION
from megaopt.options.checks import refuse

PROJECTOR = "projector"
"""Key of galore_torch's states: an object that has the projection, as ortho_matrix."""


def from_galore_torch(state_dict: Any) -> Any:
    """A state dict of galore_torch's in this package's names; anything else as it is.

    Its arguments stay as they are. Raises ValueError for a projection on both sides.
    """
    if not isinstance(state_dict, Mapping):
        return state_dict
    states, groups = state_dict.get("state"), state_dict.get("param_groups")
    if not isinstance(states, Mapping) or not isinstance(groups, (list, tuple)):
        return state_dict
    named = {key: _state(own, f"state {key!r}") for key, own in states.items()}
    return {**state_dict, "state": named, "param_groups": [_group(each) for each in groups]}


def _state(own: Any, where: str) -> Any:
    if not isinstance(own, Mapping) or PROJECTOR not in own:
        return own
    matrix = getattr(own[PROJECTOR], "ortho_matrix", None)
    rest = {name: value for name, value in own.items() if name != PROJECTOR}
    if matrix is None:
        return rest
    if not isinstance(matrix, torch.Tensor):
        refuse(f"{where}: {PROJECTOR!r}", "one of type std, reverse_std, right or left", matrix)
    return {**rest, PROJECTION: matrix}


def _group(group: Any) -> Any:
    if not isinstance(group, Mapping) or "correct_bias" not in group:
        return group
    rest = {name: value for name, value in group.items() if name != "correct_bias"}
    return {**rest, "bias_correction": group["correct_bias"]}
