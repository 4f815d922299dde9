"""The request of a step: its arguments, checked once, in one value."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import torch

from megaopt.kernels.refusals import is_dense, refuse
from megaopt.kernels.step.preparation import Request
from megaopt.options.checks import NUMBERS, POSITIVE, number
from megaopt.options.options import Options
from megaopt.step.gradients import resolved

NUMBER_TENSOR = "a plain tensor of one number (or one for each group)"
NOTHING = Request()
"""Gradients are taken as they are, in every case."""


class Asked(NamedTuple):
    """The arguments of a step, and what a GradScaler sets on an optimizer; not checked yet."""

    clip_norm: Any = None
    clip_coefficient: Any = None
    grad_scale: Any = None
    found_inf: Any = None
    decoupled: bool = False
    """Gradients are in decoupled_grad."""

    def skips_nonfinite(self, options: Options) -> bool:
        """Whether an infinity or NaN among the gradients leaves the step out."""
        # a GradScaler looks for infinities in p.grad alone
        unseen = self.found_inf is not None and self.decoupled
        return options.nonfinite != "propagate" or unseen

    def waits(self, options: Options) -> bool:
        """Whether the host waits to know if there is a step, as on all ranks or on none."""
        is_skippable = isinstance(self.found_inf, torch.Tensor) or self.skips_nonfinite(options)
        return is_skippable and not options.capturable


def request_of(arguments: Asked, options: Options, groups: int) -> Request:
    """The request for so many groups; NOTHING where nothing is asked.

    Raises ValueError for a clip_norm, clip_coefficient, grad_scale or found_inf of no use.
    """
    clip_norm, coefficient, grad_scale, found_inf, _ = arguments
    # nothing asked: one object, which is known by its identity
    is_given = not (clip_norm is coefficient is grad_scale is found_inf is None)
    if options.nonfinite == "propagate" and not is_given:
        return NOTHING
    # a clip_norm or clip_coefficient that cannot be used, or both
    if clip_norm is not None:
        if isinstance(clip_norm, torch.Tensor):
            refuse("clip_norm", "a number of the host; clip_coefficient may be a tensor", clip_norm)
        number("clip_norm", clip_norm, POSITIVE)
    if coefficient is not None and not _is_one(coefficient, {torch.float32}, groups):
        refuse(
            "clip_coefficient",
            "one element of torch.float32, or one for each group, in a plain tensor",
            coefficient,
        )
    if coefficient is not None and clip_norm is not None:
        refuse("clip_norm", "None beside clip_coefficient", clip_norm)
    # attributes that no GradScaler sets
    if grad_scale is not None and not _is_one(grad_scale, NUMBERS, groups):
        refuse("grad_scale", f"None or {NUMBER_TENSOR}, as a GradScaler sets it", grad_scale)
    is_number = isinstance(found_inf, (int, float)) and found_inf == 0
    if not (found_inf is None or is_number or _is_one(found_inf, {*NUMBERS, torch.bool}, groups)):
        refuse("found_inf", f"None, 0 or {NUMBER_TENSOR}", found_inf)
    # tensors stay on the device: nothing waits for them
    request = Request(
        grad_scale=_in_memory(grad_scale),
        # a GradScaler that saw no gradient sets the number 0
        found_inf=_in_memory(found_inf) if isinstance(found_inf, torch.Tensor) else None,
        coefficient=_in_memory(coefficient),
        clip_norm=None if clip_norm is None else float(clip_norm),
        skip_nonfinite=arguments.skips_nonfinite(options),
    )
    # one norm over all groups: their gradients cannot have scales of their own
    for name in ("grad_scale", "found_inf") if request.needs_norm else ():
        tensor = getattr(request, name)
        if tensor is not None and tensor.numel() > 1:
            requirement = (
                "one number in a step that measures the gradients of all groups (clip_norm,"
            )
            refuse(name, f"{requirement} nonfinite other than 'propagate')", tensor)
    return request


def _in_memory(number: torch.Tensor | None) -> torch.Tensor | None:
    """The tensor as kernels read it: contiguous, with no sign pending; None stays."""
    return None if number is None else resolved(number).contiguous()


def _is_one(value: Any, dtypes: Collection[torch.dtype], groups: int) -> bool:
    """Returns whether a value is a tensor of these dtypes, of one number or one for each group."""
    # the chain stops before it asks a value for what it does not have
    is_there = is_dense(value) and not value.is_meta
    is_there = is_there and not hasattr(value, "full_tensor")  # a DTensor has no memory of its own
    is_there = is_there and value.dtype in dtypes
    return is_there and (value.numel() == 1 or tuple(value.shape) == (groups,))
