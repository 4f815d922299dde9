"""Whether there is a step, as all ranks see it that hold parts of the same parameters."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from megaopt.kernels.step.preparation import Request
from megaopt.kernels.step.table import is_capturing
from megaopt.state.owned import Owned
from megaopt.step.ranks import vote as agreement
from megaopt.step.ranks.float8 import Agreement, Gathered, all_reduce_max, in_order
from megaopt.step.ranks.shards import Meeting, withdraw
from megaopt.step.ranks.vote import Notice, RanksDiffer


class Consensus:
    """What an optimizer's rank tells others, and what it has yet to hear of the last step."""

    def __init__(self) -> None:
        self._notices: list[Notice] = []
        self._amax_counts: dict[Any, int] = {}  # by group of ranks: of the last step

    def forget(self) -> None:
        """What ranks found in the last step counts no more: a load takes its place."""
        self._notices = []

    def hear(self, groups: Iterable[dict[str, Any]], capturable: bool) -> None:
        """Raises what ranks found in the last step, for which the host did not wait."""
        notices, self._notices = self._notices, []
        for notice in notices:
            if notice.is_set():
                if not capturable:  # the host counted a step that was left out
                    for group in groups:
                        group["step"] -= 1
                raise ValueError(notice.message)

    def share_error(self, owned: Owned, measures: bool, waits: bool) -> None:
        """An error of this rank alone becomes one on all that would wait for it.

        Args:
            owned: the optimizer's, as it is where an error comes up.
            measures: whether ranks would meet to measure a norm.
            waits: whether the host waits to know if there is a step.
        """
        if not is_capturing(owned.device):
            views = owned.shared_views
            if measures:
                withdraw(views)
            Agreement(views, {}).withdraw(waits, self._amax_counts)

    def reach(self, run: Any, waits: bool, own: Any) -> Request | None:
        """The request as all ranks see it; None where the host knows that there is no step.

        Args:
            run: what this rank is going to step.
            waits: whether the host waits to know if there is a step, as on all ranks or on none.
            own: to look for infinities with.

        Raises:
            ValueError: ranks do not step the same.
        """
        try:
            return self._reached(run, waits, own)
        except RanksDiffer as error:
            raise ValueError(str(error)) from None
        except Exception:  # the others wait for this rank
            self._leave(run, waits)
            raise

    def _reached(self, run: Any, waits: bool, own: Any) -> Request | None:
        batches, request = run.batches, run.request
        was_given = request.found_inf is not None
        if batches.agreement is not None:
            batches.agreement.is_over = False
        if request.needs_norm:
            if batches.meeting is None:
                owned = run.owned
                batches.meeting = Meeting(owned.views, owned.labels, batches.batches)
            batches.meeting.is_over = False
            request, self._notices = batches.meeting.meet(request, waits)
        if batches.agreement is not None:
            device = batches.agreement.device
            flags = self._flags(run.owned, batches, request, device, own)
            return self._agreed(request, batches.agreement, flags, waits)
        if not (was_given and waits):
            return request
        return None if bool(request.found_inf) else replace(request, found_inf=None)

    def _leave(self, run: Any, waits: bool) -> None:
        """Meets the ranks where they are, for one that raises an error among the others."""
        batches = run.batches
        if run.request.needs_norm:
            if batches.meeting is None:
                return withdraw(run.owned.shared_views)
            if not batches.meeting.is_over:
                return None  # it told them
        if batches.agreement is not None and not batches.agreement.is_over:
            return batches.agreement.withdraw(waits, self._amax_counts)
        self._vote(run, failed=True)

    @contextlib.contextmanager
    def whole(self, run: Any) -> Iterator[None]:
        """After ranks have met, on CPUs: where one of them fails within, all of them raise.

        On GPUs, where that would have the host wait, nobody asks: all memory that a step takes
        there is taken before.

        Raises ValueError where another rank failed.
        """
        try:
            yield
        except Exception:
            self._vote(run, failed=True)
            raise
        if self._vote(run, failed=False):
            raise ValueError(
                "another rank that steps the same parameters failed in this step: none of them "
                "has taken it, and the other's error says why"
            )

    def _vote(self, run: Any, failed: bool) -> bool:
        """Whether one of the ranks that met failed."""
        own, meets = run.batches.agreement, run.request.needs_norm
        found = [] if own is None else [(own.device, in_order(own.signatures))]
        for each in run.batches.meeting.sums if meets else ():
            mesh, dims = each.split
            found.append((each.device, [mesh.get_group(dim) for dim in dims]))
        at_once = [groups for device, groups in found if agreement.is_read_at_once(device)]
        vote = run.batches.vote.fill_(failed)
        for group in itertools.chain.from_iterable(at_once):
            dist.all_reduce(vote, dist.ReduceOp.MAX, group=group)
        return bool(vote)

    def _agreed(
        self, request: Request, ranks: Agreement, own: torch.Tensor, waits: bool
    ) -> Request | None:
        """The request as all ranks that share fp8 weights see it; None if there is no step.

        A rank that left a step out alone would let the others wait for its amaxes for ever.
        """
        flags, notices = ranks.reach(own, waits, self._amax_counts)
        self._notices = [*self._notices, *notices]
        if waits:  # the host has to know, which counts the steps
            return None if bool(flags[0]) else replace(request, found_inf=flags[1])
        if not (request.is_skippable or notices):
            return request
        return replace(request, found_inf=flags.amax())

    def _flags(
        self,
        owned: Owned,
        batches: Any,
        request: Request,
        device: torch.device,
        own: Any,
    ) -> torch.Tensor:
        """int64: whether found_inf is set; whether an infinity or NaN is to be skipped here."""
        flags = torch.zeros(2, dtype=torch.int64, device=device)
        if request.found_inf is not None:
            flags[:1].copy_(request.found_inf.reshape(1) != 0)
        if request.skip_nonfinite:
            flags[1:].copy_(own.nonfinite(owned, batches.batches, device))
        return flags

    def exchange(self, found: Sequence[Gathered]) -> None:
        """Between step and quantization: amaxes of fp8 weights become the largest of all ranks."""
        self._amax_counts = all_reduce_max(found)
