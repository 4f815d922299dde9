"""The step's twin in plain torch: the truth in tests, the numbers in words, the CPU backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy
import torch

from megaopt.kernels.chunks.batch import Buffers, Formats
from megaopt.kernels.chunks.draws import (
    moment_bits_reference,
    weight_bits_reference,
    words_reference,
)
from megaopt.kernels.formats import Format
from megaopt.kernels.formats.block8 import (
    factor_reference,
    inverse_factor_reference,
    scale_of_amax_reference,
)
from megaopt.kernels.norm.reference import accumulate_reference
from megaopt.kernels.place import Place, in_order
from megaopt.kernels.rules import Rule
from megaopt.kernels.rules.adam_ieee import canonical_reference
from megaopt.kernels.rules.lanes import first_lane_reference, vectorized
from megaopt.kernels.step.controls import SKIP, UNSCALED
from megaopt.kernels.subnormals import check_subnormals

SMALLEST_SCALE = 2.0**-126


def scale_reference(value: torch.Tensor, form: Format) -> tuple[torch.Tensor, torch.Tensor]:
    """The scale of a tensor's codes and its inverse, both fp32 of shape (1,).

    amax / code_max, where amax is the largest finite magnitude; at least 2**-126, the smallest
    normal number, because a smaller scale has no finite reciprocal. Some formats then keep the
    inverse's reciprocal in the scale's place.
    """
    # fp32; infinities and NaNs do not count
    magnitude = torch.where(value.isfinite(), value.abs(), 0.0)
    largest = torch.full((1,), form.code_max, dtype=torch.float32, device=value.device)
    # amax / code_max, both fp32 tensors: a quotient rounded once
    scale = magnitude.max().reshape(1) / largest
    scale = scale.clamp(min=SMALLEST_SCALE)
    inverse = torch.ones_like(scale) / scale
    return (torch.ones_like(inverse) / inverse if form.scale_of_inverse else scale), inverse


def decoded(
    form: Format, stored: torch.Tensor, scale: torch.Tensor | None, first: int = 0
) -> torch.Tensor:
    """The fp32 values of stored codes; first: of what is in blocks, as store_blocks has it."""
    # a code of its own for each element
    code = stored
    if form.packed > 1:
        code = torch.stack((stored & 15, stored >> 4), -1).flatten(-2)
    # one scale, or the factor of each element
    if form.block:
        assert scale is not None
        scale = spread(factor_reference(scale), form.block, code, first)
    return form.decode_reference(code, scale)


def spread(numbers: torch.Tensor, block: int, like: torch.Tensor, first: int) -> torch.Tensor:
    """A block's number for each element of `like`, a part of a parameter from its `first` on."""
    lead = first % block
    return numbers.reshape(-1).repeat_interleave(block)[lead : lead + like.numel()].view(like.shape)


def store_blocks(
    code: torch.Tensor,
    scale: torch.Tensor,
    value: torch.Tensor,
    form: Format,
    first: int = 0,
    *bits: torch.Tensor,
) -> None:
    """Encodes `value` into `code`, and the scales of its blocks into `scale`.

    first: the index of its first element in the parameter, from whose first element on blocks are
    counted. bits: one tensor for a format that draws; without, it rounds to nearest.
    """
    # magnitudes from their block's first element on, filled up with 0: [blocks, block]
    lead = first % form.block
    magnitude = torch.where(value.isfinite(), value.abs(), 0.0).reshape(-1)
    padded = value.new_zeros(scale.numel() * form.block)
    padded[lead : lead + value.numel()] = magnitude
    # a scale byte a block; its inverse for each element
    new = scale_of_amax_reference(padded.view(-1, form.block).amax(1), form.window_offset)
    inverse = spread(inverse_factor_reference(new), form.block, value, first)
    # codes; of 4 bits two share a byte, the even one the lower
    encode = form.encode_reference if bits else form.encode_by_hand
    new_codes = encode(value, inverse, *bits)
    code.copy_(new_codes if form.packed == 1 else new_codes[..., ::2] | new_codes[..., 1::2] << 4)
    scale.copy_(new.view(scale.shape))


