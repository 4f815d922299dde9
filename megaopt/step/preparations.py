"""Makes the scalars and controls of a step on each device, and the norm of its gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megaopt.kernels.backends import BACKENDS
from megaopt.kernels.step.controls import SKIP
from megaopt.kernels.step.preparation import Measured, Request
from megaopt.state.owned import Owned
from megaopt.step.batch import Batch, Batches

Prepared = dict[torch.device, tuple[Any, Any]]
"""For each device the scalars, if they are made there, and the controls."""


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
            groups: those of all rows of scalars; None where these come from the host.
            batches: what is stepped.
            asked: what to do with the gradients.
        """
        prepared: Prepared = {}
        # the first parameter's too, which may have no gradient
        devices = dict.fromkeys([owned.device, *[batch.device for batch in batches.batches]])
        if groups is None and asked.is_empty:
            return dict.fromkeys(devices, (None, None))
        behind = [group for group, _ in batches.counts.apart]
        count = len(owned.groups) + len(behind)
        for device in devices:
            plans = _measured(batches, device) if asked.needs_norm else []
            request = asked.on(device, behind)
            prepared[device] = self.on(device, owned).make(groups, count, request, plans)
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

    It ends it for all groups. Raises FloatingPointError where nonfinite is "error".
    """
    found = any(bool(controls[:, SKIP].all()) for _, controls in prepared.values())
    if found and nonfinite == "error":
        raise FloatingPointError(
            "an infinity or NaN is among the gradients (here, or on a rank that shares fp8 "
            "weights), which nonfinite='error' does not allow"
        )
    return found
