"""Batches, each of tensors and a plan that steps them: a step works on them while they fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy
import torch

from megaopt.kernels import native
from megaopt.kernels.backends import Plan
from megaopt.kernels.chunks.batch import Buffers, Formats
from megaopt.kernels.chunks.table import is_capturing
from megaopt.kernels.native import is_worth_building, same_objects
from megaopt.kernels.shards import local_of
from megaopt.options.placement import MASTER, STEP
from megaopt.params.view import whole_shape_of
from megaopt.state.numbers import given_numbers
from megaopt.state.tensors import state_name
from megaopt.state.watch import Grads, Guards, Seen, Shards, Watch
from megaopt.state.writes import ExternalWrites
from megaopt.step.counts import StepRows

if TYPE_CHECKING:
    from megaopt.state.owned import Owned
    from megaopt.step.float8 import Float8
    from megaopt.step.matrix import Marks, Matrices
    from megaopt.step.ranks.meeting import Meeting

Copies = list[tuple[torch.Tensor, torch.Tensor]]
"""Tensors, each with a copy of what was in it."""


@dataclass
class Batch:
    """The parameters of one device and one combination of formats, and how they are stepped."""

    formats: Formats
    positions: list[int]
    """Places among all the optimizer's parameters."""
    params: list[torch.Tensor]
    states: list[dict[str, Any]]
    sharded: bool
    """Some parameters are DTensors: their shards are stepped."""
    staged: bool
    """Some tensors are not contiguous, or lie on another device than torch computes on."""
    plan: Plan
    float8: Float8 | None = None
    """The fp8 weights, where weights are codes; None for others."""
    matrices: Matrices | None = None
    """The matrices, where a rule steps whole ones; None for other rules."""
    apart: list[str] = field(default_factory=list)
    """Slots whose tensors are in host memory, while the weights are on a card."""
    undo: Copies = field(default_factory=list)
    """Copies of what a step of many calls is about to write: it is whole, or it never was."""
    _copies: Buffers = field(default_factory=dict)
    _written_grads: list[torch.Tensor] = field(default_factory=list)
    """The gradients that the step stores unscaled."""
    host_addresses: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.device = self.params[0].device
        self.names = {slot: state_name(slot) for slot in self.formats.state_slots}
        self.copies = self.staged or self.float8 is not None
        """The step is given copies of tensors that are not contiguous, and copies results back."""
        # where tensors are stepped as they are, the watch writes their addresses into the plan's
        # table
        rows = {} if self.copies else self.plan.addresses
        self.addresses = [rows[slot] for slot in self.formats.slots] if rows else []
        """The plan's rows of addresses, by slot; empty where it is given tensors instead."""

    def tensors(self, slot: str) -> list[torch.Tensor]:
        """Returns the tensors of a slot's results, weights or states; of DTensors the shards."""
        name = self.names.get(slot)
        tensors = self.params if name is None else [state[name] for state in self.states]
        return list(map(local_of, tensors)) if self.sharded else tensors

    def guards(self) -> Guards:
        """The facts that must stay as they are now, when the batch is made, for the watch."""
        formats, shapes = self.formats, [local_of(param).shape for param in self.params]
        # int64, a row for each slot, in which the watch notes addresses; parameters in fp8 have no
        # memory of their own: Float8 looks at that of their codes
        rows = self.addresses
        if not rows and self.float8 is None:
            rows = [*numpy.zeros((len(formats.slots), len(shapes)), dtype=numpy.int64)]
        # in the order of slots: gradients and weights, then what states have
        devices, scales = [self.device] * 2, list[list[torch.Size] | None]([None, None])
        for slot, name in self.names.items():
            tensors = self.tensors(slot)
            devices.append(tensors[0].device)
            # shapes of scales, packed codes and matrix moments; None: the parameters'
            of_matrix = formats.matrix is not None and name != MASTER
            form = formats.by_slot.get(slot)
            has_shapes = of_matrix or form is None or form.packed > 1
            scales.append([tensor.shape for tensor in tensors] if has_shapes else None)
        guards = Guards(
            positions=self.positions,
            names=list(self.names.values()),
            dtypes=[formats.dtype(slot) for slot in formats.slots],
            scales=scales,
            shapes=shapes,
            devices=devices,
            contiguous=not self.staged,
            addresses=rows,
            sharded=self.sharded,
        )
        return guards if self.float8 is None else self.float8.guards(guards)

    # --- a step of a plan without addresses

    def feed(self, grads: Grads, shards: Shards | None, writes_grads: bool = False) -> None:
        """Gives the plan its tensors before a step, copies of those that are not contiguous.

        Args:
            grads: of all parameters.
            shards: what the watch saw of DTensors.
            writes_grads: the step stores gradients unscaled.
        """
        # by slot, one tensor a parameter: of DTensors the shards, which the watch has taken out
        if shards is not None:
            buffers = dict(zip(("grad", "weight", *self.names), shards, strict=True))
        # plain tensors, looked up anew, as states may be edited between steps
        else:
            buffers = {
                "grad": [grads[position] for position in self.positions],  # type: ignore[misc]
                "weight": self.params,
                **{slot: [s[name] for s in self.states] for slot, name in self.names.items()},
            }
        if self.float8 is not None:
            buffers["weight"] = self.float8.codes
        # an error may come between two calls: all that they write is copied before
        if self.plan.many_calls:
            written = [buffers[slot] for slot in buffers if slot != "grad" or writes_grads]
            of_codes = () if self.float8 is None else self.float8.written_beside()
            self.undo += [(t, t.detach().clone()) for t in chain(*written, of_codes)]
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
            self.undo += [(t, t.detach().clone()) for t in self.matrices.begin()]

    def copy_results(self) -> None:
        """Copies the results back to staged tensors after a step."""
        # unscaled gradients, then weights and states
        copies, grads = self._copies, self._written_grads
        self._copies, self._written_grads = {}, []
        written = [(grads, copies["grad"])] if grads else []
        if "weight_remainder" in copies:
            copies["master"] = copies["weight_remainder"]
        weight_slots = () if self.float8 else ("weight",)
        for slot in (*weight_slots, *self.formats.state_slots):
            written.append((self.tensors(slot), copies[slot]))
        # contiguous tensors are their own copies
        for tensor, copy in chain(*(zip(*pair, strict=True) for pair in written)):
            if copy is not tensor:
                tensor.copy_(copy)

    def abandon(self) -> None:
        """Lets go of all copies where nothing was stepped; then there is no `copy_results`."""
        self._copies, self._written_grads = {}, []
        self.undo.clear()

    def take_back(self) -> None:
        """Puts everything back as it was before a step that failed; no `copy_results` follows."""
        # first the names that the step has added to states, then the elements
        if self.matrices is not None:
            self.matrices.take_back()
        put_back(self.undo)
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
        writes: notes the versions of the weights that the batches step.
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
        writes: ExternalWrites,
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
        self.counted = [*self.counts.apart, *self.counts.with_group]
        """The counts that go up with a step of the host, beside those of the groups: each behind
        the number of its group."""
        # in the groups' order: places everywhere count in this list
        params = tuple(param for group in param_groups for param in group["params"])
        self.quantized = [batch for batch in batches if batch.float8 is not None]
        self.matrices = [batch.matrices for batch in batches if batch.matrices is not None]
        self.fed = [batch for batch in batches if not batch.addresses]
        """Batches whose plans get tensors in every step."""
        self.are_on_one_device = False
        """All parameters were seen to be on one device, as a norm has it."""
        self.digests: list[Any] = []
        """Digests of each batch where they are recorded: megaopt.step.digests.BatchDigests."""
        self.undo: Copies = []
        """Copies of the counts on the device, as they were before the step on its way."""
        # the very tensors of parameters' own counts: one that is replaced means other rows
        states = (entry for batch in batches for entry in batch.states)
        self._with_counts = [entry for entry in states if STEP in entry]
        self._own_counts = [entry[STEP] for entry in self._with_counts]
        self._matrix_keys = matrix_keys
        # what chose how each parameter is stepped, to be compared before each step
        choices = [[group.get(name) for name in matrix_keys] for group in param_groups]
        self._chosen = deepcopy(choices) if matrix_keys else []  # a group can edit its lists
        self._marks: Marks | None = None
        if matrix_marks:
            from megaopt.step.matrix import Marks

            matrices = [param for param in params if len(whole_shape_of(param)) > 1]
            self._marks = Marks(matrices, matrix_marks)
        self._draws = any(batch.formats.draws for batch in batches)
        self._given = given_numbers(param_groups) if self._draws else []
        self._apart = [batch for batch in batches if batch.apart]
        # states of parameters without a gradient are not looked at
        stepped = {position for batch in batches for position in batch.positions}
        # the extension in C looks at all tensors in one call
        worth = is_worth_building(params)
        counted, noted = writes.counted
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
        names = self._matrix_keys
        if names and [[group.get(n) for n in names] for group in param_groups] != self._chosen:
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
        # states in host memory that have moved may not be pinned where they are now
        is_any_moved = False
        for batch in self._apart:  # all are noted
            # addresses by slot and parameter; none before the first look
            places = [[t.data_ptr() for t in batch.tensors(slot)] for slot in batch.apart]
            is_any_moved |= batch.host_addresses not in ([], places)
            batch.host_addresses = places
        if is_any_moved:
            return None
        return seen if elsewhere == seen.elsewhere else seen._replace(elsewhere=elsewhere)

    def abandon(self) -> None:
        """Lets go of all copies where nothing is stepped after all."""
        for batch in self.fed:
            batch.abandon()
        self.undo.clear()

    def take_back(self) -> None:
        """Puts back what many calls wrote in a step that failed on its way."""
        for batch in self.fed:
            batch.take_back()
        put_back(self.undo)

    def forget(self) -> None:
        """Lets the copies go once a step is whole: nothing is taken back any more."""
        self.undo.clear()
        for batch in self.fed:
            batch.undo.clear()


