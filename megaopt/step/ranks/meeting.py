"""One vote among ranks in a step: whether all take it, and what they measure together.

Every rank has the same meetings in the same order, whatever it finds in its own gradients and
states; also one that is about to raise an error which the others do not have.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megaopt.kernels.backends import Plan
from megaopt.kernels.chunks.batch import Formats
from megaopt.kernels.chunks.table import is_capturing
from megaopt.kernels.step.preparation import Measured, Request
from megaopt.params import ParamView
from megaopt.step.ranks.answers import (
    PATIENCE,
    SHORT,
    Wait,
    differences,
    of_groups,
    passed_on,
    tell_failure,
    tell_raised,
)
from megaopt.step.ranks.peers import FOUND_INF, NONFINITE, WORDS, Notice, Peers, digest_of, reduced
from megaopt.step.ranks.sharers import Sharers, sharers_of

if TYPE_CHECKING:
    from megaopt.state.owned import Owned

Look = Callable[[torch.device], torch.Tensor]
"""Gives int64 [1] on a device: whether an infinity or NaN is among this rank's gradients."""
Gathered = list[tuple[dist.ProcessGroup, list[torch.Tensor], torch.Tensor]]
"""Groups of ranks, each with the amaxes of its fp8 weights, and memory to exchange them in."""


Facts = Callable[..., dict[str, str]]
"""Finds what a rank has, by what an error calls it."""


class Terms:
    """The facts of this rank that all ranks must have alike; an error says them where they differ.

    Args:
        peers: whom it meets.
        counted: the least that an error shows.
        facts: finds all of it, of the request and the groups.
    """

    def __init__(self, peers: Sequence[Peers], counted: str, facts: Facts) -> None:
        self._peers, self._counted, self._facts = peers, counted, facts
        self._asked: tuple[Any, ...] = ()
        self.met = 0
        """The number of peers that were met in this step."""

    def begin(self, request: Request, groups: Sequence[Mapping[str, Any]]) -> None:
        """Notes the request and the groups of a step that begins."""
        self._asked, self.met = (request, groups), 0

    def refusal(self, patience: float = PATIENCE) -> str:
        """The message for ranks that do not step the same, when they hear of it.

        patience: in seconds, for what others tell.
        """
        # only meetings that came to pass in this step can say what differs
        difference, rank = "", dist.get_rank()
        met = [peer.kind for peer in self._peers if peer.measures]
        facts = {"who is met": repr(met), **self._facts(*self._asked)}
        # a digest that is another on some rank, in the meetings that were held
        heard = [peer for peer in self._peers[: self.met] if peer.heard()[:FOUND_INF].any()]
        # the ranks of one meeting read each other's facts in the store: the first difference counts
        for peer in heard:
            difference = difference or differences(peer.event, peer.ranks, facts, patience)

        # the ranks of each meeting are told, as only some of them may have found it
        for peer in heard:
            difference = passed_on(peer.event, peer.ranks, difference, patience)

        # the facts of both sides are known: the message names them
        if difference:
            return (
                "ranks that hold parts of the same parameters must step the same, got "
                f"{difference} (this is rank {rank})"
            )

        # nobody told in time: the message lists all that may differ
        return (
            "ranks that hold parts of the same parameters must step the same (order, groups, "
            "names, shapes, dtypes, placements and recipes of the parameters, also where a rank's "
            "part is empty; which have a gradient, formats of masters and moments, clip_norm, "
            "nonfinite, update_proj_gap where matrices go to owners; with DTensors all numbers of "
            "groups; with rules for matrices also all options at a first step), got "
            f"{self._counted} on rank {rank}, and something else, or an error, on another"
        )


