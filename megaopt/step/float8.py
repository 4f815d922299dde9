"""fp8 weights in a step: the tensors behind them, what a cast reads and writes, their scales."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from megaopt.kernels.chunks.batch import Buffers, Formats
from megaopt.kernels.formats import MASTERS
from megaopt.params import ParamView, view_of
from megaopt.params.dtensor import locals_of
from megaopt.state.tensors import MASTER, State
from megaopt.state.watch import Guards


def plan_formats(formats: Formats, view: ParamView, steps_codes: bool) -> Formats:
    """The formats that a plan steps: weights without masters get fp32 values, or step codes alone.

    Blocks that other ranks have a part of wait for their amaxes, and codes along columns are made
    of values, too: both need these for longer than a step's pass has them.

    Args:
        formats: as the weights and their states have them.
        view: of one of the weights.
        steps_codes: whether the backend can.
    """
    # masters of their own are stepped, and codes made of them
    if formats.master.present and not formats.master.joined:
        return formats
    # codes by tiles, whose amaxes other ranks have a part in; codes along columns, too
    tiles_wait = formats.store.tile is not None and view.extent.shared
    waits = tiles_wait or view.weight.columnwise is not None
    if steps_codes and formats.in_place and not waits:
        return formats
    # fp32 values for the step's time, beside the codes
    assert formats.cast is not None
    cast = replace(formats.cast, remainder=formats.master)
    return replace(formats, master=MASTERS[torch.float32], cast=cast)


class Float8:
    """The fp8 weights, or parts of them, of one device, combination of formats and group of ranks.

    The kernels step masters. A weight without one is dequantized into an fp32 master that lasts for
    the step (4 bytes a parameter of scratch). Views of the weights are made once, not in each step.

    Args:
        formats: of weights and states.
        positions: the places of the parameters among all.
        params: fp8 weights, or parts of them.
        states: theirs.
    """

    def __init__(
        self,
        formats: Formats,
        positions: Sequence[int],
        params: Sequence[torch.Tensor],
        states: Sequence[State],
    ) -> None:
        self._formats, self._params, self._states = formats, params, states
        # all weights of a batch share group, recipe and library
        views = [view_of(param) for param in params]
        self._numbers = [view.number(i) for view, i in zip(views, positions, strict=True)]
        self.group: dist.ProcessGroup | None = views[0].group
        """The ranks that share the weights; None where there are no others."""
        self._are_foreign: bool = views[0].weight.is_foreign
        """Another library moves their scales."""
        cast = formats.cast
        self._keep_scales = cast is not None and cast.quantizer.keeps_scale
        # readers fetch the tensors behind each weight; what they gave last, and where codes lay
        self._readers: list[Callable[[], Sequence[Any]]] = []
        self._seen: list[Any] = []
        self._addresses: list[int] = []
        self._places: list[int] = []
        self._weights: list[Any] = []
        self.codes: list[torch.Tensor] = []
        self._amaxes = torch.zeros(0)
        self._own_amaxes: list[torch.Tensor] = []

    # --- before a step

    def look(self) -> bool:
        """Finds the codes anew if any tensor behind the weights is another, or lies elsewhere.

        Returns whether codes lie elsewhere than at the last look.
        """
        with torch._C.DisableTorchFunctionSubclass():
            # the very objects, and where they lie
            now = [tensor for reader in self._readers for tensor in reader()]
            same = len(now) == len(self._seen) and all(map(operator.is_, now, self._seen))
            if not self._readers or not same or _addresses(now) != self._addresses:
                # something is another: views, codes and readers are made anew
                views: list[Any] = [view_of(param) for param in self._params]
                self._weights = [view.weight for view in views]
                self.codes = [view.codes for view in views]
                self._readers = [view.reader() for view in views]
                self._seen = [tensor for reader in self._readers for tensor in reader()]
                self._addresses = _addresses(self._seen)
                before, self._places = self._places, [codes.data_ptr() for codes in self.codes]
                return before != self._places
        return False

    def guards(self, plain: Guards) -> Guards:
        """The guards of plain weights, but the parameters have no memory to look at."""
        # the parameters' own dtype, not that of their codes
        dtypes = list(plain.dtypes[: 2 + len(plain.names)])
        dtypes[1] = self._params[0].dtype
        return replace(plain, dtypes=dtypes, contiguous=False)

    def inputs(self, plan: Any, copies: Buffers) -> Buffers:
        """The buffers of the plan: copies, room for values, scales, and amaxes that are 0.

        copies: the batch's tensors; "weight_remainder" and "master" may become others.
        """
        # the plan has fp32 values in the masters' slot; a joined master goes in as the weight's
        # remainder
        if plan.formats is not self._formats:
            if self._formats.master.present:
                copies["weight_remainder"] = copies["master"]
            copies["master"] = self._values(plan, copies["weight"])
        # fp32 amaxes of all weights in one piece, each of its scales' shape, flat
        if not self._own_amaxes:
            sizes = [math.prod(w.recipe.scale_shape(w.shape)) for w in self._weights]
            device = self._params[0].device
            with torch.inference_mode(False):  # later steps write it
                self._amaxes = torch.zeros(sum(sizes), dtype=torch.float32, device=device)
                self._own_amaxes = list(torch.split(self._amaxes, sizes))
        # the step raises them from 0
        self._amaxes.zero_()
        # what the casts read and write beside codes, all from the weights as they are now
        columns, buffers = self._attributes("columnwise"), copies.copy()
        if columns[0] is not None:
            buffers["weight_columns"] = [codes for codes, _ in columns]
            buffers["weight_columns_scale_inv"] = [inv for _, inv in columns]
        if self._keep_scales and not self._are_foreign:
            buffers["weight_amax_history"] = self._attributes("amax_history")
        buffers["weight_scale"] = self._attributes("scale")
        buffers["weight_scale_inv"] = self._attributes("scale_inv")
        buffers["weight_amax"] = self._own_amaxes
        return buffers

    def _values(self, plan: Any, codes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns fp32 values of each weight that last for the step, or room for them; flat."""
        # room alone: the plan dequantizes codes itself
        if plan.fills:
            sizes = [tensor.numel() for tensor in codes]
            values = torch.empty(sum(sizes), dtype=torch.float32, device=codes[0].device)
            return list(torch.split(values, sizes))
        return list(map(self._value, self._params, self._states))

    def _value(self, param: torch.Tensor, state: Mapping[str, Any]) -> torch.Tensor:
        """The fp32 value of a weight without an fp32 master, flat."""
        # the codes' value, or that of codes and master together
        view, form = view_of(param), self._formats.master
        if not form.present:
            return view.value(self._formats).flatten()
        return view.joined_value(form, locals_of(state)[MASTER].to(param.device)).flatten()

    def written_beside(self) -> Iterator[torch.Tensor]:
        """Yields the tensors of the whole weights that a step writes beside their codes."""
        for columns in (weight.columnwise for weight in self._weights):
            yield from columns or ()
        yield from self._attributes("scale_inv")
        if self._keep_scales:
            yield from self._attributes("scale")
            yield from self._attributes("latest_amax" if self._are_foreign else "amax_history")

    def _attributes(self, name: str) -> list[Any]:
        """Returns the attribute of each weight."""
        return [getattr(weight, name) for weight in self._weights]

    # --- after it

    def amaxes(self) -> list[tuple[int, torch.Tensor]]:
        """The parameters' numbers, and their weights' amaxes, which a step has raised."""
        return list(zip(self._numbers, self._own_amaxes, strict=True))

    def quantize(self, plan: Any) -> None:
        """Casts the weights to fp8, after a step and after ranks have put amaxes together."""
        # by amaxes over all ranks, where ranks share the weights
        plan.cast()
        # the other library moves its scales by the largest amax that it is told
        if self._keep_scales and self._are_foreign:
            latest = self._attributes("latest_amax")
            torch._foreach_maximum_(latest, list[Any](self._own_amaxes))
        elif self._keep_scales:
            plan.move_scales()
        for weight in self._weights:  # whoever keeps something made of the old codes is told
            weight.codes_changed()
        # kernels write codes unseen by autograd: versions go up by hand
        torch.autograd.graph.increment_version([weight.owner for weight in self._weights])

    def why_not_captured(self) -> str | None:
        """The reason why a CUDA graph cannot repeat the step of these weights, or None."""
        if self.group is not None:
            return "fp8 weights are shared with other ranks, with which a graph would have to meet"
        if self._are_foreign:
            return "another library's fp8 weights are told of new codes by the host"
        return None


def _addresses(tensors: Sequence[Any]) -> list[int]:
    plain = torch.Tensor
    return [tensor.data_ptr() for tensor in tensors if type(tensor) is plain]
