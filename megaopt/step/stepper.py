"""Steps a list of parameters with a rule and formats; knows no optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from megaopt.kernels.chunks.table import is_capturing
from megaopt.kernels.refusals import one_of
from megaopt.kernels.rules import Rule
from megaopt.options.choices import MasterWeights
from megaopt.options.options import Options
from megaopt.options.placement import MASTER, SCALE, Homes
from megaopt.options.replicas import Replicas
from megaopt.state.numbers import GroupScalars
from megaopt.state.owned import Group, Owned
from megaopt.state.watch import Seen, grads_of
from megaopt.state.writes import ExternalWrites
from megaopt.step.batch import Batches, check_capture, check_captured_batches
from megaopt.step.collect import Check, completed_states, new_batches, resolve_grads, take_over
from megaopt.step.counts import GivenCounts
from megaopt.step.probing import answers_torch, is_asked_by_torch
from megaopt.step.ranks.ties import Ties
from megaopt.step.request import NOTHING, Asked, request_of
from megaopt.step.stages import StageLists, StepRun, arranged, leave_out_digests

if TYPE_CHECKING:
    from megaopt.kernels.digest.launch import StepDigests

States = Any
"""The state of each parameter; a defaultdict, as torch.optim.Optimizer has it."""


class Stepper:
    """Steps parameters in groups, with their states, as options say.

    What it is given in each step may be edited and replaced between steps: it looks at everything,
    and makes its batches anew where something is not what it was. A step is a list of stages, which
    is made with the batches.

    Args:
        options: of all groups.
        rule: the update rule.
        masters: as `master_weights` was given.
        homes: of states in host memory.
        replicas: the ranks that hold copies of parameters.
        warnings: those that were given, to share with others.
    """

    def __init__(
        self,
        options: Options,
        rule: Rule,
        masters: MasterWeights,
        homes: Homes,
        replicas: Replicas,
        warnings: set[str] | None = None,
    ) -> None:
        self.options, self.masters, self.homes = options, masters, homes
        self.replicas = replicas
        self.rule = rule.drawing if options.draws else rule
        self.writes = ExternalWrites(set() if warnings is None else warnings)
        self.quantities: tuple[str, ...] = ()
        """The quantities that steps record digests of."""
        self.passes = True
        """Whether passes of their own make those that launches do not."""
        self.given_counts = GivenCounts()
        """The step counts in state dicts that somebody may still have."""
        self.was_stepped = False
        """Whether no step asks any more which states there would be."""
        self.ties = Ties()
        """The ranks that hold other parts of the parameters."""
        self.preparations: dict[torch.device, Any] = {}
        """The buffers of scalars, controls and norms on each device, kept from step to step."""
        self.captured: list[Batches] = []
        """Batches whose tables CUDA graphs read."""
        self.stages: dict[bool, StageLists] = {}
        """The stages of a step that asks nothing of its gradients, and of one that does."""
        self.numbers = GroupScalars(options, self.rule)
        self._batches: Batches | None = None
        self._is_elsewhere = True
        """A weight lies elsewhere than its master knows."""
        self._device: torch.device | None = None
        """The first parameter's, once it is known."""

    def owned(self, groups: Sequence[Group]) -> Owned:
        """Groups with all that the stepper has for them: what a step works on."""
        return Owned(groups, self.options, self.rule, self.masters, self.homes, self.replicas)

    def reset(self, owned: Owned, state: States, written: Iterable[int] = ()) -> None:
        """Takes note that weights, masters or states are others: makes and compares all anew.

        written: places of parameters that were written since the last step.
        """
        self._batches, self._is_elsewhere = None, True
        self.ties.reset(owned)
        self.writes.reset(owned.params, state, written)

    def hear(self, groups: Sequence[Group]) -> None:
        """Raises ValueError where ranks differed in the last step; its count is taken back."""
        self.ties.hear(groups, self._batches, self.options.capturable)

    def record_digests(self, quantities: Iterable[str] | None, passes: bool) -> None:
        """See FusedOptimizer.record_digests."""
        names = tuple(dict.fromkeys(quantities or ()))
        moments = self.owned(()).all_moments
        state = [MASTER, *moments, *(f"{name}{SCALE}" for name in (MASTER, *moments))]
        for quantity in names:
            one_of("quantities", quantity, ("grad", "weight", *state))
        self.quantities, self.passes, self._batches = names, passes, None

    @property
    def digests(self) -> list[StepDigests]:
        """See FusedOptimizer.digests."""
        batches = [] if self._batches is None else self._batches.digests
        return [digests.read() for digests in batches if digests.is_known]

    def check_numbers(self, groups: Sequence[Group]) -> None:
        """Raises ValueError for a number of a group that a step cannot use."""
        self.numbers.rows(groups, self.owned(groups).check_groups)

    # --- the step

    def step(
        self, groups: Sequence[Group], state: States, arguments: Asked, check: Check | None = None
    ) -> None:
        """Updates every parameter that has a gradient; see FusedOptimizer.step.

        Args:
            groups: as an optimizer's param_groups.
            state: as an optimizer's state; it is completed.
            arguments: the step's.
            check: called before anything changes, where parameters are stepped for the first time.
        """
        if self.ties.meeting is not None:
            self.hear(groups)
        # all checks and all memory, before ranks meet
        run = self._begin(groups, state, arguments, check)
        # torch.distributed.checkpoint asked for states, and has them now
        if run is None:
            return
        batches = run.batches
        try:
            # True: the stages of a step that asks something of its gradients
            for votes, stages in self.stages[run.request is not NOTHING]:
                # on CPUs ranks vote at the end of each list whether all came through
                meeting = run.meeting if votes else None
                with nullcontext() if meeting is None else meeting.whole():
                    # the meeting, or the controls, may have told the host that there is no step
                    for stage in stages:
                        if run.is_left_out:
                            leave_out_digests(run)
                            return batches.abandon()
                        stage(run)
            # behind the last stage: on GPUs the launches are queued, and nothing waits for them
            run.count()
        except BaseException as error:
            # an error takes everything back; Ctrl-C finishes what launches have begun to write
            if isinstance(error, Exception) or not run.finish():
                batches.take_back()
            # Ctrl-C, and the step was finished: counts in state dicts go up as well
            elif self.given_counts.remaining:
                self.given_counts.follow(groups, state)
            # weights may have been written and put back: torch's counters go up in any case
            batches.watch.count_up()
            raise

        # the step is whole: copies of what it has written are let go
        batches.forget()
        # counts in state dicts that somebody has kept
        if self.given_counts.remaining and run.rows is not None:
            self.given_counts.follow(groups, state)
        # autograd hears that weights were written; `ExternalWrites` takes these versions as its own
        batches.watch.count_up()

    def _begin(
        self, groups: Sequence[Group], state: States, arguments: Asked, check: Check | None
    ) -> StepRun | None:
        """Checks everything, and takes the memory of launches; None if only states were made.

        Where this fails, other ranks are told, which would wait for this one.
        """
        captures = False
        # once, before a first step: ranks that hold parts of matrices compare options, groups and
        # names
        if self.options.MATRIX and not self.was_stepped:
            self.ties.agree(self.owned(groups), arguments.clip_norm, is_asked_by_torch())
        try:
            # from here on an error tells the ranks that would wait in the meeting
            request = request_of(arguments, self.options, len(groups))
            # where a capture goes on, and before the device is known
            if self._device is None or is_capturing(self._device):
                # before anything that waits for a device, which would break a capture
                captures = check_capture(self.owned(groups))
            # a first step may be a question of torch.distributed.checkpoint for the states
            if not self.was_stepped:
                self.was_stepped = True
                is_plain, decoupled = request is NOTHING, arguments.decoupled
                if is_plain and answers_torch(self, groups, state, decoupled, check):
                    return None
            # a norm is of one device: looked at before anything changes, and once for new batches,
            # as 75 parameters take 0.06 ms of a host
            if request.clip_norm is not None and self._batches is None:
                self.owned(groups).check_one_device(f"clip_norm={request.clip_norm!r}")
            # a row of the rule's scalars for each group, floats of the host; None under capturable
            rows = self.numbers.rows(groups, lambda: self.owned(groups).check_groups())
            # the last step's batches where everything fits them
            batches, seen = self.gather(groups, state, arguments.decoupled, check, captures)
            if request.clip_norm is not None and not batches.are_on_one_device:
                self.owned(groups).check_one_device(f"clip_norm={request.clip_norm!r}")
                batches.are_on_one_device = True
            run = StepRun(self, groups, request, rows, batches, seen, captures)
            # somebody wrote a weight, or put another tensor in its place: its master takes the new
            # values
            if seen.written or self._is_elsewhere:
                owned = self.owned(groups)
                self.writes.take_moved(owned, state, seen.written, self._is_elsewhere)
                self._is_elsewhere = False
            run.take_memory(arguments)
        except Exception:
            self.ties.withdraw(self.owned(groups), state, arguments)
            raise
        return run

    def withdraw(self, groups: Sequence[Group], state: States, arguments: Asked) -> None:
        """Tells the ranks that wait for this one that it cannot begin the step.

        Args: as for `step`.
        """
        owned = self.owned(groups)
        # the others wait where this rank would have gone: before a first step to agree
        is_first = self.options.MATRIX is not None and not self.was_stepped
        if not (is_first and self.ties.disagree(owned, is_asked_by_torch())):
            self.ties.withdraw(owned, state, arguments)

    # --- what there is to step

    def gather(
        self,
        groups: Sequence[Group],
        state: States,
        decoupled: bool,
        check: Check | None = None,
        captures: bool = False,
    ) -> tuple[Batches, Seen]:
        """The batches of this step: those of the last one where everything is as it was.

        captures: a CUDA graph captures the step, which asks more of them.
        """
        batches, self._batches = self._batches, None  # only batches that fit may stay
        # one pass over all tensors, mostly in C: None where something is not what it was
        seen = None if batches is None else batches.look(groups, state, decoupled)
        if seen is None or captures:
            owned = self.owned(groups)
            # a gradient on its way, or with a sign pending, was replaced: the batches may fit now
            if seen is None and resolve_grads(owned.params, decoupled) and batches is not None:
                for batch in batches.batches:  # the look that failed may have noted some addresses
                    batch.plan.stale = True
                self._is_elsewhere = True
                seen = batches.look(groups, state, decoupled)
            # within a capture only the last step's batches will do
            if is_capturing(owned.device):
                check_captured_batches(batches, seen is not None)
            # everything is checked, states are completed, tables are made
            if seen is None:
                grads = grads_of(owned.params, decoupled)
                recorded = self.quantities, self.passes
                batches = new_batches(owned, state, grads, check, self.writes, recorded)
                # whom a step meets, and its stages
                self.ties.look(owned)
                self.stages = {
                    asks: arranged(batches, self.options, self.ties, asks) for asks in (False, True)
                }
                self._is_elsewhere, self._device = True, owned.device
                seen = batches.look(groups, state, decoupled)
            if seen is None:
                raise RuntimeError("batches made from the tensors at hand do not fit them")
        assert batches is not None
        # kept until a step takes masters over, though this one may fail before it
        self._is_elsewhere |= seen.elsewhere
        self._batches = batches
        return batches, seen

    def make_states(
        self, groups: Sequence[Group], state: States, places: Iterable[int], check: Check | None
    ) -> None:
        """Makes the states of parameters complete, whether they have gradients or not."""
        owned, chosen = self.owned(groups), list(places)
        if check is not None:
            check(owned, chosen)
        take_over(owned, state, completed_states(owned, state, chosen), self.writes)