class Meeting:
    """The meeting, in each step, of ranks that hold parts of the same parameters; one rank's side.

    Args:
        peers: those of DTensors, which measure a norm, then those of fp8 weights.
        whole: the batches of parameters that each rank has whole.
        terms: what this rank has, for the error where ranks do not step the same.
        last: the meeting before, whose answer may not have been heard yet.
    """

    def __init__(
        self, peers: Sequence[Peers], whole: Sequence[Any], terms: Terms, last: Meeting | None
    ) -> None:
        self._peers, self._whole, self._terms = peers, whole, terms
        # a first answer is read by the host: then the batches are known to be alike on all ranks
        self._were_alike = False
        self._wait = Wait(sorted({rank for peer in peers for rank in peer.ranks}))
        # later answers on GPUs stay on the device; the host hears of them in the step behind
        self._notice = Notice(peers[-1].device, terms.refusal)
        # what the meeting before has not told yet, and the sizes of its amaxes
        self._unheard: list[Notice] = [] if last is None else last._unheard
        self._amax_counts: dict[Any, int] = {} if last is None else last._amax_counts
        # one flag for `_has_failed`, made now: who is out of memory can still vote
        with torch.inference_mode(False):
            self._vote = torch.zeros(1, dtype=torch.int64, device="cpu")

    def measured(self, device: torch.device) -> list[Measured]:
        """The plans and peers whose gradients make the norm on a device, after the ranks met."""
        # what each rank has whole it measures by itself; of the rest peers have the sums over ranks
        whole = [batch.plan for batch in self._whole if batch.device == device]
        return [*whole, *(p for p in self._peers if p.measures and p.device == device)]

    def compare(self) -> None:
        """Meets to compare alone. Raises ValueError where ranks differ, on all of them."""
        self.meet(Request(), False, lambda device: torch.zeros(1, dtype=torch.int64, device=device))

    def meet(
        self,
        request: Request,
        waits: bool,
        look: Look,
        groups: Sequence[Mapping[str, Any]] = (),
        rows: Sequence[tuple[float, ...]] | None = None,
        turns: Sequence[int] = (),
    ) -> Request | None:
        """Compares what ranks are going to step, and measures the gradients of all.

        The host reads the answer on CPUs, where it waits for nothing, on a rank whose batches are
        new, and where it waits anyway. Otherwise the device leaves the step out where ranks differ,
        and the host hears of it before the next one.

        Args:
            request: this rank's.
            waits: whether the host waits to know if there is a step, as on all ranks or on none.
            look: for gradients of which no norm over ranks is measured.
            groups: the optimizer's, to be told where ranks differ.
            rows: their scalars in this step, which ranks of DTensors must have alike; None where
                they are on the device.
            turns: the steps that each group has taken, and what says which of them are the turn of
                matrices, where ranks must have them alike.

        Returns None where the host knows that there is no step, else the request of all ranks.
        Raises ValueError where ranks do not step the same or one raises an error, on all of them.
        """
        self._terms.begin(request, groups)
        if groups:
            self._wait.step = groups[0].get("step")

        # CPUs answer without a wait; on GPUs the host reads only where it must
        at_once = all(peer.is_read_at_once for peer in self._peers)
        reads = at_once or waits or not self._were_alike
        # a CUDA graph cannot wait: there the device alone knows
        reads = reads and not any(is_capturing(peer.device) for peer in self._peers)
        # floats have one hash in every process
        numbers = None if rows is None else hash(tuple(rows))
        with self._wait:
            try:
                # all meetings take place in here, in one order on all ranks; bool [WORDS], as
                # summed up
                heard = self._heard(request, reads, look, (numbers, *turns))

                # where the host does not read, found_inf has to say on the device that ranks differ
                skips = request.found_inf is not None or request.skip_nonfinite or not at_once
                # any of the words leaves the step out: a difference as well as an infinity
                skip = heard.any() if skips and not waits else None
                flag = heard[NONFINITE].long() if waits else None

                # the copy to the host begins; `hear` reads it before the next step
                if not reads:
                    self._notice.post(heard)
                    self._unheard = [self._notice]

                # bool() waits for the device
                refused = reads and bool(heard[:FOUND_INF].any())
                is_over = waits and bool(heard[FOUND_INF])
            except Exception:
                # this rank alone failed: the others wait in the meetings that are left
                self._leave(waits)
                raise
            # all ranks that read raise; those that do not go on, and exchange amaxes with this one
            if refused:
                self._stand_in(waits)
                raise ValueError(self._terms.refusal(PATIENCE if at_once else SHORT))

        # the next steps of these batches need no answer at once
        self._were_alike = self._were_alike or reads

        # the host has read found_inf; an infinity among gradients is read where controls are made
        if waits:
            return None if is_over else replace(request, found_inf=flag)
        # in one form always where there is one: a graph may be captured next
        return replace(request, found_inf=skip) if skips else request

    def _heard(
        self, request: Request, reads: bool, look: Look, numbers: Sequence[int | None]
    ) -> torch.Tensor:
        """The sum of all ranks' words: each meeting passes on what was heard in those before."""
        # a norm over ranks says it, but to those that have copies of all parts
        knows = all(peer.measures and (peer.groups or peer.size == 1) for peer in self._peers)
        looks = request.skip_nonfinite and not knows
        # bool [WORDS], what this rank says beside digests: its found_inf, and infinities that it
        # saw
        device, heard = self._peers[0].device, None
        if request.found_inf is not None or looks:  # else nothing was heard before the first
            heard = torch.zeros(WORDS, dtype=torch.bool, device=device)
        if heard is not None and request.found_inf is not None:
            heard[FOUND_INF].copy_(request.found_inf.reshape(()) != 0)
        # fills NONFINITE, the last word: this rank's gradients alone
        if heard is not None and looks:
            heard[NONFINITE:].copy_(look(device))

        # each message is summed up over its ranks before the next one is written: what was heard
        # goes on to ranks of other meetings
        for peer in self._peers:
            # ranks that share fp8 weights may have other groups beside
            alike = numbers if peer.measures else numbers[1:]
            peer.write(
                (request.clip_norm, request.skip_nonfinite, *alike), heard, request.needs_norm
            )
            # counted before the collective: if it fails, `_leave` must not enter it again
            self._terms.met += 1
            peer.meet()
            heard = peer.heard()
            if reads and peer.measures and bool(heard[0]):
                break  # the next meeting might never end

        # behind the last meeting: the words of all ranks, as far as chains of meetings reach
        assert heard is not None  # somebody was met
        return heard

    def withdraw(self, waits: bool) -> None:
        """Meets the ranks in place of `meet` where this one raises an error: all will.

        waits: as for `meet`.
        """
        if not any(is_capturing(peer.device) for peer in self._peers):
            # the store keeps the error for ranks that wait long and ask who is missing
            error = sys.exc_info()[1]
            if isinstance(error, Exception):
                tell_raised(error, self._wait.step)
            # none was met: this rank enters every meeting of the step, with a refusal
            self._terms.met = 0
            with self._wait:
                self._leave(waits)

    def _leave(self, waits: bool) -> None:
        """Meets the ranks, wherever they wait for this one, which raises an error."""
        # all meetings are over: the others wait in the vote of `whole`
        if self._terms.met == len(self._peers):
            self._has_failed(True)
            return

        # in the others' order, each with a digest that nobody else can have
        for peer in self._peers[self._terms.met :]:
            peer.refuse()
            peer.meet()
            # they ask the store for facts: there they find this rank's error
            if not is_capturing(peer.device):
                tell_failure(peer.event, sys.exc_info()[1])
            if peer.measures and bool(peer.heard()[0]):
                return  # who reads that comes no further

        # who has not read goes on to the exchange of amaxes
        self._stand_in(waits)

    def _stand_in(self, waits: bool) -> None:
        """Exchanges amaxes with ranks that have not read, and leave the step out later on."""
        peers = self._peers[-1]
        # zeros, fp32 and as many as in the last step: the largest of all is that of the others
        for group, count in self._amax_counts.items():
            if not waits and not peers.is_read_at_once:
                reduced(torch.zeros(count, dtype=torch.float32, device=peers.device), [group])

    def hear(self, counts: Iterable[dict[str, Any]]) -> None:
        """Raises ValueError for what ranks found in the last step, for which the host did not wait.

        Within a capture nothing can be waited for: the next step outside one hears of it.

        counts: those under "step" that the host raised for that step, which was left out.
        """
        if any(is_capturing(peer.device) for peer in self._peers):
            return
        # each notice is heard once, whatever it says
        unheard, self._unheard = self._unheard, []
        # the host waits for the copy of the last step's flags, not for the step behind it
        for notice in unheard:
            with self._wait:
                is_set = notice.is_set()
            # the device left that step out, and the host has counted it
            if is_set:
                # a group, or a parameter's own count
                for count in counts:
                    count["step"] -= 1
                raise ValueError(notice.message())

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Runs its block once ranks have met, on CPUs: where one rank fails in it, all raise.

        On GPUs, where that would have the host wait, nobody asks: all memory that a step takes
        there is taken before. Raises ValueError where another rank failed.
        """
        # what ranks send each other in the block they send in one order, then all vote
        try:
            yield
        except Exception as error:
            # the vote of this rank is 1: the others raise below, in the vote at the end of their
            # block
            tell_raised(error, self._wait.step)
            self._has_failed(True)
            raise
        # this rank is well, and hears here of another that is not
        if self._has_failed(False):
            raise ValueError(
                "another rank that steps the same parameters failed in this step: none of them "
                "has taken it, and the other's error says why"
            )

    def _has_failed(self, failed: bool) -> bool:
        """Whether this rank failed, or another of those that have met."""
        peers = [peer for peer in self._peers if peer.is_read_at_once]
        if not peers:
            return failed

        # int64 [1] on the CPU; the largest of all ranks, meeting after meeting
        vote = self._vote.fill_(failed)  # a rank without memory has it already
        with self._wait:
            for peer in peers:
                reduced(vote, peer.all_groups)
        return bool(vote)

    def gather(self, batches: Sequence[Any]) -> Gathered:
        """Takes the memory in which ranks exchange the amaxes of the batches' fp8 weights."""
        gathered = []
        # one message for each group of fp8 weights, in the order of the meetings
        for group in [peer.groups[0] for peer in self._peers if not peer.measures]:
            # by number, not by batch: gradients of another dtype make other batches
            pairs = [pair for batch in batches if batch.group == group for pair in batch.amaxes()]
            if amaxes := [amax for _, amax in sorted(pairs, key=lambda pair: pair[0])]:
                gathered.append((group, amaxes, torch.cat(amaxes)))
        return gathered

    def reduce_amaxes(self, gathered: Gathered) -> None:
        """Makes amaxes the largest of all ranks, between step and casts."""
        # the largest of all ranks, in one all-reduce; then each amax takes its piece
        for group, amaxes, together in gathered:
            parts = torch.split(reduced(together, [group]), list(map(len, amaxes)))
            torch._foreach_copy_(amaxes, list(parts))
        # a rank that refuses a later step stands in with as many
        self._amax_counts = {group: len(together) for group, _, together in gathered}


