"""One vote among ranks in a step: whether all take it, and what they measure together.

Every rank has the same meetings in the same order, whatever it finds in its own gradients and
states; also one that is about to raise an error which the others do not have.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from megaopt.kernels.step.batch import Formats
from megaopt.kernels.step.preparation import Measured, Request
from megaopt.kernels.step.table import is_capturing
from megaopt.params import ParamView
from megaopt.step.ranks.peers import FOUND_INF, NONFINITE, WORDS, Notice, Peers, digest_of

LooksForInfinities = Callable[[torch.device], torch.Tensor]
"""Gives int64 [1] on a device: whether an infinity or NaN is among this rank's gradients."""
Gathered = list[tuple[dist.ProcessGroup, list[torch.Tensor], torch.Tensor]]
"""For each group of ranks the amaxes of their fp8 weights, and the memory to exchange them in."""


def is_read_at_once(device: torch.device) -> bool:
    """Whether a tensor on the device can be read without waiting for work that is queued there."""
    return device.type == "cpu"


def meeting_of(
    views: Sequence[ParamView],
    labels: Sequence[str] = (),
    batches: Sequence[Any] = (),
    last: Meeting | None = None,
) -> Meeting | None:
    """With the ranks that hold other parts of an optimizer's parameters; None if there are none.

    Args:
        views: of all parameters, those without a gradient included.
        labels: what errors call them; none are needed to `withdraw`.
        batches: of the parameters that have a gradient; each holds those of one split.
        last: of the steps before, whose answer may not have been heard yet.
    """
    meeting = Meeting(views, labels, batches, last)
    return meeting if meeting.is_held(measures=True) else None


