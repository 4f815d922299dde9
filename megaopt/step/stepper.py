"""Steps a list of parameters with a rule and formats; knows no optimizer."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property, partial
from itertools import chain, islice, repeat
from typing import Any, NamedTuple

import torch

from megaopt.kernels.backends import BACKENDS
from megaopt.kernels.chunks.table import is_capturing
from megaopt.kernels.digest.launch import StepDigests
from megaopt.kernels.rules import Rule
from megaopt.kernels.step.controls import SKIP
from megaopt.kernels.step.preparation import Measured, Request
from megaopt.options.checks import one_of
from megaopt.options.choices import MasterWeights
from megaopt.options.options import Options
from megaopt.options.placement import MASTER, SCALE, Homes
from megaopt.options.replicas import Replicas
from megaopt.params.dtensor import local_of
from megaopt.state.numbers import GroupScalars, Row
from megaopt.state.owned import Group, Owned
from megaopt.state.ownership import commit
from megaopt.state.watch import Grads, Seen, grads_of
from megaopt.state.writes import ExternalWrites, warn_caller
from megaopt.step.batch import Batch, Batches
from megaopt.step.collect import Check, collect, completed_states, make_batches, resolve_grads
from megaopt.step.counts import GivenCounts
from megaopt.step.digests import BESIDE_STATE, BatchDigests
from megaopt.step.gradients import check_written_grads
from megaopt.step.matrix import is_exchanged
from megaopt.step.probing import is_asked_by_torch, is_probe
from megaopt.step.ranks.answers import of_groups
from megaopt.step.ranks.meeting import Meeting, Sharers, agreement_of, meeting_of, sharers_of
from megaopt.step.request import NOTHING, Asked, check_met, request_of

States = Any
"""The state of each parameter; a defaultdict, as torch.optim.Optimizer has it."""

NO_GRADIENTS = "no gradients"
"""The mark among the warnings given: steps without gradients were warned of, or are meant."""

LONGEST = 1000
"""Characters of the groups that a message shows."""

Prepared = dict[torch.device, tuple[Any, Any]]
"""The scalars of each device, if they are made there, and the controls."""


class Preparations:
    """The buffers of scalars, controls and norms on each device, kept from step to step."""

    def __init__(self) -> None:
        self._by_device: dict[torch.device, Any] = {}

    def on(self, device: torch.device, owned: Owned) -> Any:
        """The preparation of a device."""
        if device not in self._by_device:
            backend = BACKENDS[owned.backend(device)]
            if backend.why_not(device) is not None:
                backend = BACKENDS["reference"]  # there are no parameters, only steps to count
            with torch.inference_mode(False):  # later steps write its buffers
                self._by_device[device] = backend.preparation(owned.rule, device)
        return self._by_device[device]

    def make(
        self,
        owned: Owned,
        groups: Sequence[Mapping[str, Any]] | None,
        batches: Batches,
        request: Request,
        prepared: Prepared,
    ) -> None:
        """Makes scalars and controls of all devices that have parameters.

        Args:
            owned: the optimizer's.
            groups: those of all rows of scalars; None where these come from the host.
            batches: what is stepped.
            request: what to do with the gradients.
            prepared: gets what is made, device by device: with it the counts on one have gone up.
        """
        # the first parameter's too, which may have no gradient
        devices = dict.fromkeys([owned.device, *[batch.device for batch in batches.batches]])
        # rows come from the host, and gradients stay as they are: launches need nothing made
        if groups is None and request.is_empty:
            prepared.update(dict.fromkeys(devices, (None, None)))
            return

        # rows of scalars: those of the groups, then one for each count of its own
        behind = [group for group, _ in batches.counts.apart]
        count = len(owned.groups) + len(behind)
        for device in devices:
            # the ranks have met by now: peers have the sums over ranks
            plans = _measured(batches, device) if request.needs_norm else []
            device_request = request.on(device, behind)
            # scalars fp32 [count, scalars of the rule] or None, controls fp32 [count, COUNT] or
            # None
            prepared[device] = self.on(device, owned).make(groups, count, device_request, plans)

    def nonfinite(self, owned: Owned, batches: Sequence[Batch], device: torch.device) -> Any:
        """int64 [1] on a device: whether an infinity or NaN is among all gradients of this rank."""
        # the flag stays on the device: nobody waits
        flag = torch.zeros(1, dtype=torch.int64, device=device)
        # a look through all gradients of each device, into the bins that the norm is made of
        for batch_device in {batch.device for batch in batches}:
            plans = [batch.plan for batch in batches if batch.device == batch_device]
            device_flag = self.on(batch_device, owned).has_nonfinite(plans)
            flag = torch.maximum(flag, device_flag.to(device, torch.int64))
        return flag

    @property
    def norm(self) -> torch.Tensor:
        """See FusedOptimizer.grad_norm."""
        preparations = [
            preparation for preparation in self._by_device.values() if preparation.measured
        ]
        if not preparations:
            raise RuntimeError(
                "no step has measured the norm yet: a step with clip_norm, or under "
                "nonfinite='skip' or 'error', does, unless found_inf leaves it out"
            )
        if len(preparations) != 1:
            raise RuntimeError(
                f"grad_norm is known on {len(preparations)} devices: a step with clip_norm, or "
                "under nonfinite='skip', with all parameters on one device, finds it"
            )
        norm: torch.Tensor = preparations[0].norm
        return norm


def facts_of(owned: Owned, clip_norm: Any) -> dict[str, str]:
    """Returns what ranks compare before a first step, by the names that an error gives."""
    facts = {
        "clip_norm": repr(clip_norm),
        "the number of groups": repr(len(owned.groups)),
        "the number of parameters": repr(len(owned.params)),
        **of_groups(owned.groups),
        **{f"option {name}": repr(value) for name, value in vars(owned.options).items()},
    }
    for place, (label, *described) in enumerate(owned.described()):
        facts[f"the parameter at place {place}"] = label
        facts[f"how {label} is stepped"] = repr(described)
    return facts


class RankTies(NamedTuple):
    """The ranks that this one depends on, and how."""

    exchanges: bool | None
    """They send each other parts of matrices in every step; None: not known yet."""
    sharers: list[Sharers]
    """The ranks that hold other parts of its parameters."""


class StepRun:
    """One step on its way."""

    def __init__(
        self,
        stepper: Stepper,
        groups: Sequence[Group],
        request: Request,
        rows: list[Row] | None,
        batches: Batches,
        seen: Seen,
    ) -> None:
        # the request is this rank's until `_meet`, then that of all ranks
        self._stepper, self.groups, self.request = stepper, groups, request
        self.rows, self.batches, self.grads = rows, batches, seen.grads
        self._seen = seen  # launches read shards that may be in nobody else's hands
        self.ready: list[Any] = []
        """The rows of scalars of each batch, as its plan takes them."""
        self.prepared: Prepared = {}
        """Scalars and controls; {} where scalars are the host's and gradients as they are."""
        self.meeting: Meeting | None = None
        """The meeting with the other ranks; None where none are met in this step."""
        self.gathered: Any = ()
        """Amaxes that ranks put together."""
        self.waits = False
        """The host waits to know if there is a step, as on all ranks or on none."""
        self.is_captured = False
        """A CUDA graph captures the step."""
        self.is_left_out = False
        self.launched: list[None] = []
        """An entry for each batch that is stepped."""
        self._counted: tuple[Sequence[Group], list[int]] = ([], [])
        """The groups that are counted, and their counts with this step."""
        self.left_out: set[int] = set()
        """Groups that the host knows to be skipped, where others are stepped."""

    @cached_property
    def owned(self) -> Owned:
        """The groups, and all that the stepper has for them."""
        return self._stepper.owned(self.groups)

    def count(self) -> None:
        """Raises the host's counts: in one call, so that Ctrl-C comes before all or behind all."""
        # capturable: kernels count on the device
        if self.rows is None:
            return
        groups: Sequence[Group] = self.groups  # empty ones too
        counts: Sequence[Any] = self.batches.counted
        # found_inf of one group leaves that group's counts as they are
        if self.left_out:
            groups = [group for i, group in enumerate(groups) if i not in self.left_out]
            counts = [pair for pair in counts if pair[0] not in self.left_out]
        # groups have ints, parameters' own counts numpy's numbers, which go up in place
        steps = [group["step"] + 1 for group in groups]
        self._counted = groups, steps
        ups: Iterator[Any] = map(operator.setitem, groups, repeat("step"), steps)
        if counts:
            ups = chain(ups, map(operator.iadd, [count["step"] for _, count in counts], repeat(1)))
        # C alone runs in here: no signal handler comes between two counts
        deque(ups, maxlen=0)

    @property
    def is_counted(self) -> bool:
        """Whether the host's counts have gone up."""
        return any(group["step"] == step for group, step in zip(*self._counted, strict=True))


