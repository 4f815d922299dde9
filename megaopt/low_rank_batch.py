"""The batch of matrices that are stepped through a projection of their gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from megaopt.batches import Batch
from megaopt.kernels.backends import BACKENDS
from megaopt.kernels.lowrank.compiled import why_not_compiled
from megaopt.kernels.lowrank.launch import LaunchedPlan
from megaopt.kernels.lowrank.reference import LowRankReferencePlan
from megaopt.kernels.step.batch import Formats
from megaopt.kernels.step.watch import Grads
from megaopt.owned import Owned
from megaopt.params.low_rank import CAPTURED_ENERGY, PROJECTION
from megaopt.state import MASTER, check_state_tensor, state_name

LAUNCHED = ("hybrid", "grouped")
"""Kernels that are Triton's."""
AUTO = {"ieee": "hybrid", "tf32": "grouped", "bf16": "grouped"}
"""By precision, what "auto" takes on a GPU: fp32 products are torch's where there is a choice."""
LowRankPlan = LowRankReferencePlan | LaunchedPlan


def why_not_kernel(kernel: str, device: torch.device) -> str | None:
    """None where a kernel steps matrices on a device, else the reason."""
    if kernel == "compiled":
        return why_not_compiled(device)
    return BACKENDS["triton"].why_not(device) if kernel in LAUNCHED else None


@dataclass
class LowRankBatch(Batch):
    """Matrices of one device, combination of formats, side and rank."""

    plan: LowRankPlan
    group_numbers: list[int] = field(default_factory=list)
    """The group of each matrix."""
    numbers: list[int] = field(default_factory=list)
    """Of each parameter, which say when its turn to be refreshed is."""
    labels: list[str] = field(default_factory=list)
    """What errors call each parameter."""
    stagger: bool = True

    def stage_inputs(self, grads: Grads, writes_grads: bool = False) -> None:
        """As of other batches; raises ValueError for a projection that is not what it must be."""
        super().stage_inputs(grads, writes_grads)
        assert self.formats.low_rank is not None
        for param, state, label in zip(self.params, self.states, self.labels, strict=True):
            if state.get(PROJECTION) is not None:
                shape = self.formats.low_rank.projection_shape(param.shape)
                wanted = (torch.float32, shape, self.device)
                check_state_tensor(state[PROJECTION], wanted, f"{label}: state {PROJECTION!r}")

    def refresh(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Makes the projections whose turn it is, and those that are not there yet."""
        for index, state in enumerate(self.states):
            group, known = groups[self.group_numbers[index]], state.get(PROJECTION)
            if known is None or self._is_due(group, self.numbers[index]):
                projection, energy = self.plan.refreshed(index, known, group["seed"])
                _put(state, PROJECTION, projection)
                _put(state, CAPTURED_ENERGY, energy)
        self.plan.projections = [state[PROJECTION].contiguous() for state in self.states]

    def _is_due(self, group: Mapping[str, Any], number: int) -> bool:
        """Whether it is a parameter's turn, in the step that comes after so many."""
        gap = group["update_proj_gap"]
        return bool(group["step"] % gap == (number % gap if self.stagger else 0))

    def _own_shapes(self, slot: str) -> list[torch.Size] | None:
        """Of all that has not the parameter's shape."""
        if state_name(slot) == MASTER:
            return None
        return [each.shape for each in self._tensors(slot)]


def _put(state: dict[str, Any], name: str, value: torch.Tensor) -> None:
    """Over the state's own tensor, which others may hold; or as a new one."""
    if state.get(name) is None:
        state[name] = value
    else:
        state[name].copy_(value)


def low_rank_batch(
    owned: Owned,
    formats: Formats,
    places: list[int],
    params: list[torch.Tensor],
    states: list[dict[str, Any]],
    staged: bool,
) -> LowRankBatch:
    """The batch of parameters at these places, with their states, by the optimizer's options."""
    options: Any = owned.options
    groups = [owned.group_numbers[place] for place in places]
    spots = [owned.place(place) for place in places]
    plan: LowRankPlan
    kernel = options.low_rank_kernel(owned.backend(params[0].device), formats.master)
    precision = options.precision
    if kernel in LAUNCHED:
        shapes = [param.shape for param in params]
        own = (formats, options.refresh, shapes, groups, params[0].device, spots)
        plan = LaunchedPlan(*own, grouped=kernel == "grouped", precision=precision)
    else:
        twin = (formats, options.refresh, groups, spots, precision)
        plan = LowRankReferencePlan(*twin, compiled=kernel == "compiled")
    return LowRankBatch(
        *(formats, plan, places, params, states, staged),
        group_numbers=groups,
        numbers=[owned.numbers[place] for place in places],
        labels=[owned.labels[place] for place in places],
        stagger=options.stagger,
    )