def store_scaled(
    code: torch.Tensor,
    scale: torch.Tensor | None,
    value: torch.Tensor,
    form: Format,
    *bits: torch.Tensor,
    first: int = 0,
) -> None:
    """Encodes `value` into `code`, and the new scale, where the format has one, into `scale`.

    bits: one tensor for a format that draws; first: of what is in blocks, as store_blocks has it.
    """
    if form.block:
        assert scale is not None
        store_blocks(code, scale, value, form, first, *bits)
        return
    # one scale for the tensor, or none
    inverse = None
    if scale is not None:
        new, inverse = scale_reference(value, form)
        scale.copy_(new)
    code.copy_(form.encode_reference(value, inverse, *bits))


def controlled_grad(
    stored: torch.Tensor, controls: torch.Tensor | None, formats: Formats, rule: Rule
) -> torch.Tensor:
    """The fp32 gradient unscaled and clipped, each with one rounding, or with a second one.

    The unscaled one is stored where the formats say so and there is a scale. Where the step
    maximizes the result is turned round. controls: of the step; None: no scale, and no clipping.
    """
    grad = formats.grad.decode_reference(stored)
    if controls is not None:
        # the first three controls of the row; the gradient in fp32
        grad_scale, inverse, coefficient = controls[:SKIP]
        unscaled = rule.unscale_reference(grad, grad_scale, inverse)
        # written back before clipping
        if formats.writes_grad and bool(controls[UNSCALED]):
            stored.copy_(formats.grad.encode_reference(canonical_reference(unscaled)))
        grad = rounded_grad(rounded_grad(unscaled, formats) * coefficient, formats)
    return grad * -1.0 if formats.maximize else grad


def rounded_grad(grad: torch.Tensor, formats: Formats) -> torch.Tensor:
    """Through the gradient's own format, if that is asked for; fp32."""
    if not formats.rounds_grad:
        return grad
    return formats.grad.decode_reference(formats.grad.encode_reference(grad))


def param_of(tensors: dict[str, torch.Tensor], formats: Formats) -> torch.Tensor:
    """The fp32 value that a rule updates: the master's where there is one, else the weight's."""
    weight, master = tensors["weight"], tensors.get("master")
    # weight and master together, the master alone, the weight alone
    if formats.master.joined:
        value: torch.Tensor = formats.master.decode_reference(weight, master)
        return value
    if master is not None:
        return formats.master.decode_reference(master, tensors.get("master_scale"))
    return formats.weight.decode_reference(weight)


def step_tensor(
    tensors: dict[str, torch.Tensor],
    formats: Formats,
    rule: Rule,
    scalars: tuple[float, ...],
    controls: torch.Tensor | None = None,
    place: Place = Place(0),  # noqa: B008 a tuple
) -> None:
    """One optimizer step of one parameter; `tensors` maps slots to contiguous tensors.

    fp8 weights are not stored here (megaopt.kernels.quantizers.reference). place: for random bits.

    controls: fp32, the row of megaopt.kernels.step.controls; None leaves gradients alone.
    """
    weight, row = tensors["weight"], scalars[: rule.row_length]
    lanes: tuple[torch.Tensor, ...] = ()
    if rule.lanes:
        # whether all tensors are aligned for four neighbours a thread of torch's kernel, and so
        # which elements it would take as the first of a thread's four
        buffers = tensors.values()
        addresses = [(numpy.array([t.data_ptr()]), t.element_size()) for t in buffers]
        is_vectorized = bool(vectorized(numpy.array([weight.numel()]), addresses)[0])
        firsts = first_lane_reference(weight.numel(), is_vectorized, weight.device)
        # an unscaled gradient is contracted for every element, any other for none with maximize
        unscaled = controls is not None and bool(controls[UNSCALED])
        lanes = ((firsts.view(weight.shape) | formats.maximize) & (not unscaled),)
    # int64, a word an element, in the tensor's shape
    words = words_of(weight, rule, scalars, place, formats.draws)
    words = words.view(weight.shape) if formats.draws else words
    step_with_words(tensors, formats, rule, row, controls, place.first, words, *lanes)


def words_of(
    weight: torch.Tensor, rule: Rule, scalars: Sequence[float], place: Place, draws: bool = True
) -> torch.Tensor:
    """A random word for each element, in one dimension; no element where nothing draws."""
    if not draws:
        return weight.new_zeros(0)
    return words_reference(place, weight.numel(), scalars[rule.row_length :], weight.device)


