"""The ranks on which a stepper depends: whom it meets, and what they agreed on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from megaopt.kernels.chunks.table import is_capturing
from megaopt.step.ranks.sharers import Sharers, is_exchanged, sharers_of

if TYPE_CHECKING:
    from megaopt.state.owned import Group, Owned
    from megaopt.step.batch import Batches
    from megaopt.step.ranks.meeting import Meeting
    from megaopt.step.request import Asked
    from megaopt.step.stages import StepRun

LONGEST = 1000
"""Characters of the groups that a message shows."""


class RankTies(NamedTuple):
    """The ranks that this one depends on, and how."""

    exchanges: bool | None
    """They send each other parts of matrices in every step; None: not known yet."""
    sharers: list[Sharers]
    """The ranks that hold other parts of its parameters."""


@dataclass(eq=False)
class Ties:
    """The ties of one stepper, as its batches have them and as all ranks have agreed on them."""

    has_agreed: bool = False
    """Ranks that hold parts of matrices have compared what they are going to step."""
    is_shared: bool = False
    """Other ranks hold parts of the same parameters."""
    meeting: Meeting | None = None
    """The meeting of the last step."""
    now: RankTies = field(default_factory=lambda: RankTies(None, []))
    """The batches' ties."""
    agreed: RankTies = field(default_factory=lambda: RankTies(None, []))
    """The ties that all ranks agreed on last: other ranks go by these, whatever this rank's groups
    have become."""

    def reset(self, owned: Owned) -> None:
        """Takes note that parameters or groups are others."""
        self.meeting, self.agreed = None, RankTies(None, sharers_of(owned.usual_views))

    def look(self, owned: Owned) -> None:
        """Finds whether a step meets other ranks at all, and whom, for new batches."""
        self.is_shared = bool(self.agreed.exchanges or sharers_of(owned.views))
        exchanges = any(map(is_exchanged, owned.views))
        self.now = RankTies(exchanges, sharers_of(owned.usual_views))

    # --- before a first step

    def agree(self, owned: Owned, clip_norm: Any, asked_alone: bool) -> None:
        """Compares with other ranks, before a first step, whom they will meet, and for what.

        Whatever groups say, all ranks come here that hold parts of parameters which a rule for
        matrices may step. Raises ValueError where they differ, or for what one cannot step, on all
        of them.

        Args:
            owned: the optimizer's.
            clip_norm: the step's.
            asked_alone: torch asks which states there would be: of plain parameters one rank may
                ask alone.
        """
        # in the order that all ranks have, whatever their groups say now
        met = self.first_met(owned, asked_alone)
        # within a capture the host could not read the answer
        if not met or is_capturing(met[0].device):
            return
        from megaopt.step.ranks.meeting import agreement_of, facts_of  # where ranks meet at all

        # what ranks must have alike: numbers of groups, options, each parameter's name, shape,
        # placement
        try:
            owned.check_groups()
            settings = owned.settings()
            alike = settings, owned.described(), clip_norm
        except Exception:
            self.disagree(owned, asked_alone)  # this rank has nothing to compare
            raise
        got = f"{len(owned.params)} parameters in groups {settings[0]}"
        meeting = agreement_of(met, alike, got[:LONGEST], partial(facts_of, owned, clip_norm))
        # sums of digests over all ranks of each mesh, read by the host at once
        if meeting is not None:
            meeting.compare()
        self.has_agreed = True

    def disagree(self, owned: Owned, asked_alone: bool) -> bool:
        """Tells ranks that compare what they have that this one raises an error.

        Args as for `agree`. Returns whether there are any.
        """
        met = self.first_met(owned, asked_alone)
        if met:
            from megaopt.step.ranks.meeting import agreement_of

            meeting = agreement_of(met, None)
            if meeting is not None:
                meeting.withdraw(False)
        return bool(met)

    def first_met(self, owned: Owned, asked_alone: bool) -> list[Sharers]:
        """Returns whom this rank meets before a first step, if they have not agreed yet."""
        views = owned.usual_views
        if self.has_agreed or (asked_alone and not any(view.is_sharded for view in views)):
            return []
        return [*self.agreed.sharers, *sharers_of(views)]

    # --- steps

    def hear(self, groups: Sequence[Group], batches: Batches | None, capturable: bool) -> None:
        """Raises ValueError where ranks differed in the last step; its count is taken back."""
        # what the other ranks said in the last step, which the host has not read yet
        if self.meeting is not None:
            counted = [count for _, count in batches.counted] if batches else []
            self.meeting.hear([] if capturable else [*groups, *counted])

    def withdraw(self, owned: Owned, state: Mapping[Any, Any], arguments: Asked) -> None:
        """Meets the ranks in the place of `Meeting.meet`, where they go by what they know.

        Args:
            owned: the optimizer's.
            state: the optimizer's.
            arguments: the step's.
        """
        # whom others take this rank to meet: by what all agreed on, and by parameters that are new
        views = owned.shared_views
        exchanged, sharers = self.agreed
        # nobody holds a part
        if not (views or sharers):
            return
        from megaopt.step.ranks.meeting import meeting_of

        new = [view for view in views if exchanged is None or not state.get(view.param)]
        # ranks that send each other parts of matrices meet in every step, as if gradients were
        # measured
        exchanges = bool(exchanged) or any(map(is_exchanged, new))
        skips = arguments.skips_nonfinite(owned.options)
        measures = exchanges or arguments.clip_norm is not None or skips
        meeting = meeting_of(
            views, measures=measures, last=self.meeting, met=sharers, exchanges=exchanges
        )
        if meeting is not None:
            meeting.withdraw(arguments.waits(owned.options))

    def meeting_for(self, run: StepRun, needs_norm: bool) -> Meeting | None:
        """Returns the meeting with ranks that hold other parts of the parameters.

        It is kept from step to step, as CUDA graphs read it.

        Where this rank's parameters have become others, so have those of all ranks, or they wait
        for it as before: for this once it meets all.
        """
        # agreed: what all ranks knew in the last step; now: what this rank's parameters say
        batches = run.batches
        exchanged, sharers = self.agreed
        exchanges = bool(exchanged or self.now.exchanges)
        measures = exchanges or needs_norm
        # nothing that all agreed on is missing here: the meeting may be kept
        is_usual = self.agreed is self.now or (
            exchanges == self.now.exchanges and {*sharers} <= {*self.now.sharers}
        )
        if is_usual and measures in batches.meetings:
            self.meeting = batches.meetings[measures]
            return self.meeting
        from megaopt.step.ranks.meeting import meeting_of

        # a new one: digests of all names and formats, and memory for the messages
        owned = run.stepper.owned(run.groups)
        arguments = (owned.views, owned.labels, batches.batches, measures, self.meeting)
        meeting = meeting_of(*arguments, sharers, exchanges)
        if is_usual:
            batches.meetings[measures] = meeting
        self.meeting = meeting
        return meeting