Stage = Callable[[StepRun], None]


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
        self.writes = ExternalWrites(warnings)
        self.quantities: tuple[str, ...] = ()
        """The quantities that steps record digests of."""
        self.passes = True
        """Whether passes of their own make those that launches do not."""
        self.given_counts = GivenCounts()
        """The step counts in state dicts that somebody may still have."""
        self.was_stepped = False
        """Whether no step asks any more which states there would be."""
        self._has_agreed = False
        """Ranks that hold parts of matrices have compared what they are going to step."""
        self._preparations = Preparations()
        self._meeting: Meeting | None = None  # of the last step
        self._numbers = GroupScalars(options, self.rule)
        self._batches: Batches | None = None
        self._captured: list[Batches] = []  # CUDA graphs read their tables
        self._stages: dict[bool, list[tuple[bool, list[Stage]]]] = {}
        self._is_shared = False
        """Other ranks hold parts of the same parameters."""
        self._ties = self._agreed = RankTies(None, [])
        """The batches' ties, and those that all ranks agreed on last: other ranks go by these,
        whatever this rank's groups have become."""
        self._is_elsewhere = True
        """A weight lies elsewhere than its master knows."""
        self._is_on_one_device = False
        """Whether all parameters were seen to be on one device since the batches were made."""
        self._can_capture: bool | None = None
        """Whether a CUDA graph may capture a step; None: not known yet."""
        self._device = torch.device("cpu")
        """The first parameter's, where it is known."""

    def owned(self, groups: Sequence[Group]) -> Owned:
        """Groups with all that the stepper has for them: what a step works on."""
        return Owned(groups, self.options, self.rule, self.masters, self.homes, self.replicas)

    def reset(self, owned: Owned, state: States, written: Iterable[int] = ()) -> None:
        """Takes note that weights, masters or states are others: makes and compares all anew.

        written: places of parameters that were written since the last step.
        """
        self._batches, self._is_elsewhere, self._meeting = None, True, None
        self._agreed = RankTies(None, sharers_of(owned.usual_views))
        self.writes.reset(owned.params, state, written)

    def hear(self, groups: Sequence[Group]) -> None:
        """Raises ValueError where ranks differed in the last step; its count is taken back."""
        # what the other ranks said in the last step, which the host has not read yet
        if self._meeting is not None:
            counted = [count for _, count in self._batches.counted] if self._batches else []
            self._meeting.hear([] if self.options.capturable else [*groups, *counted])

    @property
    def norm(self) -> torch.Tensor:
        """See FusedOptimizer.grad_norm."""
        return self._preparations.norm

    def record_digests(self, quantities: Iterable[str] | None, passes: bool) -> None:
        """See FusedOptimizer.record_digests."""
        names = tuple(dict.fromkeys(quantities or ()))
        moments = self.owned(()).all_moments
        state = [MASTER, *moments, *(f"{name}{SCALE}" for name in (MASTER, *moments))]
        for quantity in names:
            one_of("quantities", quantity, (*BESIDE_STATE, *state))
        self.quantities, self.passes, self._batches = names, passes, None

    @property
    def digests(self) -> list[StepDigests]:
        """See FusedOptimizer.digests."""
        batches = [] if self._batches is None else self._batches.digests
        return [digests.read() for digests in batches if digests.is_known]

    def check_numbers(self, groups: Sequence[Group]) -> None:
        """Raises ValueError for a number of a group that a step cannot use."""
        self._numbers.rows(groups, self.owned(groups).check_groups)

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
        if self._meeting is not None:
            self.hear(groups)
        # all checks and all memory, before ranks meet
        run = self._begin(groups, state, arguments, check)
        # torch.distributed.checkpoint asked for states, and has them now
        if run is None:
            return
        batches = run.batches
        try:
            # True: the stages of a step that asks something of its gradients
            for votes, stages in self._stages[run.request is not NOTHING]:
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
            if isinstance(error, Exception) or not self._finish(run):
                batches.take_back()
            # Ctrl-C, and the step was finished: counts in state dicts go up as well
            elif self.given_counts.kept:
                self.given_counts.follow(groups, state)
            # weights may have been written and put back: torch's counters go up in any case
            batches.watch.count_up()
            raise

        # the step is whole: copies of what it has written are let go
        batches.forget()
        # counts in state dicts that somebody has kept
        if self.given_counts.kept and run.rows is not None:
            self.given_counts.follow(groups, state)
        # autograd hears that weights were written; `Versions` takes these versions as its own
        batches.watch.count_up()

    def _finish(self, run: StepRun) -> bool:
        """Returns whether a step is whole after Ctrl-C; finishes one that cannot be taken back."""
        # Ctrl-C came behind the counts
        if run.is_counted:
            return True
        batches = run.batches.batches
        # a launch has begun to write, or the counts on the device have gone up
        is_final = run.launched or (self.options.capturable and run.prepared)
        # what is left may be messages between ranks; plans of many calls have copies, and are taken
        # back
        if not is_final or run.meeting or any(batch.plan.many_calls for batch in batches):
            return False
        # the batches that are left, from the one behind the last launch
        if len(run.launched) < len(batches):
            stages = [
                stage for _, part in self._stages[run.request is not NOTHING] for stage in part
            ]
            for stage in stages[stages.index(launch) :]:
                stage(run)
        run.count()
        return True

    def _begin(
        self, groups: Sequence[Group], state: States, arguments: Asked, check: Check | None
    ) -> StepRun | None:
        """Checks everything, and takes the memory of launches; None if only states were made.

        Where this fails, other ranks are told, which would wait for this one.
        """
        captures = False
        # once, before a first step: ranks that hold parts of matrices compare options, groups and
        # names
        if not (self._has_agreed or self.was_stepped):
            self._agree(groups, arguments)
        try:
            # from here on an error tells the ranks that would wait in the meeting
            request = request_of(arguments, self.options, len(groups))
            # where a capture goes on, and before the device is known
            if self._can_capture is None or (self._can_capture and is_capturing(self._device)):
                # before anything that waits for a device, which would break a capture
                owned = self.owned(groups)
                captures = check_capture(owned.device, self.options.capturable, owned.backend)
            # a first step may be a question for states alone
            if not self.was_stepped and self._makes_states(
                groups, state, request, arguments, check
            ):
                return None
            # before anything changes, and once more behind new batches
            self._check_one_device(groups, request)
            # a row of the rule's scalars for each group, floats of the host; None under capturable
            rows = self._numbers.rows(groups, lambda: self.owned(groups).check_groups())
            # the last step's batches where everything fits them
            batches, seen = self.gather(groups, state, arguments.decoupled, check, captures)
            self._check_one_device(groups, request)
            run = StepRun(self, groups, request, rows, batches, seen)
            run.is_captured = captures
            # somebody wrote a weight, or put another tensor in its place: its master takes the new
            # values
            if seen.written or self._is_elsewhere:
                places = self.writes.versions.moved(seen.written, self._is_elsewhere)
                self.writes.take_over(run.owned, state, places)
                self.writes.versions.arrived(state)
                self._is_elsewhere = False
            # a row for each count that is not its group's, behind the groups' rows
            if rows is not None and batches.counts.apart:
                rows += self._numbers.made(batches.counts.groups(groups))
            # gradients are written only where a loss scale is taken off them
            writes = self.options.write_unscaled_grads and request.grad_scale is not None
            if writes:
                grads = [local_of(grad) for grad in seen.grads]
                check_written_grads(grads, run.owned.labels)
            # plans without a table of addresses get their tensors, or contiguous copies of them
            if batches.fed:
                batches.feed(seen, writes)
            # all memory is taken before the first launch: none fails for it after another
            run.ready = [batch.plan.ready(rows) for batch in batches.batches]
            # whom the first stage of this step meets, and whether the host waits for the answer
            if request is not NOTHING or self._is_shared:
                run.waits = arguments.waits(self.options)
                run.meeting = self._meeting = self._meeting_for(run)
            # ranks vote by one found_inf, not by one for each group
            if run.meeting is not None:
                check_met(request)
        except Exception:
            self._withdraw(groups, state, arguments)
            raise
        return run

    def _check_one_device(self, groups: Sequence[Group], request: Request) -> None:
        """Raises ValueError where a norm is asked for of parameters on several devices.

        75 parameters take 0.06 ms of a host, so that they are looked at once for new batches.
        """
        if request.clip_norm is not None and not self._is_on_one_device:
            self.owned(groups).check_one_device(f"clip_norm={request.clip_norm!r}")
            self._is_on_one_device = True

    def _agree(self, groups: Sequence[Group], arguments: Asked) -> None:
        """Compares with other ranks, before a first step, whom they will meet, and for what.

        Whatever groups say, all ranks come here that hold parts of parameters. Raises ValueError
        where they differ, or for what one cannot step, on all of them.
        """
        # in the order that all ranks have, whatever their groups say now
        met = self._first_met(groups)
        # within a capture the host could not read the answer
        if not met or is_capturing(met[0].device):
            return
        # what ranks must have alike: numbers of groups, options, each parameter's name, shape,
        # placement
        try:
            owned = self.owned(groups)
            owned.check_groups()
            settings = owned.settings()
            alike = settings, owned.described(), arguments.clip_norm
        except Exception:
            # this rank has nothing to compare: the others hear that it raises
            self._disagree(met)
            raise
        got = f"{len(owned.params)} parameters in groups {settings[0]}"
        meeting = agreement_of(
            met, alike, got[:LONGEST], partial(facts_of, owned, arguments.clip_norm)
        )
        # sums of digests over all ranks of each mesh, read by the host at once
        if meeting is not None:
            meeting.compare()
        self._has_agreed = True

    def _first_met(self, groups: Sequence[Group]) -> list[Sharers]:
        """Returns whom this rank meets before a first step; nobody without a rule for matrices."""
        if self.options.MATRIX is None:
            return []
        views = self.owned(groups).usual_views
        if is_asked_by_torch() and not any(view.is_sharded for view in views):
            return []  # of plain parameters one rank may ask alone
        return [*self._agreed.sharers, *sharers_of(views)]

    def _disagree(self, met: Sequence[Sharers]) -> None:
        """Tells the ranks that compare what they have that this one raises an error."""
        meeting = agreement_of(met, None)
        if meeting is not None:
            meeting.withdraw(False)

    def withdraw(self, groups: Sequence[Group], state: States, arguments: Asked) -> None:
        """Tells the ranks that wait for this one that it cannot begin the step.

        Args: as for `step`.
        """
        # the others wait where this rank would have gone: before a first step in `_agree`, later in
        # `_meet`
        met = [] if self._has_agreed or self.was_stepped else self._first_met(groups)
        if met:
            self._disagree(met)
        else:
            self._withdraw(groups, state, arguments)

    def _withdraw(self, groups: Sequence[Group], state: States, arguments: Asked) -> None:
        """Meets the ranks in the place of `Meeting.meet`, where they go by what they know."""
        # whom others take this rank to meet: by what all agreed on, and by parameters that are new
        views = self.owned(groups).shared_views
        exchanged, sharers = self._agreed
        new = [view for view in views if exchanged is None or not state.get(view.param)]
        # ranks that send each other parts of matrices meet in every step, as if gradients were
        # measured
        exchanges = bool(exchanged) or any(map(is_exchanged, new))
        measures = (
            exchanges or arguments.clip_norm is not None or arguments.skips_nonfinite(self.options)
        )
        meeting = meeting_of(
            views, measures=measures, last=self._meeting, met=sharers, exchanges=exchanges
        )
        if meeting is not None:
            meeting.withdraw(arguments.waits(self.options))

    def _meeting_for(self, run: StepRun) -> Meeting | None:
        """Returns the meeting with ranks that hold other parts of the parameters.

        It is kept from step to step, as CUDA graphs read it.


        Where this rank's parameters have become others, so have those of all ranks, or they wait
        for it as before: for this once it meets all.
        """
        # agreed: what all ranks knew in the last step; ties: what this rank's parameters say now
        batches, (exchanged, sharers), ties = run.batches, self._agreed, self._ties
        exchanges = bool(exchanged or ties.exchanges)
        measures = exchanges or run.request.needs_norm
        # nothing that all agreed on is missing here: the meeting may be kept
        is_usual = self._agreed is ties or (
            exchanges == ties.exchanges and {*sharers} <= {*ties.sharers}
        )
        if is_usual and measures in batches.meetings:
            return batches.meetings[measures]
        # a new one: digests of all names and formats, and memory for the messages
        arguments = (run.owned.views, run.owned.labels, batches.batches, measures, self._meeting)
        meeting = meeting_of(*arguments, sharers, exchanges)
        if is_usual:
            batches.meetings[measures] = meeting
        return meeting

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
        # a capture is refused in there where batches would have to be made anew
        if seen is None or captures:
            self._is_on_one_device = False
            batches, seen = self._gathered(batches, seen, groups, state, decoupled, check)
        assert batches is not None
        # kept until a step takes masters over, though this one may fail before it
        self._is_elsewhere |= seen.elsewhere
        self._batches = batches
        return batches, seen

    def _gathered(
        self,
        batches: Batches | None,
        seen: Seen | None,
        groups: Sequence[Group],
        state: States,
        decoupled: bool,
        check: Check | None,
    ) -> tuple[Batches | None, Seen]:
        """The batches, made anew where they do not fit; refused where a graph captures that."""
        owned = self.owned(groups)
        # a gradient on its way, or with a sign pending, was replaced: the batches may fit now
        if seen is None and resolve_grads(owned.params, decoupled) and batches is not None:
            for batch in batches.batches:  # the look that failed may have noted some addresses
                batch.plan.stale = True
            self._is_elsewhere = True
            seen = batches.look(groups, state, decoupled)
        # within a capture only the last step's batches will do
        check_captured_batches(owned.device, batches, seen is not None)
        # everything is checked, states are completed, tables are made
        if seen is None:
            batches = self._sort(owned, state, grads_of(owned.params, decoupled), check)
            seen = batches.look(groups, state, decoupled)
        if seen is None:
            raise RuntimeError("batches made from the tensors at hand do not fit them")
        return batches, seen

    def _sort(self, owned: Owned, state: States, grads: Grads, check: Check | None) -> Batches:
        """Checks everything, completes the states, and makes batches and stages anew."""
        # checks alone: nothing has changed if one of these raises
        collected = collect(owned, state, grads, check)
        if not collected.kinds:
            self._warn_without_gradients(owned)
        self.writes.warn_without_masters(owned, collected.states)
        self._commit(owned, state, collected.states)  # now that nothing was refused
        # version counters of the weights that these batches write
        self.writes.watch(owned, collected.places, state)
        batches = make_batches(owned, state, collected, self.writes.versions)
        # digests of what a step reads and stores, where somebody records them
        if self.quantities:
            arguments = self.quantities, self.passes
            all_digests = [BatchDigests(batch, owned, *arguments) for batch in batches.batches]
            batches.digests = [digests for digests in all_digests if digests.names]
        # whether a step meets other ranks at all, and whom
        self._is_shared = bool(self._agreed.exchanges or sharers_of(owned.views))
        self._ties = RankTies(any(map(is_exchanged, owned.views)), sharers_of(owned.usual_views))
        self._is_elsewhere, self._device = True, owned.device
        self._can_capture = can_capture(self._device)
        # lists of stages for a step that asks nothing of its gradients, and for one that does
        self._stages = {asks: self._arranged(batches, asks) for asks in (False, True)}
        return batches

    def _warn_without_gradients(self, owned: Owned) -> None:
        """Warns once of a step that moves nothing; torch's question for states is no such step."""
        if not owned.params or NO_GRADIENTS in self.writes.said or is_asked_by_torch():
            return
        self.writes.said.add(NO_GRADIENTS)
        names = ("grad", "decoupled_grad", "main_grad")
        elsewhere = [n for n in names if any(getattr(p, n, None) is not None for p in owned.params)]
        where = (
            f"there are gradients in .{elsewhere[0]}, which this optimizer does not read "
            "(use_decoupled_grad=True reads .decoupled_grad, False .grad)"
            if elsewhere
            else "the backward pass must come before step(), zero_grad() after it, and the "
            "optimizer must have the parameters that the model has now: fully_shard and the like "
            "make new ones, so make the optimizer after them. Where batches are left out on "
            "purpose, step_counts='parameter' counts only the steps that a parameter took"
        )
        warn_caller(
            f"none of the {len(owned.params)} parameters has a gradient: this step is counted, and "
            f"moves no weight. Look at this: {where}"
        )

    def _arranged(self, batches: Batches, asks: bool) -> list[tuple[bool, list[Stage]]]:
        """The stages of a step: what it does not need is not among them.

        Args:
            batches: what is stepped.
            asks: whether the step wants something of its gradients.

        Returns:
            Lists of stages, and for each whether ranks vote that all of them have come through.
        """
        # scalars and controls on the device; without them launches take the host's numbers
        is_prepared = asks or self._is_shared or self.options.capturable
        float8 = [batch.float8 for batch in batches.quantized if batch.float8 is not None]
        # the scale of an fp8 weight goes by the amax over all ranks that hold a part of it
        is_exchanged = any(weights.group is not None for weights in float8)
        # False stands for a stage that this step does not need
        first: list[Stage | bool] = [
            is_prepared and self._prepare,
            bool(batches.digests) and begin_digests,
        ]
        anew: list[Stage | bool] = [bool(batches.matrices) and refresh]
        then: list[Stage | bool] = [launch, is_exchanged and gather_amaxes]
        last: list[Stage | bool] = [
            is_exchanged and exchange,
            bool(float8) and quantize,
            any(batch.copies for batch in batches.batches) and copy_results,
            bool(batches.digests) and finish_digests,
        ]
        # a vote comes before each exchange: rows of matrices, matrices in the launch, amaxes
        gathers = any(matrices.gathers for matrices in batches.matrices)
        votes = (gathers, gathers or bool(self._ties.exchanges), is_exchanged)
        # stages up to the next vote share a list
        parts = [first]
        for is_voted, stages in zip(votes, (anew, then, last), strict=True):
            if is_voted:  # before an exchange, in which one that has failed would be waited for
                parts.append(stages)
            else:
                parts[-1] += stages
        stage_lists = [
            (self._is_shared, [stage for stage in part if callable(stage)]) for part in parts
        ]
        # the meeting is a vote of its own
        return [(False, [self._meet]), *stage_lists] if asks or self._is_shared else stage_lists

    def make_states(
        self, groups: Sequence[Group], state: States, places: Iterable[int], check: Check | None
    ) -> None:
        """Makes the states of parameters complete, whether they have gradients or not."""
        owned, chosen = self.owned(groups), list(places)
        if check is not None:
            check(owned, chosen)
        self._commit(owned, state, completed_states(owned, state, chosen))

    def _commit(self, owned: Owned, state: States, completed: Mapping[torch.Tensor, Any]) -> None:
        """Takes over completed states; masters that they lacked were made of their weights."""
        # who had no master, or had a state without one
        lacking = [param for param in completed if state.get(param, {}).get(MASTER) is None]
        if not owned.has_external_masters:
            params = [param for param in lacking if completed[param].get(MASTER) is not None]
            # who sets one to None asks for a new one
            lost = [param for param in params if MASTER not in state.get(param, {})]
            self.writes.warn_of_lost_masters(owned, lost)
        # masters made here follow their weights until a first step is counted
        self.writes.unstepped |= {id(param) for param in lacking if not state.get(param)}
        commit(state, completed)
        self.writes.versions.match(lacking, state)

    def _makes_states(
        self,
        groups: Sequence[Group],
        state: States,
        request: Request,
        arguments: Asked,
        check: Check | None,
    ) -> bool:
        """Makes the states, and steps nothing, if torch.distributed.checkpoint asks for that.

        It does so by a first step with lr=0 and gradients of 0 (megaopt.step.probing).
        """
        self.was_stepped = True
        owned = self.owned(groups)
        # lr=0 and gradients of 0, and no state yet: on all ranks
        if request is not NOTHING or not is_probe(owned, state, arguments.decoupled):
            return False
        self._has_agreed = False  # what comes between it and the first step may differ
        self.was_stepped = self.options.MATRIX is None
        # gradients are elsewhere than torch put them: every parameter's state is made
        if arguments.decoupled:
            self.make_states(groups, state, range(len(owned.params)), check)
        else:
            self.gather(groups, state, arguments.decoupled, check)
        return True

    # --- stages that keep something from step to step

    def _meet(self, run: StepRun) -> None:
        """Makes the request that of all ranks; the host may know then that there is no step."""
        # None: the host knows that there is no step
        request, answer = run.request, None
        if run.meeting is not None:
            # int64 [1]: where no norm over ranks says whether there is an infinity
            look = partial(self._preparations.nonfinite, run.owned, run.batches.batches)
            # ranks that make what matrices keep anew must do so in the same step
            names = self.options.MATRIX_TURNS
            counts = (self._ties.exchanges or names) and not self.options.capturable
            turns = [group[n] for group in run.groups for n in ("step", *names)] if counts else ()
            answer = run.meeting.meet(request, run.waits, look, run.groups, run.rows, turns)
        # nobody is met, and the host need not wait: the device reads found_inf, if there is one
        elif request.found_inf is None or not run.waits:
            answer = request
        # a copy to the host, which waits: one flag for each group
        elif request.found_inf.numel() > 1:
            flags = request.found_inf.tolist()
            run.left_out = {group for group, flag in enumerate(flags) if flag}
            answer = None if all(flags) else request
        # one flag, which is 0: launches need not look at it any more
        elif not bool(request.found_inf):
            answer = replace(request, found_inf=None)
        # all ranks were met by what they have now: the next step's meeting goes by it
        self._agreed = self._ties
        run.is_left_out = answer is None
        run.request = answer or request

    def _prepare(self, run: StepRun) -> None:
        """Makes scalars and controls; the host may see then that there is no step."""
        batches, groups = run.batches, None
        if self.options.capturable:
            # counts on the device go up in `make`: the groups' own, then the parameters'
            groups = [*run.groups, *batches.counts.groups(run.groups)]
            batches.keep_counts(groups)
        self._preparations.make(run.owned, groups, batches, run.request, run.prepared)
        # the host waits for the norm's launch, and may end the step for it
        if run.rows is not None and run.request.skip_nonfinite:
            run.is_left_out = is_skipped(run.prepared, self.options.nonfinite)
        # the graph reads these tables at each replay: they live as long as the stepper
        if run.is_captured:
            self._captured.append(batches)


