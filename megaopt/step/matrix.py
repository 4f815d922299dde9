"""Matrices in a step: what states keep for a rule, what it makes anew, what ranks put together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from megaopt.kernels.backends import BACKENDS
from megaopt.kernels.chunks.batch import Formats
from megaopt.kernels.place import Place
from megaopt.kernels.rules.matrix import SAME
from megaopt.kernels.shards import local_of
from megaopt.kernels.step.controls import SKIP
from megaopt.params import ParamView
from megaopt.state.owned import Owned
from megaopt.state.tensors import check_state_tensor
from megaopt.step.ranks.sharers import is_exchanged

if TYPE_CHECKING:
    from megaopt.kernels.matrix.shared import SharedSteps


@dataclass
class Matrices:
    """The matrices of one device, combination of formats and matrix rule."""

    plan: Any
    """A kernels.matrix plan."""
    states: list[dict[str, Any]]
    device: torch.device
    group_numbers: list[int]
    """The group of each matrix."""
    views: list[ParamView]
    """The view of each parameter."""
    labels: list[str]
    """The name of each parameter in errors."""
    shared: SharedSteps | None = None
    """The steps of matrices that ranks exchange; None for others."""
    _had: list[set[str]] = field(default_factory=list)
    """The names that each state kept before the step on its way, if that is many calls."""
    _tensors: list[dict[str, Any]] = field(default_factory=list)
    """Tensors that each state keeps, shards of DTensors, from `begin` to `refresh` of a step."""

    def __post_init__(self) -> None:
        """Tells the plan who holds the other parts of each matrix."""
        # shapes of what each state keeps for its rule, by name; {} for rules that keep nothing
        self._sharded = any(view.is_sharded for view in self.views)
        self._shapes = [view.kept for view in self.views]
        self._keeps_any = any(self._shapes)  # 192 matrices without took a step's host 0.2 of 0.6 ms
        # parts that ranks do not exchange in each step come together where states are made anew
        self.gathers = self.shared is None and any(view.split is not None for view in self.views)
        """Rows of matrices come together where what states keep is made anew of them."""
        if self.gathers:
            from megaopt.step.ranks.peers import PartsOnRanks  # where ranks share matrices

            for work, view in zip(self.plan.works, self.views, strict=True):
                if view.split is not None:
                    work.parts = PartsOnRanks(view, work.place.number)

    def _local(self, state: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
        """The tensors that a state keeps; of DTensors the shards."""
        tensors = {name: state[name] for name in names if state.get(name) is not None}
        return (
            {name: local_of(tensor) for name, tensor in tensors.items()}
            if self._sharded
            else tensors
        )

    def begin(self) -> Iterator[torch.Tensor]:
        """Yields, before a step, the tensors that a plan of many calls may write.

        Raises ValueError for a kept tensor that is not what it must be.
        """
        self._had, self._tensors = [], []
        if not self._keeps_any:
            return
        # the kept tensors of each state, to be handed to the plan in `refresh`
        tensors = []
        for shapes, state, label in zip(self._shapes, self.states, self.labels, strict=True):
            state_tensors = self._local(state, shapes)
            tensors.append(state_tensors)
            for name, tensor in state_tensors.items():
                # fp32, of the rule's shape, on the weights' device
                expected = (torch.float32, shapes[name], self.device)
                is_tensor = isinstance(tensor, torch.Tensor)
                if not is_tensor or (tensor.dtype, tuple(tensor.shape), tensor.device) != expected:
                    check_state_tensor(tensor, expected, f"{label}: state {name!r}")
            # the caller copies what is yielded, and the names tell what to remove again
            if self.plan.many_calls:
                self._had.append(set(state_tensors))
                yield from state_tensors.values()
        self._tensors = tensors

    def take_back(self) -> None:
        """Removes what a failed step has made."""
        for shapes, state, had in zip(self._shapes, self.states, self._had, strict=False):
            # names that were not there before the step
            for name in shapes.keys() - had:
                state.pop(name, None)
        # None: not known, so that the next step looks for itself
        for work in self.plan.works:
            work.is_made = None

    def why_not_captured(self) -> str | None:
        """The reason why a CUDA graph cannot repeat the step, or None where it can.

        It can where launches need no host and every matrix has all that a state keeps for it.
        """
        if not self.plan.is_captured:
            return (
                f"steps of {self.plan.matrix.rule.name} matrix by matrix (GaLoreAdamW's "
                "kernel='torch' and 'compiled', matrices that ranks exchange otherwise than over "
                "NCCL, or that all of them make together) read numbers on the host: only launches "
                "and NCCL's messages can be captured"
            )
        entries = zip(self.plan.works, self._shapes, self.states, self.labels, strict=True)
        # what is made of gradients is made for the first time outside a capture
        by_gradients = self.plan.matrix.rule.before.renew is not None
        for work, shapes, state, label in entries:
            is_complete = all(state.get(name) is not None for name in shapes)
            if shapes and by_gradients and not (work.is_made and is_complete):
                return (
                    f"the projection of {label} is not made yet: take one step before the capture, "
                    "with a gradient that is finite and not 0"
                )
            if not is_complete:
                return f"the state of {label} is not made yet: take one step before the capture"
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
        # the group and the count of each matrix
        chosen = [groups[number] for number in self.group_numbers]
        counted = None if counts is None else [counts[number] for number in self.group_numbers]
        # what states keep is in the plan's hands, whether it is made anew or not: the tensors that
        # `begin` found, if none was missing
        looked_at, self._tensors = self._tensors, []
        is_complete = list(map(len, looked_at)) == list(map(len, self._shapes))
        if is_complete:
            for work, tensors in zip(self.plan.works, looked_at, strict=True):
                work.kept = tensors
        entries = zip(self.plan.works, self.views, self._shapes, self.states, strict=True)
        for work, view, shapes, state in entries if self._keeps_any and not is_complete else ():
            # zeros: what a rule keeps before its first step
            missing = {name: shape for name, shape in shapes.items() if state.get(name) is None}
            if missing:
                new = {n: torch.zeros(shape, device=self.device) for n, shape in missing.items()}
                state.update(view.wrap_state(new))
                work.is_made = None
            work.kept = self._local(state, shapes)

        before = self.plan.matrix.rule.before
        if before.renew is None:
            return
        make: Any = before.renew
        # places of the matrices whose turn it is, alike on all ranks
        turns = before.turns(self.plan.works, chosen, counted)

        def renew(places: Sequence[int], grad: Any) -> None:
            # places in this batch; grad gives the whole gradient at an index of `places`
            numbers = [self.group_numbers[place] for place in places]
            # a number on its device that leaves the step of a matrix out where it is not 0
            skip = None if controls is None else lambda i: controls[numbers[i], SKIP]
            arguments = [self.plan.works[place] for place in places], grad
            make(*arguments, [chosen[place] for place in places], skip)

        # whole gradients are with their owners only within the step: it is done there
        if self.shared is not None:
            self.shared.renewal = self.shared.renewal._replace(turns=turns, renew=renew)
        else:
            renew(turns, lambda index: self.plan.grad(turns[index]))


MISSING = "no such attribute"


class Marks:
    """The attributes of parameters that choose how these are stepped, as they were when it is made.

    A step looks at how many attributes a parameter has, which takes 20 ns, and at the marks where
    there were some: to ask all for their marks takes six times as long.

    Args:
        params: those that marks may mean.
        names: of the attributes.
    """

    def __init__(self, params: Iterable[torch.Tensor], names: Sequence[str]) -> None:
        self._names = names
        self._attributes = [*map(vars, params)]
        marks = [[a.get(name, MISSING) for name in names] for a in self._attributes]
        # each parameter's attributes, and its marks: a copy, as lists may be edited
        self._pairs = list(zip(self._attributes, deepcopy(marks), strict=True))
        self._marked = [pair for pair in self._pairs if pair[1] != [MISSING] * len(names)]
        self._counts = [*map(len, self._attributes)]

    def are_the_same(self) -> bool:
        """Whether parameters are marked as they were."""
        # marks that were there; all parameters, where some have got other attributes since
        counts, names = [*map(len, self._attributes)], self._names
        pairs = self._marked if counts == self._counts else self._pairs
        if any([a.get(name, MISSING) for name in names] != marks for a, marks in pairs):
            return False
        # other attributes came, and no mark: the new counts are the usual ones
        self._counts = counts
        return True


def matrices_of(
    owned: Owned, formats: Formats, places: list[int], states: list[dict[str, Any]]
) -> Matrices:
    """The matrices at these places, with a plan by the optimizer's options."""
    views = [owned.views[place] for place in places]
    groups = [owned.group_numbers[place] for place in places]
    # where random bits of each parameter begin, if any are drawn
    spots, device = [Place(owned.numbers[place]) for place in places], views[0].param.device
    is_whole = is_exchanged(views[0])  # all views of a batch are split alike
    if formats.draws or formats.block or not is_whole:
        spots = [v.place(owned.numbers[place]) for v, place in zip(views, places, strict=True)]
    # owners step whole matrices, other plans this rank's rows
    shapes = [torch.Size(view.whole_shape) if is_whole else view.local.shape for view in views]
    backend = owned.backend(device)
    plan = owned.options.matrix_plan(backend, formats, shapes, groups, spots, device)
    labels = [owned.labels[place] for place in places]
    arguments = plan, states, device, groups, views, labels
    # no matrix is sent in a step: the plan is all there is
    if not is_whole:
        return Matrices(*arguments)
    # from here on for ranks that exchange: how owners make updates, and of what
    from megaopt.kernels.matrix.exchange import UpdateMaker
    from megaopt.kernels.matrix.shared import SharedSteps
    from megaopt.step.ranks.owners import Owners

    rule = plan.matrix.rule
    making = UpdateMaker(plan.matrix) if plan.making is None else plan.making()
    low_spots, lows = spots, None
    # GaLore's moments are of a smaller matrix, with places of its own
    if rule.before is not SAME:
        lows = [plan.matrix.low_shape(view.whole_shape) for view in views]
        if formats.draws or formats.block:
            pairs = zip(views, places, strict=True)
            moment = formats.moment_names[0]
            low_spots = [view.place(owned.numbers[place], moment) for view, place in pairs]
    # the matrices of each parameter: heads, or experts, may be one each
    cuts = [rule.cut(plan.matrix.how, view.whole_shape) for view in views]
    size = torch.empty(0, dtype=making.sent.dtype).element_size()
    keeps_local = making.alone is not None
    # found by shapes and placements alone: no message
    exchange = Owners(views, cuts, lows, size, making.shares_work, keeps_local)
    with_ranks = (groups, spots, low_spots, BACKENDS[backend], device, exchange)
    local = None
    # matrices that this rank alone has: launches of its own, beside the buckets
    if exchange.local:
        parts = [view.local.shape for view in views]
        local = making.alone(exchange.local, parts, groups, spots, device)
    state_shapes = [view.kept for view in views]
    shared = SharedSteps(formats, making, *with_ranks, state_shapes, local)
    plan.share(shared)
    return Matrices(*arguments, shared)
