"""Which parameters GaLoreAdamW can project, and on which side."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import Any

import torch

from megaopt.kernels.matrix.galore import LEFT, LowRank
from megaopt.kernels.step.table import is_capturing
from megaopt.options.checks import refuse, same
from megaopt.params import ParamView, view_of
from megaopt.params.dtensor import DTensorView
from megaopt.state.owned import Owned

FLATTENED_BY_FSDP1 = "_fsdp_flattened"
"""What FullyShardedDataParallel says of its flat parameters, and of views into them."""


def check_of_all(options: Any, name: str, value: Any, where: str) -> None:
    """Raises ValueError for a group's key that is an option of the optimizer, or none at all.

    Args:
        options: the optimizer's.
        name: the key.
        value: what the group has there.
        where: what an error calls the group.
    """
    if not hasattr(options, name):
        refuse(f"{where}: {name}", "left out: its name here is bias_correction", value)
    own = getattr(options, name)
    if not same(value, own):
        refuse(f"{where}: {name}", f"{own!r}, the optimizer's own argument", value)


def check_matrix(param: torch.Tensor, rank: int, name: str, which: str) -> None:
    """Raises ValueError for a parameter that cannot have a rank.

    Args:
        param: of a group with a rank.
        rank: the group's.
        name: what an error calls the rank.
        which: what it calls the parameter.
    """
    if type(view_of(param)) not in (ParamView, DTensorView):
        refuse(
            name, f"None beside {which}, a {type(param).__name__}: only plain matrices and "
            "DTensors are projected yet", rank,
        )  # fmt: skip
    is_flat = len(getattr(param, "megaopt_whole_shape", ())) == 2
    if is_flat or getattr(param, FLATTENED_BY_FSDP1, False):
        refuse(name, f"None beside {which}, a {FLAT}", rank)


FLAT = (
    "flat part of a matrix, which has neither its rows nor its columns; FSDP2 (fully_shard) splits "
    "matrices by rows"
)


def check_split(
    param: Any, low_rank: LowRank, proj_type: str, refresh: str, where: str, which: str
) -> None:
    """Raises ValueError for a matrix that ranks would have to meet for in every step.

    Args:
        param: that is projected.
        low_rank: how.
        proj_type: that asked for it.
        refresh: the optimizer's.
        where: what an error calls the group.
        which: what it calls the parameter.
    """
    view = view_of(param)
    if view.split is None:
        return
    dims = view.split[1]
    if len(dims) > 1 or not param.placements[dims[0]].is_shard(0):
        refuse(
            f"{where}: rank", f"None beside {which}, a DTensor of placements "
            f"{tuple(param.placements)}: Shard(0) on one dimension of its mesh, Replicate() on "
            "others", low_rank.rank,
        )  # fmt: skip
    shape = tuple(param.shape)
    if low_rank.side == LEFT:
        refuse(
            f"{where}: proj_type", f"'auto' or 'right' for {which}, of shape {shape}, whose rows "
            "are split over ranks: projected on the left, they would have to add up the projected "
            "gradient in every step", proj_type,
        )  # fmt: skip
    if refresh == "svd":
        refuse(
            "refresh", f"'subspace' for {which} of {where}, of shape {shape}, whose rows are split "
            "over ranks: none has the gradient for an SVD", refresh,
        )  # fmt: skip


def check_not_flattened(groups: Iterable[Mapping[str, Any]], known: Container[int]) -> None:
    """Raises ValueError where others put flat tensors in the place of matrices.

    So do optimizers around this one (DeepSpeed's ZeRO, Megatron's distributed optimizer), and a
    flat tensor does not say what it was.

    Args:
        groups: the optimizer's.
        known: id() of each parameter that it was given.
    """
    for index, group in enumerate(groups):
        params, rank = group["params"], group.get("rank")
        if rank is None or not params or any(param.dim() != 1 for param in params):
            continue
        if not any(id(param) in known for param in params):
            refuse(
                f"group {index}: rank", "None beside tensors of one dimension that were put in the "
                f"place of the parameters given: each may be a {FLAT}", rank,
            )  # fmt: skip


def check_refresh(owned: Owned, steps: int | None) -> None:
    """Raises ValueError or RuntimeError where GaLoreAdamW.refresh has no place."""
    if not owned.options.capturable:
        raise RuntimeError(
            "refresh() is for capturable=True, got capturable=False, where step() makes "
            "projections anew itself"
        )
    if is_capturing(owned.device):
        raise RuntimeError(
            "refresh() must be called between replays, got a CUDA graph that is being captured: "
            "it would repeat the refresh in every replay"
        )
    if steps is not None and (type(steps) is not int or steps < 0):
        refuse("steps", "None or a whole number >= 0", steps)