class Meeting:
    """What ranks do together in each step of the same batches; `meeting_of` makes it."""

    def __init__(
        self,
        views: Sequence[ParamView],
        labels: Sequence[str],
        batches: Sequence[Any],
        last: Meeting | None,
    ) -> None:
        self._peers = _peers_of(views, labels, batches)
        self._flattened = _flattened(views, labels)
        self._whole = [each for each in batches if views[each.positions[0]].split is None]
        self._now: list[Peers] = []  # in this step
        self._met = 0
        self._were_alike = False
        self._unheard = [] if last is None else last._unheard
        self._amax_counts = {} if last is None else last._amax_counts  # of the last exchange
        with torch.inference_mode(False):
            self._vote = torch.zeros(1, dtype=torch.int64, device="cpu")
        if self._peers:
            refusal = _refusal(len(views), [each.formats for each in batches for _ in each.params])
            self._notice = Notice(self._peers[-1].device, refusal)

    def is_held(self, measures: bool) -> bool:
        """Whether ranks meet in a step that measures its gradients, or in one that does not."""
        return bool(self._of(measures)) or (measures and self._flattened is not None)

    def _of(self, measures: bool) -> list[Peers]:
        return [each for each in self._peers if measures or not each.measures]

    def measured(self, device: torch.device) -> list[Measured]:
        """What the norm of all gradients on a device is measured of, after the ranks met."""
        whole = [each.plan for each in self._whole if each.device == device]
        return [*whole, *(p for p in self._peers if p.measures and p.device == device)]

    def meet(self, request: Request, waits: bool, look: LooksForInfinities) -> Request | None:
        """Compares what ranks are going to step, and measures the gradients of all.

        The answer is read at once on CPUs, where nothing has to be waited for, by a rank whose
        batches are new, and where the host waits anyway. Otherwise the step is left out on the
        device where ranks differ, and the host hears of it before the next one.

        Args:
            request: this rank's.
            waits: whether the host waits to know if there is a step, as on all ranks or on none.
            look: for gradients of which ranks measure no norm together.

        Returns:
            The request as all ranks see it; None where the host knows that there is no step.

        Raises:
            ValueError: ranks do not step the same, or one has raised an error, on all ranks; or a
                parameter is FSDP1's in a step that measures.
        """
        if request.needs_norm and self._flattened is not None:
            raise ValueError(self._flattened)
        self._now, self._met = self._of(request.needs_norm), 0
        at_once = all(is_read_at_once(each.device) for each in self._now)
        reads = at_once or waits or not self._were_alike
        reads = reads and not any(is_capturing(each.device) for each in self._now)
        try:
            heard = self._heard(request, reads, look)
            differ, found_inf = heard[:FOUND_INF].amax(), heard.amax()
            if not reads:
                self._notice.post(differ)
                self._unheard = [self._notice]
            refused, skipped = reads and bool(differ), waits and bool(heard[FOUND_INF])
        except Exception:
            self._leave(waits)
            raise
        if refused:
            self._stand_in(waits)
            raise ValueError(self._notice.message)
        self._were_alike = self._were_alike or reads
        if waits:
            return None if skipped else replace(request, found_inf=heard[NONFINITE])
        if at_once and not request.is_skippable:
            return request
        return replace(request, found_inf=found_inf)  # always: a graph may be captured next

    def _heard(self, request: Request, reads: bool, look: LooksForInfinities) -> torch.Tensor:
        """What ranks say, each meeting passing on what was heard in those before."""
        heard = torch.zeros(WORDS, dtype=torch.int64, device=self._now[0].device)
        if request.found_inf is not None:
            heard[FOUND_INF].copy_(request.found_inf.reshape(()) != 0)
        if request.skip_nonfinite and not all(each.measures for each in self._now):
            heard[NONFINITE:].copy_(look(heard.device))
        for each in self._now:
            each.write((request.clip_norm, request.skip_nonfinite), heard)
            self._met += 1
            each.meet()
            heard = each.heard()
            if reads and each.measures and bool(heard[0]):
                break  # the next meeting might never end
        return heard

    def withdraw(self, measures: bool, waits: bool) -> None:
        """Meets the ranks in place of `meet` where this one raises an error: all will.

        Args:
            measures: whether the step was to measure its gradients.
            waits: as for `meet`.
        """
        self._now, self._met = self._of(measures), 0
        if self._now and not any(is_capturing(each.device) for each in self._now):
            self._leave(waits)

    def _leave(self, waits: bool) -> None:
        """Meets the ranks that wait for this one, which raises an error, wherever they are."""
        if self._met == len(self._now):
            self._has_failed(True)
            return
        for each in self._now[self._met :]:
            each.refuse()
            each.meet()
            if each.measures and bool(each.heard()[0]):
                return  # who reads that comes no further
        self._stand_in(waits)

    def _stand_in(self, waits: bool) -> None:
        """Exchanges amaxes with ranks that have not read, and leave the step out later on."""
        device = self._peers[-1].device
        if not waits and not is_read_at_once(device):
            for group, count in self._amax_counts.items():
                none = torch.zeros(count, dtype=torch.float32, device=device)
                dist.all_reduce(none, dist.ReduceOp.MAX, group=group)

    def hear(self, counts: Iterable[dict[str, Any]]) -> None:
        """Raises ValueError for what ranks found in the last step, for which the host did not wait.

        counts: those under "step" that the host raised for that step, which was left out.
        """
        unheard, self._unheard = self._unheard, []
        for notice in unheard:
            if notice.is_set():
                for each in counts:
                    each["step"] -= 1
                raise ValueError(notice.message)

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """After ranks have met, on CPUs: where one of them fails within, all of them raise.

        On GPUs, where that would have the host wait, nobody asks: all memory that a step takes
        there is taken before.

        Raises ValueError where another rank failed.
        """
        try:
            yield
        except Exception:
            self._has_failed(True)
            raise
        if self._has_failed(False):
            raise ValueError(
                "another rank that steps the same parameters failed in this step: none of them "
                "has taken it, and the other's error says why"
            )

    def _has_failed(self, own: bool) -> bool:
        """Whether this rank failed, or another of those that have met."""
        vote = self._vote.fill_(own)  # a rank without memory has it already
        for each in self._now:
            for group in each.groups if is_read_at_once(each.device) else ():
                dist.all_reduce(vote, dist.ReduceOp.MAX, group=group)
        return bool(vote)

    def gather(self, batches: Sequence[Any]) -> Gathered:
        """Takes the memory in which ranks exchange the amaxes of the batches' fp8 weights."""
        gathered = []
        for group in [each.groups[0] for each in self._of(measures=False)]:
            # by number, not by batch: gradients of another dtype make other batches
            pairs = [pair for each in batches if each.group == group for pair in each.amaxes()]
            if own := [amax for _, amax in sorted(pairs, key=lambda pair: pair[0])]:
                gathered.append((group, own, torch.cat(own)))
        return gathered

    def exchange(self, gathered: Gathered) -> None:
        """Between step and casts: amaxes become the largest of all ranks."""
        for group, own, together in gathered:
            dist.all_reduce(together, dist.ReduceOp.MAX, group=group)
            torch._foreach_copy_(own, list(torch.split(together, list(map(len, own)))))
        self._amax_counts = {group: len(together) for group, _, together in gathered}


