"""What ranks that share fp8 weights do together: whether there is a step, and the amaxes.

Every rank calls the same collectives in the same order, whatever it finds in its own gradients: one
for the decision and one for the amaxes in each group of ranks; also a rank that is about to raise
an error which the others do not have.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from megaopt.kernels.step.batch import Formats
from megaopt.params import ParamView
from megaopt.step.ranks import vote as agreement
from megaopt.step.ranks.vote import Notice, RanksDiffer, digest_of

Group = dist.ProcessGroup


def in_order(groups: Iterable[Group]) -> list[Group]:
    """By size and name, of which all ranks of a group have the same.

    Of groups that lie one within the other the largest comes last: what the ranks of a smaller one
    found all others hear there.
    """
    return sorted(groups, key=lambda group: (dist.get_world_size(group), str(group.group_name)))


class Agreement:
    """What the ranks that share an optimizer's weights tell each other before a step.

    Args:
        views: of all the optimizer's parameters.
        formats: of those that have a gradient, by their place among all.
    """

    def __init__(self, views: Sequence[ParamView], formats: Mapping[int, Formats]) -> None:
        shared: dict[Group, list[tuple[int, int]]] = {}
        for place, view in enumerate(views):
            group = view.group
            if group:
                shared.setdefault(group, []).append((view.number(place), place))
        stepped = {
            group: [(views[place], formats.get(place)) for _, place in sorted(places)]
            for group, places in shared.items()
        }
        self.signatures = {group: _signature(own) for group, own in stepped.items()}
        self._were_alike = False
        self.is_over = False
        """This step's collectives have been called."""
        if shared:
            first = next(iter(stepped.values()))[0][0]
            self.device = first.param.device
            """Where the ranks meet."""
            own = [form is not None for each in stepped.values() for _, form in each]
            self._notice = Notice(self.device, _refusal(sum(own), len(own)))

    def reach(
        self, flags: torch.Tensor, waits: bool, last: Mapping[Group, int]
    ) -> tuple[torch.Tensor, list[Notice]]:
        """The flags of all ranks that share weights with this one, and whether they differ.

        What the ranks step is compared at once on the CPU, where nothing has to be waited for, by a
        rank whose batches are new, and where the host waits anyway. Otherwise the step has to be
        left out on the device where ranks differ, and the host reads the notice before the next.

        Args:
            flags: int64, 0 where this rank knows of no reason to leave the step out.
            waits: whether the host waits in this step in any case, on all ranks.
            last: how many amaxes each group last put together.

        Returns:
            int64: the largest of each flag, then whether ranks differ; what is to be read before
            the next step.

        Raises:
            ValueError: ranks step other weights, or the same in another order, or one has raised an
                error; on all ranks.
        """
        self.is_over = False
        together = self._together(torch.cat([flags, flags.new_zeros(1)]))
        at_once = agreement.is_read_at_once(self.device)
        if at_once or waits or not self._were_alike:
            if bool(together[-1]):
                self._leave(waits, last)
                raise RanksDiffer(self._notice.message)
            self._were_alike = True
            return together, []
        self._notice.post(together[-1:])
        return together, [self._notice]

    def withdraw(self, waits: bool, last: Mapping[Group, int]) -> None:
        """Meets the ranks in place of `reach` where this one raises an error: all will."""
        if self.signatures:
            self._together(torch.tensor([0, 0, 1], device=self.device))
            self._leave(waits, last)

    def _together(self, flags: torch.Tensor) -> torch.Tensor:
        """The largest of each flag in all groups; the last is also set where ranks differ."""
        groups = in_order(self.signatures)
        for group in groups:
            own = self.signatures[group]
            # the largest of a number and of its negative: opposite only if all have the same
            both = (torch.full((1,), number, device=flags.device) for number in (own, -own))
            together = torch.cat([flags, *both])
            dist.all_reduce(together, dist.ReduceOp.MAX, group=group)
            self.is_over = group is groups[-1]
            flags, differs = together[:-2], together[-2:-1] != -together[-1:]
            flags[-1:].copy_(torch.maximum(flags[-1:], differs.long()))
        return flags

    def _leave(self, waits: bool, last: Mapping[Group, int]) -> None:
        """Stands in for the amaxes of ranks that do not read, and leave the step out later on."""
        if not waits and not agreement.is_read_at_once(self.device):
            none = {
                group: torch.zeros(count, dtype=torch.float32, device=self.device)
                for group, count in last.items()
            }
            all_reduce_max(gathered({group: [(0, amax)] for group, amax in none.items()}))


def _refusal(gradients: int, shards: int) -> str:
    return (
        "ranks that share fp8 weights must step the same ones in the same order (a shard of every "
        "weight, empty where a rank owns nothing, with a gradient of its size; the same formats of "
        f"masters and moments), got {gradients} gradients for {shards} shards on rank "
        f"{dist.get_rank()}, and something else, or an error, on another"
    )


def _signature(shards: Sequence[tuple[ParamView, Formats | None]]) -> int:
    """63 bits of what the ranks have to have alike: the weights that are stepped, in order."""
    stepped = []
    for shard, formats in shards:
        weight = shard.weight
        if weight is not None and formats is not None:
            kept = (formats.master.name, *(moment.name for moment in formats.moments))
            stepped.append((tuple(weight.shape), weight.recipe, weight.dtype, kept))
    return digest_of(stepped)


class Gathered(NamedTuple):
    """The amaxes of one group of ranks, gathered for them; all memory that the exchange takes."""

    group: Group
    own: list[torch.Tensor]
    together: torch.Tensor
    parts: list[torch.Tensor]
    """Views of `together`, one for each of `own`."""


def gathered(amaxes: Mapping[Group, Sequence[tuple[int, torch.Tensor]]]) -> list[Gathered]:
    """Puts together the amaxes that ranks are going to exchange.

    amaxes: for each group the parameters' numbers, and their weights' amaxes.
    """
    found = []
    for group in in_order(amaxes):
        # by number, not by batch: gradients of another dtype make other batches
        own = [amax for _, amax in sorted(amaxes[group], key=lambda each: each[0])]
        together = torch.cat(own)
        parts = list(torch.split(together, [len(amax) for amax in own]))
        found.append(Gathered(group, own, together, parts))
    return found


def all_reduce_max(found: Sequence[Gathered]) -> dict[Group, int]:
    """Raises amaxes to the largest of all ranks; how many each group has."""
    for group, own, together, parts in found:
        dist.all_reduce(together, dist.ReduceOp.MAX, group=group)
        torch._foreach_copy_(own, parts)
    return {each.group: len(each.together) for each in found}
