"""The step's twin in plain torch: the truth in tests, the numbers in words, the CPU backend."""

from __future__ import annotations

from collections.abc import Sequence

import numpy
import torch

from megaopt.kernels.float8.shard import shard_amax_reference, shard_codes_reference
from megaopt.kernels.formats import Format
from megaopt.kernels.norm.reference import accumulate_reference
from megaopt.kernels.rules import Rule
from megaopt.kernels.rules.adam_ieee import canonical_reference
from megaopt.kernels.rules.lanes import first_lane_reference, vectorized
from megaopt.kernels.step.batch import Buffers, Extent, Formats
from megaopt.kernels.step.cast_columns import columns_reference
from megaopt.kernels.step.controls import SKIP, UNSCALED
from megaopt.kernels.step.move_scales import move_scales_reference

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


def controlled_grad(
    stored: torch.Tensor, controls: torch.Tensor, formats: Formats, rule: Rule
) -> torch.Tensor:
    """The fp32 gradient unscaled and clipped, each with one rounding, or with a second one.

    The unscaled one is stored where the formats say so and there is a scale.
    """
    grad_scale, inverse, coefficient = controls[:SKIP]
    grad = formats.grad.decode_reference(stored)
    unscaled = rule.unscale_reference(grad, grad_scale, inverse)
    if formats.writes_grad and bool(controls[UNSCALED]):
        stored.copy_(formats.grad.encode_reference(canonical_reference(unscaled)))
    return rounded_grad(rounded_grad(unscaled, formats) * coefficient, formats)


def rounded_grad(grad: torch.Tensor, formats: Formats) -> torch.Tensor:
    """Through the gradient's own format, if that is asked for; fp32."""
    if not formats.rounds_grad:
        return grad
    return formats.grad.decode_reference(formats.grad.encode_reference(grad))


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
    extent: Extent | None = None,
) -> None:
    """One optimizer step of one parameter; `tensors` maps slots to contiguous tensors.

    fp8 weights are not stored here but by cast_tensor; their amaxes are found.

    controls: fp32, in the order of megaopt.kernels.step.controls; None leaves gradients alone.
    """
    grad, weight, master = tensors["grad"], tensors["weight"], tensors.get("master")
    own = list(zip(formats.moment_names, formats.moments, strict=True))
    moments = tuple(
        form.decode_reference(tensors[name], tensors.get(f"{name}_scale")) for name, form in own
    )
    if formats.master.joined:
        param = formats.master.decode_reference(weight, master)
    elif master is not None:
        param = formats.master.decode_reference(master, tensors.get("master_scale"))
    else:
        param = formats.weight.decode_reference(weight)
    if controls is None:
        grad = formats.grad.decode_reference(grad)
    else:
        grad = controlled_grad(grad, controls, formats, rule)
    unscaled = controls is not None and bool(controls[UNSCALED])
    lanes = ((lanes_of(tensors) | formats.maximize) & (not unscaled),) if rule.lanes else ()
    grad = grad * -1.0 if formats.maximize else grad
    param, moments = rule.update_reference(param, moments, grad, scalars, *lanes)
    if formats.master.joined:
        weight_code, code = formats.master.encode_reference(param)
        tensors["master"].copy_(code)
        weight.copy_(weight_code)
    else:
        if formats.cast is None:
            weight.copy_(formats.weight.encode_reference(param))
        if master is not None:
            store_scaled(master, tensors.get("master_scale"), param, formats.master)
    if formats.cast is not None:
        note_amax(tensors, formats, extent)
    for (name, form), moment in zip(own, moments, strict=True):
        store_scaled(tensors[name], tensors.get(f"{name}_scale"), moment, form)


def values_to_cast(tensors: dict[str, torch.Tensor], formats: Formats) -> torch.Tensor:
    """What fp8 weights are made of: the stored master, rounded as the recipe says; fp32."""
    assert formats.cast is not None
    value = formats.master.decode_reference(tensors["master"], tensors.get("master_scale"))
    rounding = formats.cast.rounding
    return rounding.decode_reference(rounding.encode_reference(value))