def _peers_of(
    views: Sequence[ParamView], labels: Sequence[str], batches: Sequence[Any]
) -> list[Peers]:
    """The ranks of each split of DTensors, the most first; then those that share fp8 weights.

    Each message of the former tells of all parameters: as many as possible raise together. Ranks of
    another group may know nothing of a group's fp8 weights: what a smaller one, which may lie
    within a larger, has heard is passed on.
    """
    formats = {place: each.formats for each in batches for place in each.positions}
    found: dict[Any, list[int]] = {}
    for place, view in enumerate(views):
        if view.split is not None or view.group:
            found.setdefault((view.param.device, view.split, view.group), []).append(place)
    splits, shares, kinds = [], [], {}
    for (device, split, group), places in found.items():
        if split is None:
            places.sort(key=lambda place: views[place].number(place))
            own = [_described(views[place], formats[place]) for place in places if place in formats]
            shares.append(Peers(device, [group], digest_of(own)))
            continue
        mesh, dims = split
        plans = [each.plan for each in batches if each.positions[0] in places]
        splits.append(Peers(device, [mesh.get_group(dim) for dim in dims], 0, plans))
        # a submesh has other ranks elsewhere
        names = mesh.device_type, mesh.mesh_dim_names
        kinds[splits[-1]] = (device.type, *names, tuple(mesh.shape), dims)
    splits.sort(key=lambda each: -each.size)
    shares.sort(key=lambda each: (each.size, str(each.groups[0].group_name)))
    named = [
        (v, label, formats.get(i)) for i, (v, label) in enumerate(zip(views, labels, strict=False))
    ]
    alike = digest_of([(label, *_described(v, own)) for v, label, own in named]) if splits else 0
    for each in splits:
        each.alike, each.meetings = alike, digest_of([kinds[split] for split in splits])
    return [*splits, *shares]


def _described(view: ParamView, own: Formats | None) -> tuple[object, ...]:
    """What ranks must have alike of a parameter; own: its formats, if it has a gradient."""
    kept = own and (own.master.name, *(each.name for each in own.moments), own.low_rank)
    weight = None if view.weight is None else (view.weight.recipe, view.weight.dtype)
    return view.whole_shape, view.param.dtype, view.sharding, weight, kept


def _refusal(params: int, formats: Sequence[Formats]) -> str:
    """The message for ranks that do not step the same; of this rank what it steps."""
    masters = sum(each.master.present for each in formats)
    return (
        "ranks that hold parts of the same parameters must step the same (order, groups, names, "
        "shapes, dtypes, placements and recipes of the parameters, also where a rank's part is "
        "empty; which have a gradient, formats of masters and moments, clip_norm, nonfinite), got "
        f"{params} parameters, {len(formats)} gradients and {masters} masters on rank "
        f"{dist.get_rank()}, and something else, or an error, on another"
    )


def _flattened(views: Sequence[ParamView], labels: Sequence[str]) -> str | None:
    """The error for FSDP1's flat parameters, of which each rank has its own norm, if any is one."""
    is_alone = not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1
    for view, label in () if is_alone else zip(views, labels, strict=False):
        if getattr(view.param, "_fsdp_flattened", False):
            return (
                f"{label} must not be FullyShardedDataParallel's (FSDP1) in a step that measures "
                "the gradients (clip_norm, nonfinite other than 'propagate'): each rank would see "
                "its own part alone, got one; FSDP2 (fully_shard) adds up over ranks, or pass "
                "clip_coefficient, found from a norm of all ranks"
            )
    return None
