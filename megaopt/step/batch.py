"""Batches, each of a source of tensors and a plan: a step works on them while they fit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy
import torch

from megaopt.kernels import native
from megaopt.kernels.backends import Plan
from megaopt.kernels.chunks.batch import Buffers, Formats
from megaopt.kernels.native import is_worth_building, same_objects
from megaopt.options.placement import STEP
from megaopt.params.view import whole_shape_of
from megaopt.state.numbers import chosen, given_numbers
from megaopt.state.ownership import Versions
from megaopt.state.watch import Grads, Guards, Seen, Shards, Watch
from megaopt.step.counts import StepRows
from megaopt.step.float8 import Float8
from megaopt.step.matrix import Matrices
from megaopt.step.ranks.meeting import Meeting
from megaopt.step.source import FormatGroup

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
        self._marks = deepcopy([*map(self._read, self._attributes)])  # lists may be edited
        self._counts = [*map(len, self._attributes)]
        pairs = zip(self._attributes, self._marks, strict=True)
        self._marked = [pair for pair in pairs if pair[1] != [MISSING] * len(names)]

    def _read(self, attributes: Mapping[str, Any]) -> list[Any]:
        return [attributes.get(name, MISSING) for name in self._names]

    def are_the_same(self) -> bool:
        """Whether parameters are marked as they were."""
        # marks that were there, then parameters that have got attributes since
        if any(self._read(attributes) != marks for attributes, marks in self._marked):
            return False
        counts = [*map(len, self._attributes)]
        if counts == self._counts:
            return True
        # other attributes came, and no mark: the new counts are the usual ones
        self._counts = counts
        return [*map(self._read, self._attributes)] == self._marks


class Undo:
    """Copies of what a step of many calls is about to write: it is whole, or it never was."""

    def __init__(self) -> None:
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def keep(self, tensors: Iterable[torch.Tensor]) -> None:
        """Copies tensors before they are written."""
        self._copies += [(tensor, tensor.detach().clone()) for tensor in tensors]

    def restore(self) -> None:
        """Writes the copies back, which takes no memory."""
        for tensor, before in self._copies:
            tensor.detach().copy_(before)
        self._copies = []

    def forget(self) -> None:
        """Lets the copies go."""
        self._copies = []


@dataclass
class Batch:
    """The parameters of one device and one combination of formats, and how they are stepped."""

    source: FormatGroup
    plan: Plan
    float8: Float8 | None = None
    """The fp8 weights, where weights are codes; None for others."""
    matrices: Matrices | None = None
    """The matrices, where a rule steps whole ones; None for other rules."""
    apart: list[str] = field(default_factory=list)
    """Slots whose tensors are in host memory, while the weights are on a card."""
    undo: Undo = field(default_factory=Undo)
    """Copies of what the step on its way writes, as it was before."""
    _copies: Buffers = field(default_factory=dict)
    _written_grads: list[torch.Tensor] = field(default_factory=list)
    """The gradients that the step stores unscaled."""
    _host_addresses: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        source = self.source
        self.formats: Formats = source.formats
        self.device = source.params[0].device
        # where tensors are stepped as they are, the watch writes their addresses into the plan's
        # table
        plain = not (source.staged or self.float8 is not None)
        rows = self.plan.addresses if plain else {}
        self.addresses = [rows[slot] for slot in source.formats.slots] if rows else []
        """The plan's rows of addresses, by slot; empty where it is given tensors instead."""
        self.copies = source.staged or self.float8 is not None
        """The step is given copies of tensors that are not contiguous, and copies results back."""

    @property
    def positions(self) -> list[int]:
        """Places of the parameters among all."""
        return self.source.positions

    def guards(self) -> Guards:
        """The facts that the watch compares; fp8 weights' parameters have no memory to look at."""
        # parameters in fp8 have no memory of their own: Float8 looks at that of their codes
        if self.float8 is not None:
            return self.float8.guards(self.source.guards())
        shape = (len(self.formats.slots), len(self.source.params))
        return self.source.guards(self.addresses or [*numpy.zeros(shape, dtype=numpy.int64)])

    def host_memory_moved(self) -> bool:
        """Returns whether a state in host memory has moved: it may not be pinned there."""
        # addresses by slot and parameter; none before the first look
        now = [[tensor.data_ptr() for tensor in self.source.tensors(slot)] for slot in self.apart]
        before, self._host_addresses = self._host_addresses, now
        return before not in ([], now)

    # --- a step of a plan without addresses

    def feed(self, grads: Grads, shards: Shards | None, writes_grads: bool = False) -> None:
        """Gives the plan its tensors before a step, copies of those that are not contiguous.

        Args:
            grads: of all parameters.
            shards: what the watch saw of DTensors.
            writes_grads: the step stores gradients unscaled.
        """
        # by slot, one tensor a parameter: of DTensors the shards
        buffers = self.source.buffers(grads, shards)
        if self.float8 is not None:
            buffers["weight"] = self.float8.codes
        # an error may come between two calls: all that they write is copied before
        if self.plan.many_calls:
            self.undo.keep(
                t for slot in buffers if slot != "grad" or writes_grads for t in buffers[slot]
            )
            if self.float8 is not None:
                self.undo.keep(self.float8.written_beside())
        # contiguous copies; torch's plans get tensors of host memory on the weights' device
        if self.copies:
            self._written_grads = buffers["grad"] if writes_grads else []
            # addresses of host memory serve kernels, and not torch
            device = None if self.plan.addresses else self.device
            buffers = {slot: [t.to(device).contiguous() for t in buffers[slot]] for slot in buffers}
            self._copies = buffers
        if self.float8 is not None:
            buffers = self.float8.inputs(self.plan, buffers)
        # the plan takes them for this step
        self.plan.look(buffers)
        # what states keep for matrix rules may be written as well
        if self.matrices is not None:
            self.undo.keep(self.matrices.begin())

    def copy_results(self) -> None:
        """Copies the results back to staged tensors after a step."""
        # unscaled gradients, then weights and states; contiguous tensors are their own copies
        copies, grads = self._copies, self._written_grads
        self._copies, self._written_grads = {}, []
        if grads:
            copy_back(grads, copies["grad"])
        if "weight_remainder" in copies:
            copies["master"] = copies["weight_remainder"]
        weight_slots = () if self.float8 else ("weight",)
        for slot in (*weight_slots, *self.formats.state_slots):
            copy_back(self.source.tensors(slot), copies[slot])

    def abandon(self) -> None:
        """Lets go of all copies where nothing was stepped; then there is no `copy_results`."""
        self._copies, self._written_grads = {}, []
        self.undo.forget()

    def take_back(self) -> None:
        """Puts everything back as it was before a step that failed; no `copy_results` follows."""
        # first the names that the step has added to states, then the elements
        if self.matrices is not None:
            self.matrices.take_back()
        self.undo.restore()
        self.abandon()

    def why_not_captured(self) -> str | None:
        """The reason why a CUDA graph cannot repeat the step of contiguous tensors, or None."""
        for part in (self.float8, self.matrices):
            reason = None if part is None else part.why_not_captured()
            if reason is not None:
                return reason
        return None


