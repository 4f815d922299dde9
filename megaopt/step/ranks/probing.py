"""What ranks with DTensors ask each other when torch.distributed.checkpoint may be asking for states.

It gives every parameter a gradient of 0, sets lr to 0, and steps; then it takes the state dict, and
loads into the states.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megaopt.params import ParamView
from megaopt.params.dtensor import local_of
from megaopt.params.view import PLAIN


def is_probe(
    views: Sequence[ParamView],
    groups: Sequence[Mapping[str, Any]],
    state: Mapping[Any, Any],
    decoupled: bool,
) -> bool:
    """Whether an optimizer's first step is such a question, on all ranks.

    Only with DTensors, as ranks that do not know of one another have to agree. All ranks meet at a
    first step with lr=0, whatever is in the state of one.

    Args:
        views: of all parameters.
        groups: the optimizer's.
        state: the optimizer's.
        decoupled: whether it reads decoupled_grad.
    """
    if not any(view.is_sharded for view in views):
        return False
    if any(group["lr"] is None or float(group["lr"]) for group in groups):
        return False
    params = [view.param for view in views]
    found = torch.tensor([not _is_asked(params, state, decoupled)], dtype=torch.int64, device="cpu")
    for mesh in _meshes(views):
        found = _most(found, mesh)
    return not bool(found)


def _is_asked(params: Sequence[Any], state: Mapping[Any, Any], decoupled: bool) -> bool:
    """Whether there is no state, and p.grad is 0 wherever there could be a gradient.

    torch.distributed.checkpoint gives p.grad, whatever the optimizer reads.
    """
    given = [param.grad for param in params if param.requires_grad]
    if any(state.values()) or not given or any(grad is None for grad in given):
        return False
    own = [getattr(param, "decoupled_grad", None) for param in params] if decoupled else []
    return all(grad is None for grad in own) and all(map(_is_zero, given))


def _is_zero(grad: Any) -> bool:
    """Whether a gradient can be read, and this rank's part of it is 0."""
    local = local_of(grad)
    return type(local) in PLAIN and local.layout == torch.strided and not bool(local.any())


def on_any_rank(flags: Sequence[bool], views: Sequence[ParamView]) -> list[bool]:
    """For each parameter whether its flag is set on any rank of its mesh; waits for the answer."""
    found = torch.tensor(flags, dtype=torch.int64, device="cpu")
    for mesh in _meshes(views):
        own = [i for i, v in enumerate(views) if v.is_sharded and v.param.device_mesh == mesh]
        found[own] = _most(found[own], mesh).cpu()
    return [bool(flag) for flag in found.tolist()]


def _meshes(views: Sequence[ParamView]) -> list[Any]:
    return list(dict.fromkeys(view.param.device_mesh for view in views if view.is_sharded))


def _most(numbers: torch.Tensor, mesh: Any) -> torch.Tensor:
    """The largest of all ranks of a mesh, on its device."""
    numbers = numbers.to(mesh.device_type)
    for dim in range(mesh.ndim):
        if mesh.size(dim) > 1:
            dist.all_reduce(numbers, dist.ReduceOp.MAX, group=mesh.get_group(dim))
    return numbers