def agreement_of(
    met: Iterable[Sharers], alike: object, got: str = "", facts: Facts = dict
) -> Meeting | None:
    """Makes the meeting of all ranks that have a part or a copy, before a first step; or None.

    Args:
        met: whom to meet, in an order that all ranks have.
        alike: what they must have alike.
        got: what an error shows of it, where it is not known what others have.
        facts: finds all of it, by what an error calls it.
    """
    # whole meshes meet, their copies too: before a first step nobody knows who is to send what
    meshes = dict.fromkeys(
        (sharer.device, sharer.split[0]) for sharer in met if sharer.split is not None
    )
    if not meshes:
        return None

    # with an empty list of plans the norm's table stays 0: the words alone count
    digest = digest_of(alike)
    peers = [_peers(device, mesh, range(mesh.ndim), digest, [], True) for device, mesh in meshes]
    peers = _in_order(peers)
    return Meeting(peers, [], Terms(peers, got, lambda *_: facts()), None)


def facts_of(owned: Owned, clip_norm: Any) -> dict[str, str]:
    """Returns what ranks compare before a first step, by the names that an error gives."""
    facts = {
        "clip_norm": repr(clip_norm),
        "the number of groups": repr(len(owned.groups)),
        "the number of parameters": repr(len(owned.params)),
        **of_groups(owned.groups),
        **{f"option {f.name}": repr(getattr(owned.options, f.name)) for f in fields(owned.options)},
    }
    for place, (label, *described) in enumerate(owned.described()):
        facts[f"the parameter at place {place}"] = label
        facts[f"how {label} is stepped"] = repr(described)
    return facts


