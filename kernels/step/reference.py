"""The step's twin in plain torch: the truth in tests, the numbers in words, the CPU backend."""

from __future__ import annotations

from collections.abc import Sequence

import numpy
import torch

from megaopt.kernels.formats import Format
from megaopt.kernels.norm.reference import accumulate_reference
from megaopt.kernels.rules import Rule
from megaopt.kernels.rules.lanes import first_lane_reference, vectorized
from megaopt.kernels.step.batch import Buffers, Formats
from megaopt.kernels.step.controls import SKIP
from megaopt.kernels.step.watch import CHANGED

SMALLEST_SCALE = 2.0**-126


def scale_reference(value: torch.Tensor, form: Format) -> tuple[torch.Tensor, torch.Tensor]:
    """The scale of a tensor's codes and its inverse, both fp32 of shape (1,).

    amax / code_max, where amax is the largest finite magnitude; at least 2**-126, the smallest
    normal number, because a smaller scale has no finite reciprocal. Some formats then keep the
    inverse's reciprocal in the scale's place.
    """
    magnitude = torch.where(value.isfinite(), value.abs(), 0.0)
    scale = magnitude.max().reshape(1) / torch.full((1,), form.code_max, device=value.device)
    scale = scale.clamp(min=SMALLEST_SCALE)
    inverse = torch.ones_like(scale) / scale
    return (torch.ones_like(inverse) / inverse if form.scale_of_inverse else scale), inverse


def store_scaled(
    code: torch.Tensor, scale: torch.Tensor | None, value: torch.Tensor, form: Format
) -> None:
    """Encodes `value` into `code`, and the new scale, where the format has one, into `scale`."""
    inverse = None
    if scale is not None:
        new, inverse = scale_reference(value, form)
        scale.copy_(new)
    code.copy_(form.encode_reference(value, inverse))


def controlled_grad(grad: torch.Tensor, controls: torch.Tensor, rule: Rule) -> torch.Tensor:
    """The fp32 gradient unscaled and clipped, each with one rounding."""
    grad_scale, inverse, coefficient = controls[:SKIP]
    controlled: torch.Tensor = rule.unscale_reference(grad, grad_scale, inverse) * coefficient
    return controlled


def lanes_of(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """Which elements torch's kernel would take as the first of a thread's four."""
    addresses = [
        (numpy.array([tensor.data_ptr()]), tensor.element_size()) for tensor in tensors.values()
    ]
    numel = tensors["weight"].numel()
    is_vectorized = bool(vectorized(numpy.array([numel]), addresses)[0])
    first = first_lane_reference(numel, is_vectorized, tensors["weight"].device)
    return first.view(tensors["weight"].shape)


def step_tensor(
    tensors: dict[str, torch.Tensor],
    formats: Formats,
    rule: Rule,
    scalars: tuple[float, ...],
    controls: torch.Tensor | None = None,
) -> None:
    """One optimizer step of one parameter; `tensors` maps slots to contiguous tensors.

    controls: fp32, in the order of megaopt.kernels.step.controls; None leaves gradients alone.
    """
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
    if controls is not None:
        grad = controlled_grad(grad, controls, rule)
    lanes = (lanes_of(tensors),) if rule.lanes else ()
    param, first, second = rule.update_reference(param, first, second, grad, scalars, *lanes)
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
        self._buffers: Buffers = {}

    def look(self, buffers: Buffers) -> int:
        """Notes the buffers for the step; as if seen for the first time, watch.CHANGED."""
        self._buffers = buffers
        return CHANGED

    def accumulate(self, bins: torch.Tensor) -> None:
        """Adds the gradients' squares to the bins of megaopt.kernels.norm."""
        accumulate_reference(self._buffers["grad"], bins)

    def step(
        self, scalars: Sequence[tuple[float, ...]], controls: torch.Tensor | None = None
    ) -> None:
        """One step.

        Args:
            scalars: the rule's row for each parameter group.
            controls: what happens to gradients first, and whether the step is skipped; on a GPU it
                is waited for.
        """
        buffers, self._buffers = self._buffers, {}
        if controls is not None and bool(controls[SKIP]):
            return
        for index, group in enumerate(self.groups):
            tensors = {slot: buffers[slot][index] for slot in self.formats.slots}
            if tensors["weight"].numel():
                step_tensor(tensors, self.formats, self.rule, scalars[group], controls)
