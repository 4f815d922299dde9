"""A step on its way, and its stages: what a step does not need is not among them."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice, repeat
from typing import TYPE_CHECKING, Any

import torch

from megaopt.kernels.backends import BACKENDS
from megaopt.kernels.norm.bins import NONFINITE
from megaopt.kernels.refusals import refuse
from megaopt.kernels.shards import local_of
from megaopt.kernels.step.controls import SKIP
from megaopt.kernels.step.preparation import Request
from megaopt.options.options import Options
from megaopt.state.numbers import Row
from megaopt.state.owned import Group
from megaopt.state.watch import Seen
from megaopt.step.batch import Batches
from megaopt.step.gradients import check_written_grads
from megaopt.step.request import NOTHING, Asked

if TYPE_CHECKING:
    from megaopt.step.ranks.meeting import Meeting
    from megaopt.step.ranks.ties import Ties
    from megaopt.step.stepper import Stepper

Prepared = dict[torch.device, tuple[Any, Any]]
"""The scalars of each device, if they are made there, and the controls."""


@dataclass(eq=False)
class StepRun:
    """One step on its way."""

    stepper: Stepper
    groups: Sequence[Group]
    request: Request
    """This rank's until `meet`, then that of all ranks."""
    rows: list[Row] | None
    batches: Batches
    seen: Seen
    """Launches read shards that may be in nobody else's hands."""
    is_captured: bool
    """A CUDA graph captures the step."""
    ready: list[Any] = field(default_factory=list)
    """The rows of scalars of each batch, as its plan takes them."""
    prepared: Prepared = field(default_factory=dict)
    """Scalars and controls; {} where scalars are the host's and gradients as they are."""
    meeting: Meeting | None = None
    """The meeting with the other ranks; None where none are met in this step."""
    gathered: Any = ()
    """Amaxes that ranks put together."""
    waits: bool = False
    """The host waits to know if there is a step, as on all ranks or on none."""
    is_left_out: bool = False
    launched: list[None] = field(default_factory=list)
    """An entry for each batch that is stepped."""
    left_out: set[int] = field(default_factory=set)
    """Groups that the host knows to be skipped, where others are stepped."""
    _counted: tuple[Sequence[Group], list[int]] = ((), [])
    """The groups that are counted, and their counts with this step."""

    def take_memory(self, arguments: Asked) -> None:
        """Gives plans their tensors, and takes all memory, before the first launch."""
        stepper, request, batches = self.stepper, self.request, self.batches
        # a row for each count that is not its group's, behind the groups' rows
        if self.rows is not None and batches.counts.apart:
            apart = batches.counts.groups(self.groups)
            self.rows += [stepper.rule.row({**g, "step": int(g["step"]) + 1}) for g in apart]
        # gradients are written only where a loss scale is taken off them
        writes = stepper.options.write_unscaled_grads and request.grad_scale is not None
        if writes:
            grads = [local_of(grad) for grad in self.seen.grads()]
            check_written_grads(grads, stepper.owned(self.groups).labels)
        # plans without a table of addresses get their tensors, or contiguous copies of them
        if batches.fed:
            all_grads = self.seen.grads()
            for batch, shards in zip(batches.batches, self.seen.shards, strict=True):
                if not batch.addresses:
                    batch.feed(all_grads, shards, writes)
        # no launch fails for memory behind another one
        self.ready = [batch.plan.ready(self.rows) for batch in batches.batches]
        # whom the first stage of this step meets, and whether the host waits for the answer
        if request is not NOTHING or stepper.ties.is_shared:
            self.waits = arguments.waits(stepper.options)
            self.meeting = stepper.ties.meeting_for(self, request.needs_norm)
        # ranks vote by one found_inf, not by one for each group
        found_inf = None if self.meeting is None else request.found_inf
        if found_inf is not None and found_inf.numel() > 1:
            refuse(
                "found_inf",
                "one number where other ranks hold parts of the parameters, as all skip or none",
                found_inf,
            )

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

    def finish(self) -> bool:
        """Returns whether a step is whole after Ctrl-C; finishes one that cannot be taken back."""
        # Ctrl-C came behind the counts
        if any(group["step"] == step for group, step in zip(*self._counted, strict=True)):
            return True
        batches, stepper = self.batches.batches, self.stepper
        # a launch has begun to write, or the counts on the device have gone up
        is_final = self.launched or (stepper.options.capturable and self.prepared)
        # what is left may be messages between ranks; plans of many calls have copies, and are taken
        # back
        if not is_final or self.meeting or any(batch.plan.many_calls for batch in batches):
            return False
        # the batches that are left, from the one behind the last launch
        if len(self.launched) < len(batches):
            stage_lists = stepper.stages[self.request is not NOTHING]
            stages = [stage for _, stage_list in stage_lists for stage in stage_list]
            for stage in stages[stages.index(launch) :]:
                stage(self)
        self.count()
        return True


