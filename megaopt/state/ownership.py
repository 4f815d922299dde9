"""Masters and weights stay one thing: a weight that somebody else wrote sets its master.

torch counts a tensor's version up at every operation in place, those of load_state_dict, fill_ and
clamp_ included. The optimizer notes the counters after each of its steps and looks at them before
the next. `p.data = new` counts nothing, and is known by the address. A state may also come to a
parameter from another one (`state[q] = state.pop(p)`): the optimizer knows which master it compared
with which weight last. FusedAdam.refresh_masters says which writes are not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy
import torch

from megaopt.kernels.chunks.batch import Formats
from megaopt.kernels.formats import MASTERS, WEIGHTS, Format
from megaopt.kernels.step.reference import store_scaled
from megaopt.params import ParamView, view_of
from megaopt.params.view import SCALE
from megaopt.state.tensors import MASTER
from megaopt.state.watch import is_plain_class

# A scale of fp8 codes is known by its inverse alone, which is rounded, and so is the inverse's own
# reciprocal: each by at most half an ulp, 2**-24 of it. Together they are less than 2**-22 off.
SCALE_ERROR = 2.0**-22

Spot = tuple[int, torch.dtype, torch.Size]
"""The address of a weight, its dtype, and its shape."""
States = Mapping[Any, Mapping[str, Any]]


class Versions:
    """The version counters of the parameters that a step writes, as they were after the last one.

    It also has where the weights lay, and which masters they were compared with.

    Args:
        params: all parameters of the optimizer.
        stepped: places, among these, of those that the coming steps write.
        before: what this one takes the place of. Counters that it does not know are taken as they
            are now.
        state: the optimizer's; None: no state has a master yet.
    """

    def __init__(
        self,
        params: Sequence[torch.Tensor],
        stepped: Iterable[int] = (),
        before: Versions | None = None,
        state: States | None = None,
    ) -> None:
        self._params, self._stepped = params, list(stepped)
        # versions that were noted before go on, those of new tensors are taken as they are
        self._known = {} if before is None else before._noted()
        views = [view_of(param) for param in params]
        pairs = [(tensor, place) for place in self._stepped for tensor in views[place].counted]
        self._tensors = [tensor for tensor, _ in pairs]
        self._places = [place for _, place in pairs]
        everything = [tensor for view in views for tensor in view.counted]
        self._known = {tensor: self._known.get(tensor, tensor._version) for tensor in everything}
        # int64, in the order of the tensors: compared, and counted up, by the extension
        row = [self._known[tensor] for tensor in self._tensors]
        self._row = numpy.array(row, dtype=numpy.int64)
        self.counted = self._tensors, self._row
        """The tensors whose counters count writes to stepped weights, and the versions noted."""
        self._rows = {tensor: index for index, tensor in enumerate(self._tensors)}
        # where weights lay, and the master of each: both outlive the batches
        spots = {} if before is None else before._spots
        self._spots: dict[torch.Tensor, Spot | None] = {
            view.param: spots.get(view.param, _spot(view)) for view in views
        }
        compared = {} if before is None else before.compared
        self.compared: dict[torch.Tensor, weakref.ref[torch.Tensor]] = {
            param: compared[param] for param in params if param in compared
        }
        """The master that each weight was compared with last."""
        states: States = {} if state is None else state
        self.unmatched = set() if before is None else before._all_unmatched(params, states)
        """Parameters that have to be compared with their masters, whatever was written."""

    def _all_unmatched(self, params: Iterable[torch.Tensor], state: States) -> set[torch.Tensor]:
        """Returns the parameters that have a master, and were not compared with it.

        Another master in the state of the same parameter is the user's own, and counts as it is.
        """
        masters = ((param, master()) for param, master in self.compared.items())
        # masters that still exist, by their ids: whose they were
        owners = {id(master): param for param, master in masters if master is not None}
        unmatched_params = set()
        for param in params:
            # a master that came from another parameter, or that is new here, was not compared
            master = state.get(param, {}).get(MASTER)
            is_known = param in self.compared and owners.get(id(master), param) is param
            if param in self.unmatched or not (master is None or is_known):
                unmatched_params.add(param)
        return unmatched_params

    def _noted(self) -> dict[torch.Tensor, int]:
        return {**self._known, **dict(zip(self._tensors, self._row.tolist(), strict=True))}

    def moved(self, written: Sequence[int], elsewhere: bool) -> list[int]:
        """Places of the stepped parameters that somebody has written or replaced since.

        written: which of the counted tensors; elsewhere: whether a weight lies elsewhere.
        """
        # counted writes, then what no counter tells
        places = {self._places[index] for index in written}
        if elsewhere:
            params = {place: self._params[place] for place in self._stepped}
            places |= {
                i for i in params if params[i] in self.unmatched or self._is_replaced(params[i])
            }
        return sorted(places)

    def moved_anywhere(self, params: Sequence[torch.Tensor], state: States) -> list[int]:
        """Places, among these parameters, of all that somebody has written or replaced since."""
        # for all parameters, those without a gradient included
        noted, unmatched = self._noted(), self._all_unmatched(params, state)
        return [
            place
            for place, param in enumerate(params)
            if any(noted.get(t, t._version) != t._version for t in view_of(param).counted)
            or param in unmatched
            or self._is_replaced(param)
        ]

    def _is_replaced(self, param: torch.Tensor) -> bool:
        """Whether other memory is in a weight's place, of the same dtype: half() is no write."""
        now, before = _spot(view_of(param)), self._spots.get(param)
        return bool(now and before and now != before and now[1] == before[1])

    def arrived(self, state: States) -> None:
        """Notes that masters go with the stepped weights where these lie now."""
        params = [self._params[place] for place in self._stepped]
        self._spots.update({param: _spot(view_of(param)) for param in params})
        self.match(params, state)

    def match(self, params: Iterable[torch.Tensor], state: States) -> None:
        """Notes that the masters in these parameters' states are those of their weights."""
        param_list = list(params)
        masters = {param: state.get(param, {}).get(MASTER) for param in param_list}
        self.compared.update({p: weakref.ref(m) for p, m in masters.items() if m is not None})
        self.unmatched.difference_update(param_list)

    def note(self, param: torch.Tensor, state: States) -> None:
        """Notes that weight and master are as they should be now, whatever was written."""
        view = view_of(param)
        self._spots[param] = _spot(view)
        self.match([param], state)
        for tensor in view.counted:
            # the row that the watch compares is another place for the same number
            self._known[tensor] = tensor._version
            if tensor in self._rows:
                self._row[self._rows[tensor]] = tensor._version


def _spot(view: ParamView) -> Spot | None:
    """Returns the spot of a weight; None where nobody says what writes it."""
    if not view.counted:
        return None
    codes = view.codes
    is_memory = is_plain_class(type(codes)) and codes.layout == torch.strided
    return (codes.data_ptr(), codes.dtype, codes.shape) if is_memory else None


# --- which elements were written


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
