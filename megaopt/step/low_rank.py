"""The projections through which matrices are stepped: kept in their states, made anew in turn."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from megaopt.kernels.backends import BACKENDS
from megaopt.kernels.lowrank.compiled import why_not_compiled
from megaopt.kernels.lowrank.launch import LaunchedPlan
from megaopt.kernels.lowrank.parts import Parts
from megaopt.kernels.lowrank.reference import LowRankReferencePlan
from megaopt.kernels.step.batch import Formats
from megaopt.kernels.step.controls import SKIP
from megaopt.params import ParamView
from megaopt.params.dtensor import local_of
from megaopt.params.low_rank import CAPTURED_ENERGY, PROJECTION
from megaopt.state.owned import Owned
from megaopt.state.tensors import check_state_tensor
from megaopt.step.ranks.rows import parts_of

LAUNCHED = ("hybrid", "grouped")
"""Kernels that are Triton's."""
AUTO = {"ieee": "hybrid", "tf32": "hybrid", "bf16": "grouped"}
"""By precision, what "auto" takes on a GPU: whose projection of the gradient is faster.

One H200, ms, torch's and Triton's: bf16, 8 matrices of 4096 x 11008 on the left at rank 128 0.270
and 0.214, at 512 0.676 and 0.574; 8 of 4096 x 4096 on the right at 128 0.141 and 0.090. tf32, the
same 0.703 and 1.65, 1.81 and 5.46, 0.252 and 0.230.
"""
KEPT = (PROJECTION, CAPTURED_ENERGY)
"""Names of the tensors that a refresh writes into a state."""
LowRankPlan = LowRankReferencePlan | LaunchedPlan


def why_not_kernel(kernel: str, device: torch.device) -> str | None:
    """None where a kernel steps matrices on a device, else the reason."""
    if kernel == "compiled":
        return why_not_compiled(device)
    return BACKENDS["triton"].why_not(device) if kernel in LAUNCHED else None


