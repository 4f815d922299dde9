"""Matrices in a step: what their states keep for a rule, and what the rule makes anew of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from megaopt.kernels.chunks.batch import Formats
from megaopt.kernels.step.controls import SKIP
from megaopt.params import ParamView
from megaopt.params.dtensor import local_of
from megaopt.state.owned import Owned
from megaopt.state.tensors import check_state_tensor
from megaopt.step.ranks.rows import parts_of


@dataclass
class Matrices:
    """Those of one device, combination of formats and matrix rule."""

    plan: Any
    """A kernels.matrix plan."""
    states: list[dict[str, Any]]
    device: torch.device
    group_numbers: list[int]
    """The group of each matrix."""
    views: list[ParamView]
    """Of each parameter."""
    labels: list[str]
    """What errors call each parameter."""
    _had: list[set[str]] = field(default_factory=list)
    """What each state kept before the step on its way, if that is many calls."""

    def __post_init__(self) -> None:
        """Tells the plan who holds the other parts of each matrix."""
        self._sharded = any(view.is_sharded for view in self.views)
        self._kept = [view.kept for view in self.views]
        for work, view in zip(self.plan.works, self.views, strict=True):
            work.parts = parts_of(view)

    def _local(self, state: Mapping[str, Any], names: set[str]) -> dict[str, Any]:
        """The tensors that a state keeps; of DTensors the shards."""
        own = {name: state[name] for name in names if state.get(name) is not None}
        return {name: local_of(each) for name, each in own.items()} if self._sharded else own

    def begin(self) -> Iterator[torch.Tensor]:
        """Before a step: yields what it may write, of a plan of many calls.

        Raises ValueError for a kept tensor that is not what it must be.
        """
        self._had = []
        for kept, state, label in zip(self._kept, self.states, self.labels, strict=True):
            own = self._local(state, set(kept))
            for name, each in own.items():
                wanted = (torch.float32, kept[name], self.device)
                is_tensor = isinstance(each, torch.Tensor)
                if not is_tensor or (each.dtype, tuple(each.shape), each.device) != wanted:
                    check_state_tensor(each, wanted, f"{label}: state {name!r}")
            if self.plan.many_calls:
                self._had.append(set(own))
                yield from own.values()

    def take_back(self) -> None:
        """After a step that failed: removes what it has made."""
        for kept, state, had in zip(self._kept, self.states, self._had, strict=False):
            for name in kept.keys() - had:
                state.pop(name, None)
        for work in self.plan.works:
            work.is_made = None

    def why_not_captured(self) -> str | None:
        """None for launches that need no host, of matrices of which everything is made."""
        if self.plan.many_calls:
            return (
                "kernel='torch' and 'compiled' read numbers on the host: only kernel='hybrid' and "
                "'grouped' can be captured"
            )
        own = zip(self.plan.works, self._kept, self.states, self.labels, strict=True)
        for work, kept, state, label in own:
            there = all(state.get(name) is not None for name in kept)
            if kept and not (work.is_made and there):
                return (
                    f"the projection of {label} is not made yet: take one step before the capture, "
                    "with a gradient that is finite and not 0"
                )
        return None

    def refresh(
        self,
        groups: Sequence[Mapping[str, Any]],
        counts: Sequence[int | None] | None,
        controls: torch.Tensor | None = None,
    ) -> None:
        """Gives the plan what states keep for the rule, which makes anew what it is time for.

        Args:
            groups: the optimizer's.
            counts: the steps that each group has taken, which say whose turn it is; None: nobody's,
                of a group: none of its matrices'.
            controls: the step's, which may leave it out; None: it does not.
        """
        own = zip(self.plan.works, self.views, self._kept, self.states, strict=True)
        for work, view, kept, state in own:
            missing = {name: shape for name, shape in kept.items() if state.get(name) is None}
            if missing:
                new = {n: torch.zeros(shape, device=self.device) for n, shape in missing.items()}
                state.update(view.wrap_state(new))
                work.is_made = None
            work.kept = self._local(state, set(kept))
        renew = self.plan.matrix.rule.before.renew
        if renew is not None:
            counted = None if counts is None else [counts[each] for each in self.group_numbers]
            chosen = [groups[each] for each in self.group_numbers]
            skip = None if controls is None else partial(self._skip, controls)
            renew(self.plan.works, self.plan.grad, chosen, counted, skip)

    def _skip(self, controls: torch.Tensor, index: int) -> torch.Tensor:
        """What leaves the step of a matrix out; one number on its device."""
        return controls[self.group_numbers[index], SKIP]


def matrices_of(
    owned: Owned, formats: Formats, places: list[int], states: list[dict[str, Any]]
) -> Matrices:
    """The matrices at these places, with a plan by the optimizer's options."""
    views = [owned.views[place] for place in places]
    groups = [owned.group_numbers[place] for place in places]
    spots, device = [owned.place(place) for place in places], views[0].param.device
    tables = ([view.local.shape for view in views], groups, spots, device)
    plan = owned.options.matrix_plan(owned.backend(device), formats, *tables)
    labels = [owned.labels[place] for place in places]
    return Matrices(plan, states, device, groups, views, labels)
