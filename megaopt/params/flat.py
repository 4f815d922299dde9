"""Flat parts of matrices, which rules for whole matrices do not step."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch

from megaopt.float8.shard import Float8Shard
from megaopt.options.checks import refuse
from megaopt.options.options import Options

FLATTENED_BY_FSDP1 = "_fsdp_flattened"
"""The mark of FullyShardedDataParallel's flat parameters, and of views into them."""
FLAT = (
    "flat part of a matrix, which has neither its rows nor its columns; FSDP2 (fully_shard) splits "
    "matrices by rows"
)


def is_flat_part(param: torch.Tensor) -> bool:
    """Whether a tensor is a part of matrices without their rows and columns, or marked as one."""
    whole = getattr(param, "megaopt_whole_shape", ())
    if isinstance(param, Float8Shard):
        whole = param.weight.shape
    return len(whole) >= 2 or getattr(param, FLATTENED_BY_FSDP1, False)


def check_not_flattened(
    groups: Sequence[Mapping[str, Any]], given: Container[int], options: Options
) -> None:
    """Raises ValueError where others put flat tensors in the place of matrices.

    So do optimizers around this one (DeepSpeed's ZeRO, Megatron's distributed optimizer), and a
    flat tensor does not say what it was. given: id() of each parameter that the optimizer was
    given.
    """
    key, off = options.MATRIX_OFF
    for index, group in enumerate(groups):
        params, value = group["params"], group.get(key)
        is_flat = bool(params) and all(param.dim() == 1 for param in params)
        if is_flat and value is not off and not any(id(param) in given for param in params):
            refuse(
                f"group {index}: {key}", f"{off} beside tensors of one dimension that were put in "
                f"the place of the parameters given: each may be a {FLAT}", value,
            )  # fmt: skip