def put_back(copies: Copies) -> None:
    """Writes copies back, which takes no memory, and lets them go."""
    for tensor, before in copies:
        tensor.detach().copy_(before)
    copies.clear()


# --- CUDA graphs


def check_capture(owned: Owned) -> bool:
    """Raises RuntimeError for a step within a capture that reads numbers of the host.

    Returns whether a CUDA graph captures the step.
    """
    if not is_capturing(owned.device):
        return False
    name = owned.backend(owned.device)
    if name != "triton":
        raise RuntimeError(
            f"a CUDA graph is being captured, and backend={name!r} computes on the host: only "
            "backend='triton' can be captured"
        )
    if not owned.options.capturable:
        raise RuntimeError(
            "a CUDA graph is being captured, and capturable=False: the graph would repeat this "
            "step's lr and step for ever; pass capturable=True"
        )
    return True


def check_captured_batches(last: Batches | None, fit: bool) -> None:
    """Raises RuntimeError within a capture for what a step can do only outside one.

    Args:
        last: the batches of the last step.
        fit: whether this step has the same.
    """
    if last is None or not fit:
        raise RuntimeError(
            "a CUDA graph is being captured, and the parameters, gradients or states are not those "
            "of the last step (other dtypes, sizes or parameters with gradients, or no step yet): "
            "take one step like this one before the capture; only the gradients' addresses may "
            "differ"
        )
    if any(batch.staged for batch in last.batches):
        raise RuntimeError(
            "a CUDA graph is being captured, and a parameter, gradient or state is not contiguous: "
            "only contiguous ones are allowed in a capture"
        )
    for batch in last.batches:
        reason = batch.why_not_captured()
        if reason is not None:
            raise RuntimeError(f"a CUDA graph is being captured, and {reason}")