# --- stages


def refresh(run: StepRun) -> None:
    """Makes anew what matrix rules keep, GaLore's projections, of this step's gradients."""
    # the steps that each group has taken; under capturable None: it is nobody's turn
    counts = None
    if run.rows is not None:
        pairs = enumerate(run.groups)
        counts = [None if number in run.left_out else group["step"] for number, group in pairs]
    failed: Exception | None = None
    # rows of DTensors may come together on their maker in here, batch after batch on all ranks
    for matrices in run.batches.matrices:  # all: other ranks may wait for this one
        controls = run.prepared.get(matrices.device, (None, None))[1]
        try:
            matrices.refresh(run.groups, counts, controls)
        except Exception as error:
            failed = failed or error
    if failed is not None:
        raise failed


def begin_digests(run: StepRun) -> None:
    """Begins what the launch adds up; makes gradients' digests before a step writes them."""
    for digests in run.batches.digests:
        digests.begin(run.grads)


def finish_digests(run: StepRun) -> None:
    """Makes the digests of what the launch does not add up."""
    for digests in run.batches.digests:
        digests.finish(run.grads)


def leave_out_digests(run: StepRun) -> None:
    """Makes the digests of a step that is left out: of what is as it was."""
    for digests in run.batches.digests:
        digests.leave_out(run.grads)


