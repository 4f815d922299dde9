"""The batch of matrices that a rule for whole matrices steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from megaopt.kernels.step.batch import Formats
from megaopt.kernels.step.controls import SKIP
from megaopt.params import ParamView
from megaopt.params.dtensor import local_of
from megaopt.state.owned import Owned
from megaopt.state.tensors import MASTER, check_state_tensor, state_name
from megaopt.state.watch import Grads
from megaopt.step.batches import Batch
from megaopt.step.ranks.rows import parts_of
from megaopt.step.sharded import ShardedBatch


@dataclass
class MatrixBatch(Batch):
    """Matrices of one device, combination of formats and matrix rule."""

    plan: Any
    """A kernels.matrix plan."""
    group_numbers: list[int] = field(default_factory=list)
    """The group of each matrix."""
    views: list[ParamView] = field(default_factory=list)
    """Of each parameter."""
    labels: list[str] = field(default_factory=list)
    """What errors call each parameter."""
    _had: list[set[str]] = field(default_factory=list)
    """Of each state, what of its view's `kept` was there before the step on its way, if that is
    many calls."""

    def __post_init__(self) -> None:
        """Tells the plan who holds the other parts of each matrix."""
        for work, view in zip(self.plan.works, self.views, strict=True):
            work.parts = parts_of(view)

    def stage_inputs(self, grads: Grads, writes_grads: bool = False) -> None:
        """As of other batches; raises ValueError for a kept tensor that is not what it must be."""
        super().stage_inputs(grads, writes_grads)
        for view, state, label in zip(self.views, self.states, self.labels, strict=True):
            for name, shape in view.kept.items():
                if state.get(name) is not None:
                    wanted = (torch.float32, shape, self.device)
                    check_state_tensor(local_of(state[name]), wanted, f"{label}: state {name!r}")
        if self.plan.many_calls:
            pairs = list(zip(self.views, self.states, strict=True))
            self._had = [{n for n in v.kept if own.get(n) is not None} for v, own in pairs]
            for state, had in zip(self.states, self._had, strict=True):
                self.undo.keep(local_of(state[name]) for name in had)

    def take_back(self) -> None:
        """Puts everything back as it was before a step that failed, and removes what it made."""
        for view, state, had in zip(self.views, self.states, self._had, strict=False):
            for name in view.kept.keys() - had:
                state.pop(name, None)
        for work in self.plan.works:
            work.is_made = None
        super().take_back()

    def why_not_captured(self) -> str | None:
        """None for launches that need no host, of matrices of which everything is made."""
        if self.plan.many_calls:
            return (
                "kernel='torch' and 'compiled' read numbers on the host: only kernel='hybrid' and "
                "'grouped' can be captured"
            )
        own = zip(self.plan.works, self.views, self.states, self.labels, strict=True)
        for work, view, state, label in own:
            there = all(state.get(name) is not None for name in view.kept)
            if view.kept and not (work.is_made and there):
                return (
                    f"the projection of {label} is not made yet: take one step before the capture, "
                    "with a gradient that is finite and not 0"
                )
        return None

    def refresh(
        self,
        groups: Sequence[Mapping[str, Any]],
        counts: Sequence[int] | None,
        controls: torch.Tensor | None = None,
    ) -> None:
        """Gives the plan what states keep for the rule, which makes anew what it is time for."""
        for work, view, state in zip(self.plan.works, self.views, self.states, strict=True):
            missing = {n: shape for n, shape in view.kept.items() if state.get(n) is None}
            if missing:
                new = {n: torch.zeros(shape, device=self.device) for n, shape in missing.items()}
                state.update(view.wrap_state(new))
                work.is_made = None
            work.kept = {name: local_of(state[name]) for name in view.kept}
        renew = self.plan.matrix.rule.before.renew
        if renew is not None:
            counted = None if counts is None else [counts[each] for each in self.group_numbers]
            own = [groups[each] for each in self.group_numbers]
            skip = None if controls is None else controls[SKIP]
            renew(self.plan.works, self.plan.grad, own, counted, skip)

    def _own_shapes(self, slot: str) -> list[torch.Size] | None:
        """Of all that has not the parameter's shape."""
        if state_name(slot) == MASTER:
            return None
        return [each.shape for each in self._tensors(slot)]


@dataclass
class ShardedMatrixBatch(MatrixBatch, ShardedBatch):
    """Such matrices of which some are DTensors."""


def matrix_batch(
    owned: Owned,
    formats: Formats,
    places: list[int],
    params: list[torch.Tensor],
    states: list[dict[str, Any]],
    staged: bool,
) -> MatrixBatch:
    """The batch of parameters at these places, with their states, by the optimizer's options."""
    views = [owned.views[place] for place in places]
    groups = [owned.group_numbers[place] for place in places]
    spots, device = [owned.place(place) for place in places], params[0].device
    shapes = [view.local.shape for view in views]
    tables = (shapes, groups, spots, device)
    plan = owned.options.matrix_plan(owned.backend(device), formats, *tables)
    kind = ShardedMatrixBatch if any(view.is_sharded for view in views) else MatrixBatch
    return kind(
        *(formats, plan, places, params, states, staged),
        group_numbers=groups,
        views=views,
        labels=[owned.labels[place] for place in places],
    )
