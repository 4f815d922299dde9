"""Masters and weights stay one thing: the elements of a weight that were written set its master."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from megaopt.kernels.chunks.batch import Formats
from megaopt.kernels.formats import MASTERS, WEIGHTS, Format
from megaopt.kernels.step.reference import store_scaled
from megaopt.params import ParamView
from megaopt.params.view import SCALE
from megaopt.state.tensors import MASTER

# A scale of fp8 codes is known by its inverse alone, which is rounded, and so is the inverse's own
# reciprocal: each by at most half an ulp, 2**-24 of it. Together they are less than 2**-22 off.
SCALE_ERROR = 2.0**-22


def _is_between(weight: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Whether each weight lies between two casts; NaN lies at NaN."""
    nan = weight.isnan() & low.isnan() & high.isnan()
    return ((torch.minimum(low, high) <= weight) & (weight <= torch.maximum(low, high))) | nan


def _plain_casts(master: torch.Tensor, scale: torch.Tensor | None, form: Formats) -> Any:
    """The least and largest weights that the step may have stored beside a master.

    An fp32 master has one cast. A scaled fp16 master was rounded from the value that the weight was
    cast from: that value lies between the neighbours of the code, and casts keep the order.
    """
    codes = [master] * 2
    # the fp16 numbers below and above each, as whole numbers in the order of the fp16 numbers
    if scale is not None:
        bits, infinity = master.view(torch.int16).int(), 0x7C00
        order = torch.where(bits < 0, -(bits & 0x7FFF), bits)
        # one step down and up, no further than infinity
        moved = [(order + by).clamp(-infinity, infinity) for by in (-1, 1)]
        # back to sign and magnitude
        patterns = [torch.where(shift < 0, -shift | 0x8000, shift) for shift in moved]
        numbers = [pattern.to(torch.int16).view(torch.float16) for pattern in patterns]
        codes = [torch.where(master.isnan(), master, number) for number in numbers]
    # low and high codes, decoded to fp32, cast to the weight's format and decoded again
    values = [form.master.decode_reference(code, scale) for code in codes]
    return [form.weight.decode_reference(form.weight.encode_reference(value)) for value in values]


def written_elements(view: Any, state: Mapping[str, Any], formats: Formats) -> torch.Tensor:
    """Returns where a weight is no cast of its master any more: bool, of the weight's shape.

    What lies beside its weight has no value of its own: the master moves with the weight, and only
    a weight that no value together with this code gives (0 with a negative remainder, say, which
    would be read as NaN) is known to be written.
    """
    # joined masters: the pair must be one that a value is stored as
    weight, master, scale = view.local, state[MASTER], state.get(MASTER + SCALE)
    if formats.master.joined:
        code = weight.detach() if view.weight is None else view.codes.view(master.shape)
        return ~_belongs(code, master, formats.master)
    # plain weights: between the two casts
    if formats.cast is None:
        values = formats.weight.decode_reference(weight.detach())
        return ~_is_between(values, *_plain_casts(master, scale, formats))
    # fp8 codes under the scales that they have now, of which the inverses alone are known, to
    # SCALE_ERROR: codes by the least and the largest value
    recipe, rounding, factor = formats.cast.recipe, formats.cast.rounding, 1 / view.scale_inv()
    value = formats.master.decode_reference(master, scale)
    rounded = rounding.decode_reference(rounding.encode_reference(value))
    scales = (factor * (1 - SCALE_ERROR), factor * (1 + SCALE_ERROR))
    casts = [recipe.format.encode_reference(rounded * scale) for scale in scales]
    low, high, codes = map(recipe.format.decode_reference, (*casts, view.codes))
    return ~_is_between(codes.view(view.param.shape), low, high)


def _belongs(weight: torch.Tensor, code: torch.Tensor, form: Format) -> torch.Tensor:
    """Whether a weight and the code beside it are what a value is stored as; bool."""
    # decode the pair, encode it again: the bits of the weight must come back
    again, _ = form.encode_by_hand(form.decode_reference(weight, code))
    bits = {1: torch.uint8, 2: torch.int16}[weight.dtype.itemsize]
    same: torch.Tensor = again.view(bits) == weight.view(bits)
    return same


def refreshed(
    view: ParamView, state: Mapping[str, Any], formats: Formats, only_look: bool = False
) -> torch.Tensor | bool:
    """Gives the master the value of each element that was written; the others keep their bits.

    A scaled fp16 master has a scale by its largest number: where that is another now, all its codes
    are rounded anew, as at every step.

    Args:
        view: of the parameter.
        state: this rank's tensors of its state.
        formats: of the parameter.
        only_look: the master stays as it is.

    Returns:
        Whether there was any, a bool tensor of shape () on the weight's device; False without a
        master.
    """
    # nothing to refresh where formats ask for no master, or the state has none yet
    has_master = isinstance(state.get(MASTER), torch.Tensor)
    if not (has_master and formats.master.present):
        return False
    stored_master = state[MASTER]
    master = stored_master.to(view.local.device)  # from host memory
    # bool, of the weight's shape; the value is fp32
    written = written_elements(view, {**state, MASTER: master}, formats)
    is_written = written.any()
    if only_look:
        return is_written
    form, weight_value = formats.master, view.value(formats)
    # fp8 codes with a remainder: 0 makes the pair the code's own value
    if form.joined and view.weight is not None:
        master.masked_fill_(written, 0)
    elif form.joined:
        master.copy_(torch.where(written, form.encode_by_hand(weight_value)[1], master))
    elif not form.scaled:
        master.copy_(torch.where(written, weight_value, master))
    # one scale for the whole master: the host waits to know if it must be found anew
    elif weight_value.numel() and bool(is_written):
        scale = state[MASTER + SCALE]
        value = torch.where(written, weight_value, form.decode_reference(master, scale))
        store_scaled(master, scale, value, form)
    if master is not stored_master:
        stored_master.copy_(master, non_blocking=True)  # before whatever the device does next
    return is_written


# --- a model that became fp32


def widened(weight: torch.Tensor, state: Mapping[str, Any]) -> torch.Tensor | None:
    """The values of an fp32 weight that was a cast of its master: of model.float(), say.

    Elements that no 16-bit cast of the master gives were written by somebody else, and stay. None
    where there is no master left.
    """
    master = state.get(MASTER)
    if weight.dtype != torch.float32 or not isinstance(master, torch.Tensor):
        return None
    value, master = weight.detach(), master.to(weight.device)
    form = MASTERS[master.dtype]
    # which 16-bit format the weight had is not known: each that fits is tried
    if form.joined:
        for joined_form in MASTERS.values():
            if joined_form.joined and joined_form.dtype == master.dtype and not joined_form.draws:
                upper = weight.detach().to(joined_form.requires_weight)
                fits = (upper == weight) & _belongs(upper, master, joined_form)
                value = torch.where(fits, joined_form.decode_reference(upper, master), value)
        return value
    scale = state.get(MASTER + SCALE)
    # elements that are a cast of the master take its fp32 value
    for dtype in (torch.float16, torch.bfloat16):
        formats = Formats(WEIGHTS[dtype], WEIGHTS[dtype], form, (), ())
        fits = _is_between(weight.detach(), *_plain_casts(master, scale, formats))
        value = torch.where(fits, form.decode_reference(master, scale), value)
    return value