def launch(run: StepRun) -> None:
    """Steps all batches; where one fails, those in which other ranks wait for this one as well."""
    failed: Exception | None = None
    pairs = zip(run.batches.batches, run.ready, strict=True)
    # one launch a batch on a GPU; matrices that ranks share are exchanged in here, bucket by bucket
    for batch, rows in islice(pairs, len(run.launched), None):  # all, but after Ctrl-C
        scalars, controls = run.prepared.get(batch.device, (None, None))
        if failed is None or (batch.matrices is not None and batch.matrices.shared is not None):
            try:
                # scalars that were made on the device take the place of the host's rows
                numbers = rows if scalars is None else scalars
                # in one statement: Ctrl-C between two would leave open whether it was launched
                run.launched.append(batch.plan.step(numbers, controls))  # type: ignore[func-returns-value]  # None each
            except Exception as error:
                failed = failed or error
    if failed is not None:
        raise failed


def gather_amaxes(run: StepRun) -> None:
    """Puts together the amaxes that ranks exchange."""
    assert run.meeting is not None
    run.gathered = run.meeting.gather([batch.float8 for batch in run.batches.quantized])


def exchange(run: StepRun) -> None:
    """Makes amaxes of fp8 weights the largest of all ranks."""
    assert run.meeting is not None
    run.meeting.exchange(run.gathered)