def meeting_of(
    views: Sequence[ParamView],
    labels: Sequence[str] = (),
    batches: Sequence[Any] = (),
    measures: bool = False,
    last: Meeting | None = None,
    met: Iterable[Sharers] = (),
    exchanges: bool = False,
) -> Meeting | None:
    """Makes the meeting with ranks that hold other parts of an optimizer's parameters; or None.

    Ranks of DTensors meet only in steps that measure their gradients.

    DTensors' ranks meet first, the most at first: each message tells of all parameters, so that as
    many as possible raise together. A message about fp8 weights tells of those that the ranks
    share; of groups that lie one within the other the smaller is first, and what its ranks heard is
    passed on.

    Args:
        views: of all parameters, those without a gradient included.
        labels: what errors call them; none are needed to `withdraw`.
        batches: of the parameters that have a gradient; each holds those of one split.
        measures: whether the step measures its gradients.
        last: the meeting before, of these batches or others.
        met: who is met in any case.
        exchanges: whether ranks send each other parts of matrices: those with copies are met too.

    Raises ValueError for a parameter of FSDP1's in a step that measures.
    """
    # the norm over ranks would be wrong for FSDP1, whose flat parameters say nothing of their ranks
    if measures:
        _check_not_flattened(views, labels)

    # whom to meet, and the places of the parameters that each meeting is about
    met = [*met, *sharers_of(views)]
    places_of: dict[Sharers, list[int]] = {sharer: [] for sharer in met if sharer.group or measures}
    for place, view in enumerate(views):
        sharer = Sharers(view.param.device, view.split, view.group)
        if sharer in places_of:
            places_of[sharer].append(place)

    # nobody shares a parameter with this rank
    if not places_of:
        return None

    # formats tell of gradients: a place without has none
    formats = {place: batch.formats for batch in batches for place in batch.positions}
    described = [_described(view, formats.get(place)) for place, view in enumerate(views)]
    # one digest of all parameters, in the groups' order, for meetings of DTensors
    everything = digest_of([*zip(labels, described, strict=False)])
    # meetings of DTensors, and of fp8 weights
    splits, shares = [], []
    for (device, split, group), places in places_of.items():
        # the order of fp8 weights is by number: ranks may have them at other places
        if split is None:
            places.sort(key=lambda place: views[place].number(place))
            alike = digest_of([described[place] for place in places if place in formats])
            ranks = dist.get_process_group_ranks(group)
            shares.append(Peers(device, [group], alike, ranks=ranks))
        else:
            # the norm's table is that of this split's batches alone
            plans = [batch.plan for batch in batches if batch.positions[0] in places]
            mesh, dims = split
            splits.append(_peers(device, mesh, dims, everything, plans, exchanges))

    # smaller groups of fp8 weights come first, ties by the group's name
    splits = _in_order(splits)
    shares.sort(key=lambda peer: (peer.size, str(peer.groups[0].group_name)))
    whole = [batch for batch in batches if views[batch.positions[0]].split is None]
    peers, params = [*splits, *shares], [*zip(labels, described, strict=False)]
    terms = Terms(peers, _counted(len(views), formats), partial(_facts, params))
    return Meeting(peers, whole, terms, last)