class Batches:
    """All batches of an optimizer, and the watch over what they were made from.

    Args:
        batches: of the parameters that have a gradient.
        param_groups: the optimizer's.
        state: the optimizer's, complete for these parameters.
        versions: of the weights that the batches step.
        counts: which rows of scalars the parameters take.
        masters: the caller's list; None without one.
        matrix_keys: keys of groups that choose how matrices are stepped.
        matrix_marks: attributes of parameters that do.
    """

    def __init__(
        self,
        batches: list[Batch],
        param_groups: Sequence[Mapping[str, Any]],
        state: Mapping[Any, dict[str, Any]],
        versions: Versions,
        counts: StepRows | None = None,
        masters: Sequence[torch.Tensor | None] | None = None,
        matrix_keys: Sequence[str] = (),
        matrix_marks: Sequence[str] = (),
    ) -> None:
        self.batches = batches
        self.meetings: dict[bool, Meeting | None] = {}
        """The meetings, if any, of steps that measure gradients (True) and of other steps."""
        # the caller's list, and what was in it
        self._masters, self._entries = masters, None if masters is None else list(masters)
        self.counts = StepRows() if counts is None else counts
        self.counted = self.counts.counted
        """The counts that go up with a step of the host, beside those of the groups."""
        # in the groups' order: places everywhere count in this list
        params = tuple(param for group in param_groups for param in group["params"])
        self.quantized = [batch for batch in batches if batch.float8 is not None]
        self.matrices = [batch.matrices for batch in batches if batch.matrices is not None]
        self.fed = [batch for batch in batches if not batch.addresses]
        """Batches whose plans get tensors in every step."""
        self.digests: list[Any] = []
        """Digests of each batch where they are recorded: megaopt.step.digests.BatchDigests."""
        self.undo = Undo()
        """Copies of the counts on the device, as they were before the step on its way."""
        # the very tensors of parameters' own counts: one that is replaced means other rows
        states = (entry for batch in batches for entry in batch.source.states)
        self._with_counts = [entry for entry in states if STEP in entry]
        self._own_counts = [entry[STEP] for entry in self._with_counts]
        self._matrix_keys = matrix_keys
        # what chose how each parameter is stepped, to be compared before each step
        self._chosen = deepcopy(chosen(param_groups, matrix_keys))  # a group can edit its lists
        matrices = [param for param in params if len(whole_shape_of(param)) > 1]
        self._marks = Marks(matrices, matrix_marks) if matrix_marks else None
        self._draws = any(batch.formats.draws for batch in batches)
        self._given = given_numbers(param_groups) if self._draws else []
        self._apart = [batch for batch in batches if batch.apart]
        # states of parameters without a gradient are not looked at
        stepped = {position for batch in batches for position in batch.positions}
        # the extension in C looks at all tensors in one call
        worth = is_worth_building(params)
        counted, noted = versions.counted
        self.watch = Watch(
            params=params,
            sizes=[len(group["params"]) for group in param_groups],
            states=tuple(state[p] if i in stepped else None for i, p in enumerate(params)),
            keys=tuple(state.keys()),
            values=tuple(state.values()),
            batches=[batch.guards() for batch in batches],
            find=partial(native.get, worth),
            awaits=worth,
            counted=counted,
            noted=noted,
        )

    def look(
        self, param_groups: Sequence[Mapping[str, Any]], state: Mapping[Any, Any], decoupled: bool
    ) -> Seen | None:
        """Looks at the tensors of this step; None where they do not fit these batches."""
        # None of any of these: the batches have to be made anew
        if self._chosen and chosen(param_groups, self._matrix_keys) != self._chosen:
            return None
        if self._marks is not None and not self._marks.are_the_same():
            return None
        if self._draws and given_numbers(param_groups) != self._given:
            return None
        if self._masters is not None and not same_objects(self._masters, self._entries or ()):
            return None
        if self.counts.with_group and not self.counts.fit(param_groups):
            return None
        if self._with_counts:
            now = [entry.get(STEP) for entry in self._with_counts]
            if not same_objects(now, self._own_counts):
                return None
        # all parameters, gradients and states; new addresses go into the plans' tables
        seen = self.watch.look(param_groups, state, decoupled)
        if seen is None:
            return None
        elsewhere = seen.elsewhere
        # fp8 weights: the tensors behind the parameters
        for batch in self.quantized:
            assert batch.float8 is not None
            elsewhere |= batch.float8.look()
        # a table that is stale is sent to the device before the launch
        for batch, moved in zip(self.batches, seen.moved, strict=True):
            batch.plan.stale = batch.plan.stale or moved
        moved_apart = [batch.host_memory_moved() for batch in self._apart]  # all are noted
        if any(moved_apart):
            return None
        return seen if elsewhere == seen.elsewhere else seen._replace(elsewhere=elsewhere)

    def feed(self, seen: Seen, writes_grads: bool) -> None:
        """See Batch.feed."""
        for batch, shards in zip(self.batches, seen.shards, strict=True):
            if not batch.addresses:
                batch.feed(seen.grads, shards, writes_grads)

    def keep_counts(self, groups: Iterable[Mapping[str, Any]]) -> None:
        """Copies the counts on the device, where the host's calls count."""
        if any(batch.plan.many_calls for batch in self.fed):
            self.undo.keep(group["step"] for group in groups)

    def abandon(self) -> None:
        """Lets go of all copies where nothing is stepped after all."""
        for batch in self.fed:
            batch.abandon()
        self.undo.forget()

    def take_back(self) -> None:
        """Puts back what many calls wrote in a step that failed on its way."""
        for batch in self.fed:
            batch.take_back()
        self.undo.restore()

    def forget(self) -> None:
        """Lets the copies go once a step is whole: nothing is taken back any more."""
        for undo in (self.undo, *(batch.undo for batch in self.fed)):
            undo.forget()


def copy_back(tensors: Sequence[torch.Tensor], copies: Sequence[torch.Tensor]) -> None:
    """Stores what became of contiguous copies; a contiguous tensor is its own copy."""
    for tensor, copy in zip(tensors, copies, strict=True):
        if copy is not tensor:
            tensor.copy_(copy)
