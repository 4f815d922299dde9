"""The backends, by name, and where each of them works."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy
import torch

from megaopt.kernels.chunks.batch import Buffers, Extent, Formats
from megaopt.kernels.contracts import Contract
from megaopt.kernels.optional_triton import INTERPRETED, MISSING
from megaopt.kernels.place import Place
from megaopt.kernels.rules import Rule
from megaopt.kernels.step.preparation import Preparation, ReferencePreparation
from megaopt.kernels.step.reference import ReferencePlan

# Kernels, and what casts to fp8, are imported by the first plan that needs them.


class Plan(Protocol):
    """A combination of formats, ready to be stepped again and again."""

    addresses: dict[str, numpy.ndarray]
    """Int64 rows by slot, from which a step takes addresses; empty if `look` must be told.

    Whoever writes into a row sets `stale`.
    """
    stale: bool
    many_calls: bool
    """A step is many calls on the host: what it has written is undone where one of them fails."""

    def look(self, buffers: Buffers) -> None:
        """Notes the buffers for the step, instead of the addresses in the rows."""

    def accumulate(self, bins: torch.Tensor) -> None:
        """Adds the gradients' squares to the bins of megaopt.kernels.norm."""

    def ready(self, scalars: Any) -> Any:
        """Takes the step's memory before anything is written; returns the rows for `step`."""

    def step(self, scalars: Any, controls: torch.Tensor | None = None) -> None:
        """One step of every tensor in the buffers that were looked at last.

        scalars: of each group, as `ready` returned them, or as the backend's preparation made them,
        with the controls.
        """


class Triton:
    """One launch for all tensors of a combination of formats."""

    name = "triton"
    steps_codes = True
    """A step of fp8 weights may read and store codes alone (Formats.in_place)."""

    def why_not(self, device: torch.device) -> str | None:
        """The reason why the backend does not work on the device; None where it does."""
        if MISSING is not None:
            return MISSING
        if device.type == "cuda" and INTERPRETED:
            return "TRITON_INTERPRET=1 is set: the kernels run on CPU tensors only"
        if device.type == "cpu" and not INTERPRETED:
            return (
                "on a CPU the kernels run only on Triton's interpreter: "
                "set TRITON_INTERPRET=1 before megaopt is imported"
            )
        if device.type not in ("cuda", "cpu"):
            return f"there are no kernels for device type {device.type!r}"
        return None

    def plan(
        self,
        formats: Formats,
        rule: Rule,
        numels: Sequence[int],
        groups: Sequence[int],
        device: torch.device,
        extents: Sequence[Extent] | None = None,
        places: Sequence[Place] | None = None,
    ) -> Plan:
        """Tables on the device for tensors of these sizes; `groups` are their rows of scalars."""
        if formats.cast is not None and extents is not None:
            from megaopt.kernels.quantizers.launch import CastPlan

            return CastPlan(formats, rule, numels, groups, device, extents, places)
        from megaopt.kernels.step.launch import TritonPlan

        return TritonPlan(formats, rule, numels, groups, device, None, places)

    def preparation(self, rule: Rule, device: torch.device) -> Preparation:
        """The scalars and controls of steps on the device."""
        from megaopt.kernels.step.prepare import TritonPreparation

        return TritonPreparation(rule, device)


class Reference:
    """Plain torch, tensor by tensor, on any device."""

    name = "reference"
    steps_codes = False

    def why_not(self, device: torch.device) -> str | None:
        """No reason, as it works everywhere."""
        return None

    def plan(
        self,
        formats: Formats,
        rule: Rule,
        numels: Sequence[int],
        groups: Sequence[int],
        device: torch.device,
        extents: Sequence[Extent] | None = None,
        places: Sequence[Place] | None = None,
    ) -> Plan:
        """The plan of a batch; it lays nothing out ahead."""
        if formats.cast is not None and extents is not None:
            from megaopt.kernels.quantizers.reference import CastReferencePlan

            return CastReferencePlan(formats, rule, groups, extents, places)
        return ReferencePlan(formats, rule, groups, places)

    def preparation(self, rule: Rule, device: torch.device) -> ReferencePreparation:
        """The scalars and controls of steps on the device, made on the host."""
        return ReferencePreparation(rule, device)


BACKENDS: dict[str, Triton | Reference] = {
    backend.name: backend for backend in (Triton(), Reference())
}


def why_not(backend: str, contract: Contract, device: torch.device) -> str | None:
    """The reason why a backend does not keep a contract on a device; None where it does."""
    if contract.needs_gpu is not None and (device.type != "cuda" or torch.version.hip):
        return f"contract {contract.name!r} needs an NVIDIA GPU: {contract.needs_gpu}"
    if backend not in contract.backends:
        return f"contract {contract.name!r} is kept by {', '.join(contract.backends)} only"
    return BACKENDS[backend].why_not(device)


def default_backend(device: torch.device) -> str:
    """Returns what backend="auto" means on a device: the kernels on a GPU, where there are any."""
    usable = device.type == "cuda" and BACKENDS["triton"].why_not(device) is None
    return "triton" if usable else "reference"
