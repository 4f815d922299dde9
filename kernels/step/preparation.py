"""Makes what a step reads before it starts, on the host or on the device: scalars and controls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from megaopt.kernels.norm.bins import new_bins
from megaopt.kernels.norm.reference import total_reference
from megaopt.kernels.rules import Rule
from megaopt.kernels.rules.adam_ieee import canonical_reference
from megaopt.kernels.step.reference import skips_of

Group = Mapping[str, Any]


@dataclass(frozen=True)
class Request:
    """The work that a step does on the gradients, and when to leave everything as it is.

    The tensors have one element, or one for each row of scalars, on the parameters' device, and may
    be computed there just now: nothing waits for them. They are contiguous, with no sign pending.
    """

    grad_scale: torch.Tensor | None = None
    """The loss scale that gradients were multiplied by: they are divided by it first."""
    found_inf: torch.Tensor | None = None
    """Anything but 0 skips the step."""
    coefficient: torch.Tensor | None = None
    """The factor of the unscaled gradients."""
    clip_norm: float | None = None
    """Gradients whose norm, over all parameters and after unscaling, is larger are multiplied by
    clip_norm / (norm + 1e-6); not together with a coefficient."""
    skip_nonfinite: bool = False
    """An infinity or NaN among the gradients skips the step."""

    @property
    def needs_norm(self) -> bool:
        """Returns whether the gradients have to be looked through before the step."""
        return self.clip_norm is not None or self.skip_nonfinite

    @property
    def numbers(self) -> dict[str, torch.Tensor | None]:
        """The tensors by their names."""
        return {name: getattr(self, name) for name in ("grad_scale", "found_inf", "coefficient")}

    def on(self, device: torch.device, rows: Sequence[int] = ()) -> Request:
        """The same with the tensors on a device.

        rows: the group of each row of scalars behind those of the groups, whose numbers it takes.
        """
        moved: dict[str, Any] = {}
        for name, number in self.numbers.items():
            if number is not None:
                tensor = number.to(device, non_blocking=True)
                # one number a group: rows behind those of the groups repeat their group's
                if number.numel() > 1 and rows:
                    tensor = torch.cat([tensor, tensor[list(rows)]])
                if tensor is not number:
                    moved[name] = tensor
        return replace(self, **moved) if moved else self

    @property
    def is_empty(self) -> bool:
        """Returns whether gradients are taken as they are, in every case."""
        is_given = self.found_inf is not None or self.coefficient is not None
        return not (is_given or self.grad_scale is not None or self.needs_norm)


class Measured(Protocol):
    """A plan (megaopt.kernels.backends.Plan) whose gradients can be measured."""

    def accumulate(self, bins: torch.Tensor) -> None:
        """Adds the gradients' squares to the bins of megaopt.kernels.norm."""


class Preparation:
    """The buffers on one device; they stay where they are, so that a CUDA graph can capture them.

    Attributes:
        norm: fp32, shape (): the norm of the gradients of the last step that measured it, after
            unscaling, before clipping.
        measured: whether there was such a step.
    """

    def __init__(self, rule: Rule, device: torch.device) -> None:
        self.rule, self.device = rule, device
        self.norm = torch.zeros((), dtype=torch.float32, device=device)
        self.measured = False
        self._bins = new_bins(device)

    def measure(self, plans: Sequence[Measured]) -> torch.Tensor:
        """The bins with the squares of all the plans' gradients."""
        self.measured = True
        summed: torch.Tensor | None = None
        # a lone plan may have bins already: those are taken, and nothing is launched
        if len(plans) == 1:
            summed = getattr(plans[0], "bins", None)
        if summed is not None:  # of ranks that have added up all there is
            return summed
        # plans add to the same table: int64, no order shows
        self._bins.zero_()
        for plan in plans:
            plan.accumulate(self._bins)
        return self._bins


class ReferencePreparation(Preparation):
    """The twin: on the host, which waits for what is on a device."""

    def make(
        self,
        groups: Sequence[Group] | None,
        count: int,
        request: Request,
        plans: Sequence[Measured],
    ) -> tuple[list[tuple[float, ...]] | None, torch.Tensor | None]:
        """Makes what TritonPreparation.make does, with the scalars on the host."""
        controls = None if request.is_empty else self._controls(count, request, plans)
        if groups is None:
            return None, controls
        scalars = []
        for group, is_skipped in zip(groups, skips_of(controls, count), strict=True):
            step = int(group["step"]) + 1
            scalars.append(self.rule.row({**group, "lr": float(group["lr"]), "step": step}))
            group["step"].fill_(step - is_skipped)
        return scalars, controls

    def _controls(self, count: int, request: Request, plans: Sequence[Measured]) -> torch.Tensor:
        # all fp32 [count], a number for each row of scalars
        ones = torch.ones(count, dtype=torch.float32, device=self.device)

        def numbers(number: torch.Tensor | None) -> torch.Tensor:
            return ones if number is None else number.float().reshape(-1).expand(count)

        grad_scale, coefficient = numbers(request.grad_scale), numbers(request.coefficient)
        # the reciprocal in fp64, rounded once
        inverse = (1.0 / grad_scale.double()).float()
        skip = ones * 0.0
        # skipped where the caller says so
        if request.found_inf is not None:
            skip = (request.found_inf.reshape(-1) != 0).float().expand(count)
        # the norm of unscaled gradients, fp32; it clips, or skips what is not finite
        if request.needs_norm:
            norm, nonfinite = total_reference(self.measure(plans))
            self.norm.copy_(canonical_reference(norm * inverse[0]))
            if request.clip_norm is not None:
                clip_norm = torch.full(
                    (), request.clip_norm, dtype=torch.float32, device=self.device
                )
                # not clamp: a NaN stays
                coefficient = clip_norm / (self.norm + 1e-6)
                coefficient = torch.where(coefficient > 1.0, 1.0, coefficient).expand(count)
            if request.skip_nonfinite:
                skip = torch.maximum(skip, nonfinite.float().reshape(1))
        # columns in the order of controls.py
        unscaled = ones * (request.grad_scale is not None)
        return torch.stack([grad_scale, inverse, coefficient, skip, unscaled], 1)
