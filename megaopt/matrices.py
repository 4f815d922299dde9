"""Optimizers with a rule for whole matrices: what they refuse to take for one."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import torch

from megaopt.optimizer import FusedOptimizer
from megaopt.options.checks import refuse
from megaopt.state.owned import Group, Owned

FLATTENED_BY_FSDP1 = "_fsdp_flattened"
"""The mark of FullyShardedDataParallel's flat parameters, and of views into them."""
FLAT = (
    "flat part of a matrix, which has neither its rows nor its columns; FSDP2 (fully_shard) splits "
    "matrices by rows"
)


def is_flat_part(param: torch.Tensor) -> bool:
    """Whether a tensor is marked as a part of matrices without their rows and columns."""
    is_part = len(getattr(param, "megaopt_whole_shape", ())) >= 2
    return is_part or getattr(param, FLATTENED_BY_FSDP1, False)


class MatrixOptimizer(FusedOptimizer):
    """Refuses flat tensors that others put in the place of matrices.

    So do optimizers around this one (DeepSpeed's ZeRO, Megatron's distributed optimizer), and a
    flat tensor does not say what it was.
    """

    _given: set[int] | None = None
    """id() of each parameter that it was given; None in copies, which do not know."""

    def __init__(self, *arguments: Any) -> None:
        self._given = set()
        super().__init__(*arguments)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, as FusedAdam does."""
        super().add_param_group(param_group)
        if self._given is not None:
            self._given.update(map(id, self.param_groups[-1]["params"]))

    def _check(self, owned: Owned, places: Iterable[int]) -> None:
        for index, group in enumerate(owned.groups if self._given is not None else ()):
            self._check_not_flattened(group, self._given or (), f"group {index}")
        super()._check(owned, places)

    def _check_not_flattened(self, group: Group, given: Container[int], where: str) -> None:
        params, (key, off) = group["params"], self.options.MATRIX_OFF
        is_flat = bool(params) and all(param.dim() == 1 for param in params)
        if is_flat and group.get(key) is not off and not any(id(p) in given for p in params):
            refuse(
                f"{where}: {key}", f"{off} beside tensors of one dimension that were put in the "
                f"place of the parameters given: each may be a {FLAT}", group.get(key),
            )  # fmt: skip
