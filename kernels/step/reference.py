"""The step's twin in plain torch: the truth in tests, the numbers in words, the CPU backend."""

from __future__ import annotations

from collections.abc import Sequence

import numpy
import torch

from megaopt.kernels.formats import Format
from megaopt.kernels.rules import Rule
from megaopt.kernels.step.batch import Buffers, Formats

SMALLEST_SCALE = 2.0**-126


def scale_reference(value: torch.Tensor, code_max: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The scale of a tensor's codes and its reciprocal, both fp32 of shape (1,).

    amax / code_max, where amax is the largest finite magnitude; at least 2**-126, the smallest
    normal number, because a smaller scale has no finite reciprocal.
    """
    magnitude = torch.where(value.isfinite(), value.abs(), 0.0)
    scale = magnitude.max().reshape(1) / torch.full((1,), code_max, device=value.device)
    scale = scale.clamp(min=SMALLEST_SCALE)
    return scale, torch.ones_like(scale) / scale


def store_scaled(
    code: torch.Tensor, scale: torch.Tensor | None, value: torch.Tensor, form: Format
) -> None:
    """Encodes `value` into `code`, and the new scale, where the format has one, into `scale`."""
    inverse = None
    if scale is not None:
        new, inverse = scale_reference(value, form.code_max)
        scale.copy_(new)
    code.copy_(form.encode_reference(value, inverse))


def step_tensor(
    tensors: dict[str, torch.Tensor], formats: Formats, rule: Rule, scalars: tuple[float, ...]
) -> None:
    """One optimizer step of one parameter; `tensors` maps slots to contiguous tensors."""
    grad, weight, master = tensors["grad"], tensors["weight"], tensors.get("master")
    first = formats.first.decode_reference(tensors["first"], tensors.get("first_scale"))
    second = formats.second.decode_reference(tensors["second"], tensors.get("second_scale"))
    if formats.master.joined:
        param = formats.master.decode_reference(weight, master)
    elif master is not None:
        param = formats.master.decode_reference(master, tensors.get("master_scale"))
    else:
        param = formats.weight.decode_reference(weight)
    grad = formats.grad.decode_reference(grad)
    param, first, second = rule.update_reference(param, first, second, grad, scalars)
    if formats.master.joined:
        weight_code, code = formats.master.encode_reference(param)
        tensors["master"].copy_(code)
        weight.copy_(weight_code)
    else:
        weight.copy_(formats.weight.encode_reference(param))
        if master is not None:
            store_scaled(master, tensors.get("master_scale"), param, formats.master)
    store_scaled(tensors["first"], tensors.get("first_scale"), first, formats.first)
    store_scaled(tensors["second"], tensors.get("second_scale"), second, formats.second)


class ReferencePlan:
    """Steps one combination of formats tensor by tensor."""

    def __init__(self, formats: Formats, rule: Rule, groups: Sequence[int]) -> None:
        self.formats, self.rule, self.groups = formats, rule, groups
        self.addresses: dict[str, numpy.ndarray] = {}  # it works on the tensors themselves
        self.stale = True
        self._buffers: Buffers = {}

    def look(self, buffers: Buffers) -> None:
        """Notes the buffers for the step."""
        self._buffers = buffers

    def step(self, scalars: Sequence[tuple[float, ...]]) -> None:
        """One step; `scalars` has the rule's row for each parameter group."""
        buffers, self._buffers = self._buffers, {}
        for index, group in enumerate(self.groups):
            tensors = {slot: buffers[slot][index] for slot in self.formats.slots}
            if tensors["weight"].numel():
                step_tensor(tensors, self.formats, self.rule, scalars[group])
