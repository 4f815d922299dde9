"""torch.amp.GradScaler as an argument of step, as TransformerEngine and apex take it.

A GradScaler passes itself to a step that has an argument of this name (with torch's FutureWarning),
and leaves it to the step to look for infinities and to unscale.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.amp.grad_scaler import OptState

from megaopt.options.options import PEERS_WITH_SCALERS


def passed_on(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of megaopt.FusedAdam for a peer's: of the constructor's locals()."""
    left_out = ("self", "__class__", "set_grad_none")
    return {**PEERS_WITH_SCALERS, **{n: arguments[n] for n in arguments if n not in left_out}}


def step_with(
    optimizer: Any,
    step: Callable[[], Any],
    grad_scaler: torch.amp.GradScaler | None,
    peer: str,
) -> Any:
    """Steps with the scaler's scale and the infinities that it finds, all on the device.

    Args:
        optimizer: the megaopt.FusedAdam whose step it is; under capturable.
        step: takes no argument; what it returns is returned.
        grad_scaler: None steps as if there were none.
        peer: in whose place the optimizer is, for messages.

    Raises:
        ValueError: a scaler without capturable, which the peers ignore in silence.
    """
    if grad_scaler is None:
        return step()
    if not optimizer.options.capturable:
        raise ValueError(
            f"grad_scaler must be None with capturable=False, where {peer} ignores it and steps "
            f"with the scaled gradients, got {grad_scaler!r}; grad_scaler.step(optimizer) unscales "
            "before the step"
        )
    if not isinstance(grad_scaler, torch.amp.GradScaler):
        raise ValueError(f"grad_scaler must be a torch.amp.GradScaler, got {grad_scaler!r}")
    if not grad_scaler.is_enabled():
        return step()
    # what the step reads, as torch sets it where the step has no argument for the scaler
    scaler: Any = grad_scaler
    is_unscaled = scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.UNSCALED
    infs_by_device = scaler._check_inf_per_device(optimizer)
    scale = scaler._get_scale_async()
    optimizer.grad_scale = None if is_unscaled else scale
    overflows = (overflow.to(scale.device) for overflow in infs_by_device.values())
    optimizer.found_inf = sum(overflows, scale.new_zeros(()))
    try:
        return step()
    finally:
        del optimizer.grad_scale, optimizer.found_inf