def step_with_words(
    tensors: dict[str, torch.Tensor],
    formats: Formats,
    rule: Rule,
    row: Sequence[float | torch.Tensor],
    controls: torch.Tensor | None,
    first: int,
    words: torch.Tensor,
    *lanes: torch.Tensor,
) -> None:
    """Steps as step_tensor; row: of the rule alone; words: one an element where formats draw."""
    grad, weight, master = tensors["grad"], tensors["weight"], tensors.get("master")
    # moments, fp32, decoded by their scales from before the step
    forms = list(zip(formats.moment_names, formats.moments, strict=True))
    moments = tuple(
        decoded(form, tensors[name], tensors.get(f"{name}_scale"), first) for name, form in forms
    )
    param = param_of(tensors, formats) if rule.reads_param else torch.zeros_like(moments[0])
    # the gradient, fp32; scaled, clipped, turned round
    grad = controlled_grad(grad, controls, formats, rule)
    # the update; under contract ieee every NaN gets one pattern
    param, moments = rule.update_reference(param, moments, grad, row, *lanes)
    if rule.makes_nan_canonical:
        param, moments = canonical_reference(param), tuple(map(canonical_reference, moments))

    # stores the weight, and what lies beside it
    if formats.master.joined:
        bits = (weight_bits_reference(words),) if formats.master.draws else ()
        weight_code, code = formats.master.encode_reference(param, *bits)
        tensors["master"].copy_(code)
        weight.copy_(weight_code)
    else:
        if formats.cast is None:
            bits = (weight_bits_reference(words),) if formats.weight.draws else ()
            weight.copy_(formats.weight.encode_reference(param, None, *bits))
        if master is not None:
            store_scaled(master, tensors.get("master_scale"), param, formats.master)

    # stores moments, and their new scales
    for index, ((name, form), moment) in enumerate(zip(forms, moments, strict=True)):
        bits = (moment_bits_reference(words, index),) if form.draws else ()
        scale = tensors.get(f"{name}_scale")
        store_scaled(tensors[name], scale, moment, form, *bits, first=first)


def skips_of(controls: torch.Tensor | None, rows: int) -> list[bool]:
    """Returns for each row of scalars whether its controls skip the step; waits for a device."""
    return [False] * rows if controls is None else controls[:, SKIP].ne(0).tolist()


class ReferencePlan:
    """Steps one combination of formats tensor by tensor."""

    many_calls = True

    def __init__(
        self,
        formats: Formats,
        rule: Rule,
        groups: Sequence[int],
        places: Sequence[Place] | None = None,
    ) -> None:
        self.formats, self.rule, self.groups = formats, rule, groups
        self.places = places or in_order(len(groups))
        self.addresses: dict[str, numpy.ndarray] = {}  # it works on the tensors themselves
        self.stale = True
        self.buffers: Buffers = {}
        self.stepped: Sequence[int] = ()
        """Places of what the last step stepped."""

    def look(self, buffers: Buffers) -> None:
        """Notes the buffers for the step; raises RuntimeError where torch flushes subnormals."""
        check_subnormals()
        self.buffers = buffers

    def accumulate(self, bins: torch.Tensor) -> None:
        """Adds the gradients' squares to the bins of megaopt.kernels.norm."""
        accumulate_reference(self.buffers["grad"], bins)

    def ready(self, scalars: Any) -> Any:
        """The scalars as they are: a step of many calls takes memory all the time."""
        return scalars

    def step(
        self, scalars: Sequence[tuple[float, ...]], controls: torch.Tensor | None = None
    ) -> None:
        """One step.

        Args:
            scalars: the rule's row for each parameter group.
            controls: for each row of scalars what happens to gradients first, and whether these are
                skipped; on a GPU it is waited for.
        """
        # skipped rows: their tensors stay as they are
        left_out = skips_of(controls, len(scalars))
        self.stepped = [index for index, group in enumerate(self.groups) if not left_out[group]]
        for index in self.stepped:
            tensors = {slot: self.buffers[slot][index] for slot in self.formats.slots}
            if tensors["weight"].numel():
                group = self.groups[index]
                row = None if controls is None else controls[group]
                arguments = (scalars[group], row, self.places[index])
                step_tensor(tensors, self.formats, self.rule, *arguments)
        self.buffers = {}  # gradients may go
