"""What a step asks of its gradients, and what is made of that on each device."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from megaopt.kernels.backends import BACKENDS
from megaopt.kernels.step.controls import SKIP
from megaopt.kernels.step.preparation import Measured, Request
from megaopt.options.checks import NUMBERS, POSITIVE, is_dense, number, refuse
from megaopt.state.owned import Owned
from megaopt.step.batches import Batch, Batches

Prepared = dict[torch.device, tuple[Any, Any]]
"""For each device the scalars, if they are made there, and the controls."""


def requested(
    optimizer: Any,
    skips_nonfinite: bool,
    clip_norm: float | None,
    coefficient: torch.Tensor | None,
) -> Request:
    """What a step's arguments, a GradScaler's attributes and the options ask for.

    Args:
        optimizer: GradScaler sets `grad_scale` and `found_inf` on it.
        skips_nonfinite: whether an infinity or NaN among the gradients leaves the step out.
        clip_norm: as `step` takes it.
        coefficient: as `step` takes it.
    """
    _check_clipping(clip_norm, coefficient)
    found_inf = getattr(optimizer, "found_inf", None)
    grad_scale = getattr(optimizer, "grad_scale", None)
    _check_scaler(grad_scale, found_inf)
    return Request(
        grad_scale=grad_scale,
        # a GradScaler that saw no gradient sets the number 0
        found_inf=found_inf if isinstance(found_inf, torch.Tensor) else None,
        coefficient=coefficient,
        clip_norm=None if clip_norm is None else float(clip_norm),
        skip_nonfinite=skips_nonfinite,
    )


def _check_clipping(clip_norm: Any, coefficient: Any) -> None:
    """Raises ValueError for a step's arguments that are not allowed."""
    if clip_norm is not None:
        if isinstance(clip_norm, torch.Tensor):
            refuse("clip_norm", "a number of the host; clip_coefficient may be a tensor", clip_norm)
        number("clip_norm", clip_norm, POSITIVE)
    if coefficient is None:
        return
    if not _is_one(coefficient, {torch.float32}):
        refuse("clip_coefficient", "one element of torch.float32", coefficient)
    if clip_norm is not None:
        raise ValueError(f"clip_norm={clip_norm!r} is not allowed beside clip_coefficient: either")


def _check_scaler(grad_scale: Any, found_inf: Any) -> None:
    """Raises ValueError for attributes that no GradScaler sets."""
    if grad_scale is not None and not _is_one(grad_scale, NUMBERS):
        refuse("grad_scale", "None or a tensor of one number, as a GradScaler sets it", grad_scale)
    if found_inf is None or _is_one(found_inf, {*NUMBERS, torch.bool}):
        return
    if not (isinstance(found_inf, (int, float)) and found_inf == 0):
        refuse("found_inf", "None, 0 or a tensor of one number", found_inf)


def _is_one(value: Any, dtypes: Collection[torch.dtype]) -> bool:
    """Whether it is a tensor of one element, of one of these dtypes, that has a value."""
    return is_dense(value) and not value.is_meta and value.dtype in dtypes and value.numel() == 1


class Preparations:
    """The buffers of scalars, controls and norms on each device, kept from step to step."""

    def __init__(self) -> None:
        self._by_device: dict[torch.device, Any] = {}

    def on(self, device: torch.device, owned: Owned) -> Any:
        """The preparation of a device."""
        if device not in self._by_device:
            backend = BACKENDS[owned.backend(device)]
            if backend.why_not(device) is not None:
                backend = BACKENDS["reference"]  # there are no parameters, only steps to count
            with torch.inference_mode(False):  # later steps write its buffers
                self._by_device[device] = backend.preparation(owned.rule, device)
        return self._by_device[device]

    def make(
        self,
        owned: Owned,
        groups: Sequence[Mapping[str, Any]] | None,
        batches: Batches,
        asked: Request,
    ) -> Prepared:
        """Scalars and controls of all devices that have parameters.

        Args:
            owned: the optimizer's.
            groups: None where the scalars come from the host.
            batches: what is stepped.
            asked: what to do with the gradients.
        """
        prepared: Prepared = {}
        # the first parameter's too, which may have no gradient
        devices = dict.fromkeys([owned.device, *[batch.device for batch in batches.batches]])
        if groups is None and asked.is_empty:
            return dict.fromkeys(devices, (None, None))
        for device in devices:
            plans = _measured(batches, device) if asked.needs_norm else []
            prepared[device] = self.on(device, owned).make(groups, asked.on(device), plans)
        return prepared

    def nonfinite(self, owned: Owned, batches: Sequence[Batch], device: torch.device) -> Any:
        """int64 [1] on a device: whether an infinity or NaN is among all gradients of this rank."""
        flag = torch.zeros(1, dtype=torch.int64, device=device)
        for own in {batch.device for batch in batches}:
            plans = [batch.plan for batch in batches if batch.device == own]
            found = self.on(own, owned).has_nonfinite(plans)
            flag = torch.maximum(flag, found.to(device, torch.int64))
        return flag

    @property
    def norm(self) -> torch.Tensor:
        """See FusedOptimizer.grad_norm."""
        found = [each for each in self._by_device.values() if each.measured]
        if not found:
            raise RuntimeError(
                "no step has measured the norm yet: a step with clip_norm, or under "
                "nonfinite='skip' or 'error', does, unless found_inf leaves it out"
            )
        if len(found) != 1:
            raise RuntimeError(
                f"grad_norm is known on {len(found)} devices: a step with clip_norm, or under "
                "nonfinite='skip', with all parameters on one device, finds it"
            )
        norm: torch.Tensor = found[0].norm
        return norm


def _measured(batches: Batches, device: torch.device) -> Sequence[Measured]:
    """What the norm of all gradients on a device is measured of."""
    meeting = batches.meetings.get(True)
    if meeting is not None:
        return meeting.measured(device)
    return [batch.plan for batch in batches.batches if batch.device == device]


def is_skipped(prepared: Prepared, nonfinite: str) -> bool:
    """Whether an infinity or NaN among the gradients ends the step here; waits to see.

    Raises FloatingPointError where nonfinite is "error".
    """
    found = any(bool(controls[SKIP]) for _, controls in prepared.values())
    if found and nonfinite == "error":
        raise FloatingPointError(
            "an infinity or NaN is among the gradients (here, or on a rank that shares fp8 "
            "weights), which nonfinite='error' does not allow"
        )
    return found