def quantize(run: StepRun) -> None:
    """Casts to fp8 the weights that are kept so."""
    for batch in run.batches.quantized:
        assert batch.float8 is not None
        batch.float8.quantize(batch.plan)


def copy_results(run: StepRun) -> None:
    """Copies results back to tensors that are not contiguous."""
    for batch in run.batches.batches:
        if batch.copies:
            batch.copy_results()


def _measured(batches: Batches, device: torch.device) -> Sequence[Measured]:
    """The plans and peers whose gradients make the norm on a device."""
    # this rank's own batches, and for shared parameters the peers that have added up all of it
    meeting = batches.meetings.get(True)
    if meeting is not None:
        return meeting.measured(device)
    return [batch.plan for batch in batches.batches if batch.device == device]


def is_skipped(prepared: Prepared, nonfinite: str) -> bool:
    """Whether an infinity or NaN among the gradients ends the step here; waits to see.

    It ends it for all groups. Raises FloatingPointError where nonfinite is "error".
    """
    # a copy of controls, fp32 [rows, COUNT], to the host: behind the norm on the device
    skips = any(bool(controls[:, SKIP].all()) for _, controls in prepared.values())
    if skips and nonfinite == "error":
        raise FloatingPointError(
            "gradients must be finite with nonfinite='error', got an infinity or NaN (on this "
            "rank, or on one that steps together with it)"
        )
    return skips