@dataclass
class Projections:
    """Of matrices of one device, combination of formats, side and rank."""

    plan: LowRankPlan
    states: list[dict[str, Any]]
    device: torch.device
    group_numbers: list[int]
    """The group of each matrix."""
    numbers: list[int]
    """Of each parameter, which say when its turn to be refreshed is."""
    views: list[ParamView]
    """Of each parameter."""
    labels: list[str]
    """What errors call each parameter."""
    stagger: bool
    _made: list[bool] = field(default_factory=list)
    """Which projections a gradient has made; looked up before the first step."""
    _parts: list[Parts] = field(default_factory=list)
    _had: list[set[str]] = field(default_factory=list)
    """Of each state, what of KEPT was there before the step on its way, if that is many calls."""

    def __post_init__(self) -> None:
        self._sharded = any(view.is_sharded for view in self.views)
        shapes = [view.kept[PROJECTION] for view in self.views]
        self._wanted = [(torch.float32, shape, self.device) for shape in shapes]
        """What each projection must be."""

    def begin(self) -> Iterator[torch.Tensor]:
        """Before a step: yields what it may write, of a plan of many calls.

        Raises ValueError for a projection that is not what it must be.
        """
        for state, wanted, label in zip(self.states, self._wanted, self.labels, strict=True):
            own = state.get(PROJECTION)
            own = local_of(own) if self._sharded else own
            is_tensor = isinstance(own, torch.Tensor)
            found = (own.dtype, tuple(own.shape), own.device) if is_tensor else None
            if own is not None and found != wanted:
                check_state_tensor(own, wanted, f"{label}: state {PROJECTION!r}")
        if self.plan.many_calls:
            self._had = [
                {name for name in KEPT if state.get(name) is not None} for state in self.states
            ]
            for state, had in zip(self.states, self._had, strict=True):
                kept = [state[name] for name in had]
                yield from map(local_of, kept) if self._sharded else kept

    def take_back(self) -> None:
        """After a step that failed: removes projections that it has made."""
        for state, had in zip(self.states, self._had, strict=False):
            for name in KEPT:
                if name not in had:
                    state.pop(name, None)
        self._made = []

    def why_not_captured(self) -> str | None:
        """None for kernels whose projections are all there."""
        if not isinstance(self.plan, LaunchedPlan):
            return (
                "kernel='torch' and 'compiled' read numbers on the host: only kernel='hybrid' and "
                "'grouped' can be captured"
            )
        for own, label in zip(self._projections(), self.labels, strict=True):
            if own is None:
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
        """Makes the projections whose turn it is, and those that are not there yet.

        The latter of gradients that are finite and not 0, of a step that is not left out; others
        leave zeros. While one is not there the host waits to know.
        """
        known = self._projections()
        self._parts = self._parts or [parts_of(view) for view in self.views]
        missing = [index for index, own in enumerate(known) if own is None]
        able = self._able(missing, controls) if missing else ()
        for index, own in enumerate(known):
            number = self.group_numbers[index]
            gap = groups[number]["update_proj_gap"]
            turn = self.numbers[index] % gap if self.stagger else 0
            is_due = counts is not None and counts[number] % gap == turn
            if index in able or (own is not None and is_due):
                self._make(index, own, groups[number]["seed"])
        made = [state[PROJECTION] for state in self.states]
        made = list(map(local_of, made)) if self._sharded else made
        self.plan.projections = [own.contiguous() for own in made]

    def _projections(self) -> list[torch.Tensor | None]:
        """Of each matrix; None where no gradient has made it yet: zeros, or nothing there."""
        found = [state.get(PROJECTION) for state in self.states]
        found = list(map(local_of, found)) if self._sharded else found
        if not self._made:  # the host waits here, once
            flags = [
                torch.zeros((), dtype=torch.bool, device=self.device) if own is None else own.any()
                for own in found
            ]
            self._made = torch.stack([flag.to(self.device) for flag in flags]).bool().tolist()
        return [own if made else None for own, made in zip(found, self._made, strict=True)]

    def _able(self, missing: list[int], controls: torch.Tensor | None) -> set[int]:
        """Those whose gradients make a first projection; the others have zeros in its place."""
        skip = None if controls is None else controls[SKIP]
        says = [self.plan.says(index, self._parts[index], skip) for index in missing]
        for index in missing:
            state, view = self.states[index], self.views[index]
            lacks = {name: shape for name, shape in view.kept.items() if state.get(name) is None}
            zeros = {
                name: torch.zeros(shape, dtype=torch.float32, device=self.device)
                for name, shape in lacks.items()
            }
            _put(state, zeros, view)
            self._made[index] = False
        pairs = zip(missing, torch.stack(says).tolist(), strict=True)  # the host waits here
        return {index for index, is_able in pairs if is_able}

    def _make(self, index: int, known: torch.Tensor | None, seed: int) -> None:
        state, view = self.states[index], self.views[index]
        projection, energy = self.plan.refreshed(index, known, seed, self._parts[index])
        own = state.get(CAPTURED_ENERGY)
        # a gradient that says nothing leaves it as it is, as it does the projection
        own = local_of(own) if self._sharded else own
        energy = torch.where(energy > 0, energy, 0.0 if own is None else own)
        _put(state, {PROJECTION: projection, CAPTURED_ENERGY: energy}, view)
        self._made[index] = True


def _put(state: dict[str, Any], values: Mapping[str, torch.Tensor], view: ParamView) -> None:
    """Over the state's own tensors, which others may hold; or as new ones."""
    for name, value in values.items():
        own = state.get(name)
        if own is None:
            state.update(view.wrap_state({name: value}))
        else:
            (local_of(own) if view.is_sharded else own).copy_(value)


def projections_of(
    owned: Owned, formats: Formats, places: list[int], states: list[dict[str, Any]]
) -> Projections:
    """The plan of the matrices at these places, by the optimizer's options, and its projections."""
    options: Any = owned.options
    views = [owned.views[place] for place in places]
    groups = [owned.group_numbers[place] for place in places]
    spots = [owned.place(place) for place in places]
    device = views[0].param.device
    plan: LowRankPlan
    kernel = options.low_rank_kernel(owned.backend(device), formats.master)
    precision = options.precision
    if kernel in LAUNCHED:
        shapes = [view.local.shape for view in views]
        own = (formats, options.refresh, shapes, groups, device, spots)
        plan = LaunchedPlan(*own, grouped=kernel == "grouped", precision=precision)
    else:
        twin = (formats, options.refresh, groups, spots, precision)
        plan = LowRankReferencePlan(*twin, compiled=kernel == "compiled")
    return Projections(
        plan,
        states,
        device,
        group_numbers=groups,
        numbers=[owned.numbers[place] for place in places],
        views=views,
        labels=[owned.labels[place] for place in places],
        stagger=options.stagger,
    )