def _peers(
    device: torch.device, mesh: Any, dims: Sequence[int], alike: int, plans: list[Plan], all_: bool
) -> Peers:
    """The ranks of some dimensions of a mesh; all_: and those of the others, with their copies."""
    # dimensions that split the parameters, and those of copies
    groups = [mesh.get_group(dim) for dim in dims]
    copies = [mesh.get_group(dim) for dim in range(mesh.ndim) if all_ and dim not in dims]
    # rank numbers are left out of it: it must be the same on all ranks of a meeting
    kind = (device.type, mesh.device_type, mesh.mesh_dim_names, tuple(mesh.shape), tuple(dims))
    # this rank's slice of the mesh, all along each dimension that is met
    chosen = (
        slice(None) if all_ or dim in dims else index
        for dim, index in enumerate(mesh.get_coordinate())
    )
    ranks = mesh.mesh[tuple(chosen)].flatten().tolist()
    return Peers(device, groups, alike, plans, kind, copies, ranks)


def _in_order(splits: Iterable[Peers]) -> list[Peers]:
    """Sorts peers, the most ranks first; gives each the digest of all meetings."""
    ordered = sorted(splits, key=lambda peers: (-peers.size, repr(peers.kind)))
    # each message says which meetings its rank will have: who would wait for ever raises instead
    for peers in ordered:
        peers.meetings = digest_of([split.kind for split in ordered])
    return ordered