Stage = Callable[[StepRun], None]
StageLists = list[tuple[bool, list[Stage]]]
"""Lists of stages, and for each whether ranks vote that all of them have come through."""


def arranged(batches: Batches, options: Options, ties: Ties, asks: bool) -> StageLists:
    """The stages of a step: what it does not need is not among them.

    Args:
        batches: what is stepped.
        options: the optimizer's.
        ties: the ranks that the step meets.
        asks: whether the step wants something of its gradients.
    """
    # scalars and controls on the device; without them launches take the host's numbers
    is_prepared = asks or ties.is_shared or options.capturable
    float8 = [batch.float8 for batch in batches.quantized if batch.float8 is not None]
    # the scale of an fp8 weight goes by the amax over all ranks that hold a part of it
    is_exchanged = any(weights.group is not None for weights in float8)
    # False stands for a stage that this step does not need
    first: list[Stage | bool] = [
        is_prepared and prepare,
        bool(batches.digests) and begin_digests,
    ]
    anew: list[Stage | bool] = [bool(batches.matrices) and refresh]
    then: list[Stage | bool] = [launch, is_exchanged and gather_amaxes]
    last: list[Stage | bool] = [
        is_exchanged and reduce_amaxes,
        bool(float8) and quantize,
        any(batch.copies for batch in batches.batches) and copy_results,
        bool(batches.digests) and finish_digests,
    ]
    # a vote comes before each exchange: rows of matrices, matrices in the launch, amaxes
    gathers = any(matrices.gathers for matrices in batches.matrices)
    votes = (gathers, gathers or bool(ties.now.exchanges), is_exchanged)
    # stages up to the next vote share a list
    parts = [first]
    for is_voted, stages in zip(votes, (anew, then, last), strict=True):
        if is_voted:  # before an exchange, in which one that has failed would be waited for
            parts.append(stages)
        else:
            parts[-1] += stages
    stage_lists = [(ties.is_shared, [stage for stage in part if callable(stage)]) for part in parts]
    # the meeting is a vote of its own
    return [(False, [meet]), *stage_lists] if asks or ties.is_shared else stage_lists


# --- stages


def meet(run: StepRun) -> None:
    """Makes the request that of all ranks; the host may know then that there is no step."""
    # None: the host knows that there is no step
    request, answer, ties = run.request, None, run.stepper.ties
    if run.meeting is not None:
        # int64 [1]: where no norm over ranks says whether there is an infinity
        look = partial(nonfinite, run)
        # ranks that make what matrices keep anew must do so in the same step
        options = run.stepper.options
        names = options.MATRIX_TURNS
        counts = (ties.now.exchanges or names) and not options.capturable
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
    ties.agreed = ties.now
    run.is_left_out = answer is None
    run.request = answer or request


