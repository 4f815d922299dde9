"""Gradients: which a step can read, and which it may write."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch

from megaopt.kernels.formats import GRADS
from megaopt.kernels.refusals import is_dense
from megaopt.kernels.shards import local_of
from megaopt.options.checks import has_shared_elements
from megaopt.params.dtensor import check_sharding
from megaopt.state.watch import is_plain_class


def check_written_grads(grads: Sequence[torch.Tensor | None], labels: Sequence[str]) -> None:
    """Raises ValueError where unscaled gradients could not take the place of the scaled ones."""
    # where each gradient begins: two at one address would both be written
    owners: dict[int, str] = {}
    for grad, where in zip(grads, labels, strict=True):
        if grad is None or grad.numel() == 0:
            continue
        prefix = f"{where}: with write_unscaled_grads=True the gradient must"
        if has_shared_elements(grad):
            raise ValueError(
                f"{prefix} have memory of its own for each element, got strides {grad.stride()} "
                f"of shape {tuple(grad.shape)}"
            )
        if grad.is_inference():
            raise ValueError(f"{prefix} be no inference tensor, got one")
        owner = owners.setdefault(grad.data_ptr(), where)
        if owner is not where:
            raise ValueError(f"{prefix} be in memory of its own, got that of {owner}'s")


def resolved(grad: Any) -> Any:
    """A gradient that was waited for, and has no sign pending; anything else as it is."""
    # looked up, not imported: nobody has such a gradient who has not imported it
    collectives = sys.modules.get("torch.distributed._functional_collectives")
    if collectives is not None and isinstance(grad, collectives.AsyncCollectiveTensor):
        grad = grad.wait()
    if type(grad) is not torch.Tensor or grad.layout != torch.strided:
        return grad
    # ZeroTensors have no memory, and a pending negation is in no bit
    return grad.clone() if grad._is_zerotensor() else grad.resolve_neg()


def check_grad(grad: torch.Tensor, param: torch.Tensor, where: str) -> None:
    """Raises ValueError for a gradient that the step cannot read."""
    if not isinstance(grad, torch.Tensor):
        raise ValueError(f"{where}: the gradient must be a torch.Tensor, got {grad!r}")
    if not is_dense(grad):
        layout = "nested" if grad.is_nested else grad.layout
        raise ValueError(f"{where}: the gradient's layout must be torch.strided, got {layout}")
    if grad.dtype not in GRADS:
        raise ValueError(f"{where}: the gradient's dtype must be one of {GRADS}, got {grad.dtype}")
    if grad.shape != param.shape:
        raise ValueError(
            f"{where}: the gradient's shape must be the parameter's, {tuple(param.shape)}, got "
            f"{tuple(grad.shape)}"
        )
    if grad.device != param.device:
        raise ValueError(
            f"{where}: the gradient's device must be the parameter's, {param.device}, got "
            f"{grad.device}"
        )


def check_readable(grad: torch.Tensor, param: torch.Tensor, where: str) -> None:
    """Raises ValueError for a gradient that the step of a parameter cannot read."""
    check_sharding(grad, param, f"{where}: the gradient")
    check_grad(grad, param, where)
    local = local_of(grad)
    if not is_plain_class(type(local)):  # a wrapper of other tensors has no memory of its own
        raise ValueError(
            f"{where}: a gradient must be a plain torch.Tensor (or a DTensor of one), got "
            f"{type(local).__name__}"
        )
    if local_of(param) is not param:  # a shard has its own shape
        check_grad(local, local_of(param), where)