def _described(view: ParamView, formats: Formats | None) -> tuple[object, ...]:
    """Returns the facts of a parameter that ranks must have alike.

    formats: the parameter's, where it has a gradient; else None.
    """
    # ranks meet in batches of matrices, and another dtype makes another batch
    grad = formats and formats.matrix and formats.grad.name
    format_names = formats and (
        formats.master.name,
        *(moment.name for moment in formats.moments),
        formats.matrix,
        grad,
    )
    return (*view.described, format_names)


def _counted(params: int, formats: Mapping[int, Formats]) -> str:
    """The counts of what a rank steps, for a message."""
    masters = sum(param_formats.master.present for param_formats in formats.values())
    return f"{params} parameters, {len(formats)} gradients and {masters} masters"


def _facts(
    params: Sequence[tuple[str, tuple[Any, ...]]],
    request: Request,
    groups: Sequence[Mapping[str, Any]],
) -> dict[str, str]:
    """Returns what a step's ranks must have alike; params: names, and what `_described` gives."""
    facts = {
        "clip_norm": repr(request.clip_norm),
        "whether an infinity or NaN leaves the step out": repr(request.skip_nonfinite),
        "the number of groups": repr(len(groups)),
        "the number of parameters": repr(len(params)),
        **of_groups(groups),
    }
    names = ("shape", "dtype", "placements and mesh", "fp8 recipe")
    for place, (label, (*view, format_names)) in enumerate(params):
        facts[f"the parameter at place {place}"] = label
        facts |= {f"{name} of {label}": str(value) for name, value in zip(names, view, strict=True)}
        facts[f"gradient of {label}"] = (
            "none" if format_names is None else f"one, formats {format_names}"
        )
    return facts


def _check_not_flattened(views: Sequence[ParamView], labels: Sequence[str]) -> None:
    """Raises ValueError for FSDP1's flat parameters, of which each rank has its own norm."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    for view, label in zip(views, labels, strict=False):
        if getattr(view.param, "_fsdp_flattened", False):
            raise ValueError(
                f"{label} must not be FullyShardedDataParallel's (FSDP1) in a step that measures "
                "the gradients (clip_norm, nonfinite other than 'propagate'): each rank would see "
                "its own part alone, got one; FSDP2 (fully_shard) adds up over ranks, or pass "
                "clip_coefficient, found from a norm of all ranks"
            )