def prepare(run: StepRun) -> None:
    """Makes scalars and controls of all devices that have parameters.

    The host may see then that there is no step. With what is made the counts on a device have gone
    up.
    """
    batches, request = run.batches, run.request
    options, groups = run.stepper.options, None
    if options.capturable:
        # counts on the device go up here: the groups' own, then the parameters'
        groups = [*run.groups, *batches.counts.groups(run.groups)]
        if any(batch.plan.many_calls for batch in batches.fed):
            counts = [group["step"] for group in groups]
            batches.undo += [(count, count.detach().clone()) for count in counts]
    # rows of scalars: those of the groups, then one for each count of its own
    behind = [group for group, _ in batches.counts.apart]
    count = len(run.groups) + len(behind)
    # the first parameter's device too, which may have no gradient
    first = run.stepper.owned(run.groups).device
    for device in dict.fromkeys([first, *[batch.device for batch in batches.batches]]):
        # rows come from the host, and gradients stay as they are: launches need nothing made
        if groups is None and request.is_empty:
            run.prepared[device] = (None, None)
            continue
        # the ranks have met by now: for shared parameters peers have the sums over ranks
        plans: Any = ()
        if request.needs_norm:
            meeting = batches.meetings.get(True)
            plans = [batch.plan for batch in batches.batches if batch.device == device]
            plans = plans if meeting is None else meeting.measured(device)
        device_request = request.on(device, behind)
        preparation = _preparation(run, device)
        # scalars fp32 [count, scalars of the rule] or None, controls fp32 [count, COUNT] or None
        run.prepared[device] = preparation.make(groups, count, device_request, plans)
    # the host waits for the norm's launch, and may end the step for it
    if run.rows is not None and request.skip_nonfinite:
        # a copy of controls, fp32 [rows, COUNT], to the host: behind the norm on the device
        run.is_left_out = any(bool(c[:, SKIP].all()) for _, c in run.prepared.values())
        if run.is_left_out and options.nonfinite == "error":
            raise FloatingPointError(
                "gradients must be finite with nonfinite='error', got an infinity or NaN (on this "
                "rank, or on one that steps together with it)"
            )
    # the graph reads these tables at each replay: they live as long as the stepper
    if run.is_captured:
        run.stepper.captured.append(batches)


def _preparation(run: StepRun, device: torch.device) -> Any:
    """The buffers of scalars, controls and norms on a device, which stay from step to step."""
    preparations = run.stepper.preparations
    if device not in preparations:
        owned = run.stepper.owned(run.groups)
        backend = BACKENDS[owned.backend(device)]
        if backend.why_not(device) is not None:
            backend = BACKENDS["reference"]  # there are no parameters, only steps to count
        with torch.inference_mode(False):  # later steps write its buffers
            preparations[device] = backend.preparation(owned.rule, device)
    return preparations[device]


def norm_of(preparations: Mapping[torch.device, Any]) -> torch.Tensor:
    """See FusedOptimizer.grad_norm."""
    measured = [preparation for preparation in preparations.values() if preparation.measured]
    if not measured:
        raise RuntimeError(
            "no step has measured the norm yet: a step with clip_norm, or under "
            "nonfinite='skip' or 'error', does, unless found_inf leaves it out"
        )
    if len(measured) != 1:
        raise RuntimeError(
            f"grad_norm is known on {len(measured)} devices: a step with clip_norm, or "
            "under nonfinite='skip', with all parameters on one device, finds it"
        )
    norm: torch.Tensor = measured[0].norm
    return norm


def nonfinite(run: StepRun, device: torch.device) -> torch.Tensor:
    """int64 [1] on a device: whether an infinity or NaN is among all gradients of this rank."""
    # the flag stays on the device: nobody waits
    flag = torch.zeros(1, dtype=torch.int64, device=device)
    batches = run.batches.batches
    # a look through all gradients of each device, into the bins that the norm is made of
    for batch_device in {batch.device for batch in batches}:
        plans = [batch.plan for batch in batches if batch.device == batch_device]
        bins = _preparation(run, batch_device).measure(plans)
        device_flag = bins[:, NONFINITE].ne(0).any().reshape(1)
        flag = torch.maximum(flag, device_flag.to(device, torch.int64))
    return flag


def refresh(run: StepRun) -> None:
    """Gives plans what states keep for a matrix rule; renews GaLore's projections that are due."""
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
        digests.begin(run.seen.grads())


def finish_digests(run: StepRun) -> None:
    """Makes the digests of what the launch does not add up."""
    for digests in run.batches.digests:
        digests.finish(run.seen.grads())


def leave_out_digests(run: StepRun) -> None:
    """Makes the digests of a step that is left out: of what is as it was."""
    for digests in run.batches.digests:
        digests.leave_out(run.seen.grads())


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


def reduce_amaxes(run: StepRun) -> None:
    """Makes amaxes of fp8 weights the largest of all ranks."""
    assert run.meeting is not None
    run.meeting.reduce_amaxes(run.gathered)


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