# --- CUDA graphs


def can_capture(device: torch.device) -> bool:
    """Whether a graph may capture steps on a device."""
    return device.type == "cuda"


def check_capture(
    device: torch.device, capturable: bool, backend: Callable[[torch.device], str]
) -> bool:
    """Whether a CUDA graph captures; RuntimeError for a step that reads numbers of the host.

    Args:
        device: the optimizer's.
        capturable: whether numbers are on the device.
        backend: names that of a device.
    """
    if not is_capturing(device):
        return False
    name = backend(device)
    if name != "triton":
        raise RuntimeError(
            f"a CUDA graph is being captured, and backend={name!r} computes on the host: only "
            "backend='triton' can be captured"
        )
    if not capturable:
        raise RuntimeError(
            "a CUDA graph is being captured, and capturable=False: the graph would repeat this "
            "step's lr and step for ever; pass capturable=True"
        )
    return True


def check_captured_batches(device: torch.device, last: Batches | None, fit: bool) -> None:
    """Raises RuntimeError for what a step can do only outside a graph.

    Args:
        device: the optimizer's.
        last: the batches of the last step.
        fit: whether this step has the same.
    """
    if not is_capturing(device):
        return
    if last is None or not fit:
        raise RuntimeError(
            "a CUDA graph is being captured, and the parameters, gradients or states are not those "
            "of the last step (other dtypes, sizes or parameters with gradients, or no step yet): "
            "take one step like this one before the capture; only the gradients' addresses may "
            "differ"
        )
    if any(batch.source.staged for batch in last.batches):
        raise RuntimeError(
            "a CUDA graph is being captured, and a parameter, gradient or state is not contiguous: "
            "only contiguous ones are allowed in a capture"
        )
    for batch in last.batches:
        reason = batch.why_not_captured()
        if reason is not None:
            raise RuntimeError(f"a CUDA graph is being captured, and {reason}")
