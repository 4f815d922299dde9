"""What ranks that share fp8 weights do together: whether there is a step, and the amaxes.

Every rank calls the same collectives in the same order, whatever it finds in its own gradients: one
for the decision and one for the amaxes in each group of ranks, groups by name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist

from megaopt.float8.parts import weight_of
from megaopt.float8.shard import Float8Shard

Group = dist.ProcessGroup


def group_of(param: torch.Tensor) -> Group | None:
    """The ranks that share a parameter's weight; None where there are no others."""
    if not isinstance(param, Float8Shard) or not dist.is_initialized():
        return None
    group = param.group or dist.group.WORLD
    return group if dist.get_world_size(group) > 1 else None


def check_shared(param: torch.Tensor, where: str) -> None:
    """Raises ValueError for a part of a weight whose other parts no rank is known to hold."""
    if not isinstance(param, Float8Shard) or param.numel() == param.weight.numel():
        return
    if group_of(param) is None:
        found = "its group has no other" if dist.is_initialized() else "there is no process group"
        raise ValueError(
            f"{where}: elements {param.start} to {param.start + param.numel()} of an fp8 weight of "
            f"{param.weight.numel()} are not allowed where {found}: the whole weight, or a group "
            "of the ranks that hold the rest, on torch.distributed"
        )


def order_of(param: torch.Tensor, place: int) -> int:
    """By what ranks put the weights of a group in one order; `place` is the parameter's."""
    order = getattr(param, "order", None)
    return place if order is None else int(order)


def in_order(groups: Iterable[Group]) -> list[Group]:
    """By name, of which all ranks of a group have the same."""
    return sorted(groups, key=lambda group: str(group.group_name))


class Agreement:
    """What the ranks that share an optimizer's weights tell each other before a step.

    Args:
        params: all of the optimizer's.
        grads: of each, None where it has none.
    """

    def __init__(self, params: Sequence[torch.Tensor], grads: Sequence[object]) -> None:
        self.has_grad: dict[Group, dict[torch.Tensor, bool]] = {}
        self._was_reached = False
        shared = [(place, group_of(param)) for place, param in enumerate(params)]
        places = [
            (order_of(params[place], place), place, group) for place, group in shared if group
        ]
        for _, place, group in sorted(places, key=lambda each: each[:2]):
            self.has_grad.setdefault(group, {})[params[place]] = grads[place] is not None
        self.signatures = {group: _signature(own) for group, own in self.has_grad.items()}

    @property
    def device(self) -> torch.device:
        """Where the ranks meet."""
        return next(param.device for own in self.has_grad.values() for param in own)

    def reach(self, flags: torch.Tensor) -> torch.Tensor:
        """The flags of all ranks that share weights with this one.

        What the ranks step is compared until it was found alike; on the CPU, where nothing has to
        be waited for, always.

        Args:
            flags: int64, 0 where this rank knows of no reason to leave the step out.

        Returns:
            int64, flags's shape: the largest of each.

        Raises:
            ValueError: ranks step other weights, or the same in another order.
        """
        for group in in_order(self.signatures):
            own = self.signatures[group]
            # the largest of a number and of its negative: opposite only if all have the same
            both = (torch.full((1,), number, device=flags.device) for number in (own, -own))
            together = torch.cat([flags, *both])
            dist.all_reduce(together, dist.ReduceOp.MAX, group=group)
            flags = together[:-2]
            compared = not self._was_reached or flags.device.type == "cpu"
            if compared and bool(together[-2] != -together[-1]):
                self._refuse(group)
        self._was_reached = True
        return flags

    def _refuse(self, group: Group) -> None:
        own = list(self.has_grad[group].values())
        raise ValueError(
            f"the ranks of process group {group.group_name!r} do not step the same fp8 weights in "
            f"the same order (rank {dist.get_rank()} has a gradient for {sum(own)} of its "
            f"{len(own)} shards), which is not allowed: every rank needs a shard of every weight, "
            "empty where it owns nothing, and a gradient of its size"
        )


def _signature(has_grad: Mapping[torch.Tensor, bool]) -> int:
    """63 bits of what the ranks have to have alike: the weights that are stepped, in order."""
    weights = [weight_of(param) for param, given in has_grad.items() if given]
    stepped = [(tuple(each.shape), each.recipe, each.dtype) for each in weights if each is not None]
    digest = hashlib.blake2b(repr(stepped).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def put_together(amaxes: Mapping[Group, Sequence[tuple[int, torch.Tensor]]]) -> None:
    """Raises amaxes to the largest of all ranks.

    Args:
        amaxes: for each group parameters' numbers (order_of), and their amaxes.
    """
    for group in in_order(amaxes):
        # by number, not by batch: gradients of another dtype make other batches
        own = [amax for _, amax in sorted(amaxes[group], key=lambda each: each[0])]
        together = torch.cat(own)
        dist.all_reduce(together, dist.ReduceOp.MAX, group=group)
        torch._foreach_copy_(own, list(torch.split(together, [len(amax) for amax in own])))
