"""fp8 weights in a step: their buffers, the cast, delayed scales."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from megaopt.kernels.quantizers.launch import CastPlan
from megaopt.kernels.quantizers.reference import CastReferencePlan
from megaopt.kernels.step.batch import Buffers, Formats
from megaopt.params import ParamView, view_of
from megaopt.params.dtensor import locals_of
from megaopt.state.tensors import MASTER, State
from megaopt.state.watch import Grads, Guards
from megaopt.step.batches import Batch, copy_back
from megaopt.step.float8_parts import Parts


def plan_formats(formats: Formats, view: ParamView, steps_codes: bool) -> Formats:
    """The formats that a plan steps: weights without masters get fp32 values, or step codes alone.

    Blocks that other ranks have a part of wait for their amaxes, and codes along columns are made
    of values, too: both need these for longer than a step's pass has them.

    Args:
        formats: as the weights and their states have them.
        view: of one of the weights.
        steps_codes: whether the backend can.
    """
    if formats.master.present and not formats.master.joined:
        return formats
    tiles_wait = formats.store.tile is not None and view.extent.shared
    waits = tiles_wait or view.weight.columnwise is not None
    return formats if steps_codes and formats.in_place and not waits else formats.with_values()


@dataclass
class Float8Batch(Batch):
    """The fp8 weights, or parts of them, of one device, combination of formats and group of ranks.

    The kernels step masters. A weight without one is dequantized into an fp32 master that lasts for
    the step (4 bytes a parameter of scratch).
    """

    plan: CastPlan | CastReferencePlan
    _amaxes: torch.Tensor = field(init=False)
    _own_amaxes: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._parts = Parts(self.params)
        views = [view_of(param) for param in self.params]
        self._numbers = [view.number(i) for view, i in zip(views, self.positions, strict=True)]
        self.group: dist.ProcessGroup | None = views[0].group
        """The ranks that share the weights; None where there are no others."""
        self._are_foreign: bool = views[0].weight.is_foreign
        """Another library moves their scales."""
        cast = self.formats.cast
        self._keep_scales = cast is not None and cast.quantizer.keeps_scale

    @property
    def addresses(self) -> list[Any]:
        """None: the plan is given tensors, which are not those of the parameters."""
        return []

    def _weights(self) -> list[torch.Tensor]:
        """Their codes; `stage_inputs` comes after this look at the tensors behind them."""
        with torch._C.DisableTorchFunctionSubclass():
            self._parts.look()
        return self._parts.codes

    def stage_inputs(self, grads: Grads, writes_grads: bool = False) -> None:
        """Before a step: gathers the tensors behind the weights, and amaxes that are 0."""
        # of what is a subclass to others only shape, gradient and the like are wanted here
        with torch._C.DisableTorchFunctionSubclass():
            own = super().buffers(grads)
        own["weight"] = self._parts.codes
        self._keep(own, writes_grads)
        if self.plan.many_calls:
            self.undo.keep(self._written_beside())
        self._written_grads = own["grad"] if writes_grads else []
        self._copies = {
            slot: [self._input(tensor) for tensor in tensors] for slot, tensors in own.items()
        }
        if self.plan.formats is not self.formats:
            if self.formats.master.present:
                self._copies["weight_remainder"] = self._copies["master"]
            self._copies["master"] = self._values(own["weight"])
        self.plan.look({**self._copies, **self._beside()})

    def _values(self, codes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """For each weight room for fp32 values that last for the step, or these values; flat."""
        if self.plan.fills:
            sizes = [own.numel() for own in codes]
            values = torch.empty(sum(sizes), dtype=torch.float32, device=self.device)
            return list(torch.split(values, sizes))
        return list(map(self._value, self.params, self.states))

    def _value(self, param: torch.Tensor, state: State) -> torch.Tensor:
        """The fp32 value of a weight without an fp32 master, flat."""
        view, form = view_of(param), self.formats.master
        if not form.present:
            return view.value(self.formats).flatten()
        return view.joined_value(form, locals_of(state)[MASTER].to(self.device)).flatten()

    def _written_beside(self) -> Iterator[torch.Tensor]:
        """Yields the tensors of the whole weights that a step writes beside their codes."""
        parts = self._parts
        for columns in (weight.columnwise for weight in parts.weights):
            yield from columns or ()
        yield from parts.attributes("scale_inv")
        if self._keep_scales:
            yield from parts.attributes("scale")
            yield from parts.attributes("latest_amax" if self._are_foreign else "amax_history")

    def _beside(self) -> Buffers:
        """Scales and amaxes of the whole weights."""
        parts = self._parts
        if not self._own_amaxes:
            sizes = [math.prod(w.recipe.scale_shape(w.shape)) for w in parts.weights]
            with torch.inference_mode(False):  # later steps write it
                self._amaxes = torch.zeros(sum(sizes), dtype=torch.float32, device=self.device)
                self._own_amaxes = list(torch.split(self._amaxes, sizes))
        self._amaxes.zero_()
        columns = [weight.columnwise for weight in parts.weights]
        outputs: Buffers = {}
        if columns[0] is not None:
            outputs["weight_columns"] = [codes for codes, _ in columns]
            outputs["weight_columns_scale_inv"] = [inv for _, inv in columns]
        if self._keep_scales and not self._are_foreign:
            outputs["weight_amax_history"] = parts.attributes("amax_history")
        return {
            **outputs,
            "weight_scale": parts.attributes("scale"),
            "weight_scale_inv": parts.attributes("scale_inv"),
            "weight_amax": self._own_amaxes,
        }

    def amaxes(self) -> list[tuple[int, torch.Tensor]]:
        """The parameters' numbers, and their weights' amaxes, which a step has raised."""
        return list(zip(self._numbers, self._own_amaxes, strict=True))

    def why_not_captured(self) -> str | None:
        """None where a CUDA graph can repeat the step of these weights, else the reason."""
        if self.group is not None:
            return "fp8 weights are shared with other ranks, with which a graph would have to meet"
        if self._are_foreign:
            return "another library's fp8 weights are told of new codes by the host"
        return None

    def quantize(self) -> None:
        """After a step, and after the ranks have put amaxes together: the weights become fp8."""
        self.plan.cast()
        if self._keep_scales and self._are_foreign:
            latest = self._parts.attributes("latest_amax")
            torch._foreach_maximum_(latest, list[Any](self._own_amaxes))
        elif self._keep_scales:
            self.plan.move_scales()
        self._parts.changed()

    def copy_results(self) -> None:
        """After a step: the results are copied back to staged tensors."""
        copies = self._leave_grads()
        if "weight_remainder" in copies:
            copies["master"] = copies["weight_remainder"]
        for slot in self.formats.state_slots:
            copy_back(self._own_states(slot), copies[slot])

    def guards(self) -> Guards:
        """As of plain weights; the parameters have no memory to look at."""
        guards = super().guards()
        dtypes = list(guards.dtypes[: 2 + len(self.names)])
        dtypes[1] = self.params[0].dtype
        return replace(guards, dtypes=dtypes, contiguous=False)