def note_amax(tensors: dict[str, torch.Tensor], formats: Formats, extent: Extent | None) -> None:
    """Raises the amaxes of the weight to those of this part of it."""
    assert formats.cast is not None
    assert extent is not None
    values, amax = values_to_cast(tensors, formats), tensors["weight_amax"]
    found = shard_amax_reference(values, formats.cast.recipe, *extent[:3])
    amax.copy_(torch.maximum(amax, found.view(amax.shape)))


def cast_tensor(tensors: dict[str, torch.Tensor], formats: Formats, extent: Extent) -> None:
    """Stores the codes of a part of an fp8 weight, and the whole weight's scale_inv."""
    assert formats.cast is not None
    recipe, amax = formats.cast.recipe, tensors["weight_amax"]
    amax = amax.view(recipe.scale_shape(torch.Size(extent[:2])))
    values = values_to_cast(tensors, formats)
    scale = tensors.get("weight_scale")
    codes, scale_inv = shard_codes_reference(values, recipe, *extent[:3], amax, scale)
    tensors["weight"].copy_(codes.view(tensors["weight"].shape))
    tensors["weight_scale_inv"].copy_(scale_inv.view(tensors["weight_scale_inv"].shape))


class ReferencePlan:
    """Steps one combination of formats tensor by tensor."""

    def __init__(
        self,
        formats: Formats,
        rule: Rule,
        groups: Sequence[int],
        extents: Sequence[Extent] | None = None,
    ) -> None:
        self.formats, self.rule, self.groups = formats, rule, groups
        self.extents: Sequence[Extent | None] = extents or [None] * len(groups)
        self.addresses: dict[str, numpy.ndarray] = {}  # it works on the tensors themselves
        self.stale = True
        self._buffers: Buffers = {}
        self._scales: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]] = ((), ())

    def look(self, buffers: Buffers) -> None:
        """Notes the buffers for the step."""
        self._buffers = buffers

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
        self._skipped = controls is not None and bool(controls[SKIP])
        if self._skipped:
            return
        for index, group in enumerate(self.groups):
            tensors = self._tensors(index)
            if tensors["weight"].numel():
                extent = self.extents[index]
                step_tensor(tensors, self.formats, self.rule, scalars[group], controls, extent)
        if self.formats.cast is None:
            self._buffers = {}  # gradients may go

    def cast(self) -> None:
        """After a step, and after the ranks have put their amaxes together: stores fp8 weights."""
        for index, extent in enumerate(self.extents):
            if extent is not None and not self._skipped:
                cast_tensor(self._tensors(index), self.formats, extent)
                if "weight_columns" in self._buffers:
                    self._cast_columns(index)
        self._scales = (self._buffers.get("weight_scale", []), self._buffers["weight_amax"])
        self._buffers = {}

    def move_scales(self, histories: Sequence[torch.Tensor]) -> None:
        """Delayed scaling, after `cast`: the next step's scales.

        Args:
            histories: of each weight, fp32, (amax_history_len,).
        """
        assert self.formats.cast is not None
        if self._skipped:
            return
        for history, scale, amax in zip(histories, *self._scales, strict=True):
            history[:1].copy_(torch.maximum(history[:1], amax))
            move_scales_reference(history, scale, self.formats.cast.recipe)

    def _cast_columns(self, index: int) -> None:
        codes, scale_inv = (
            self._buffers[slot][index] for slot in ("weight_columns", "weight_columns_scale_inv")
        )
        values = values_to_cast(self._tensors(index), self.formats).view(codes.shape)
        assert self.formats.cast is not None
        made, made_inv = columns_reference(values, self.formats.cast.recipe)
        codes.copy_(made)
        scale_inv.copy_(made_inv)

    def _tensors(self, index: int) -> dict[str, torch.Tensor]:
        tensors = {slot: self._buffers[slot][index] for slot in self.formats.slots}
        if self.formats.cast is not None:
            for slot in (
                self.formats.by_slot
            ):  # codes come one-dimensional, and so has all that goes with them
                if slot in tensors:
                    tensors[slot] = tensors[slot].view(-1)
        return tensors
