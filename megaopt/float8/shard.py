"""A rank's part of an fp8 weight, as ZeRO cuts weights: what an optimizer steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Float8Shard(Tensor):
    """Elements of a Float8Weight from `start` on, row by row; one-dimensional, may be empty.

    Of the weight's dtype to everybody; it holds no memory of its own. The optimizer writes its
    codes into the weight's, and scales and amaxes for the whole weight: every rank of the group has
    one for each weight, in the same order, empty where it owns nothing, with a gradient of its
    size (docs/numbers.md, "Before the rule"). A step refuses a part of a weight without a group
    of several ranks. The codes of other ranks are gathered by whoever shards (`weight.data8`, as
    bytes).

    Args:
        weight: the whole weight, on every rank; also another library's, where an integration has
            made it known.
        start: the first element.
        stop: past the last one.
        group: the ranks whose shards make up the weight; None: the default group.
        order: the weight's number among those of the group, the same on all ranks; None: ranks have
            the shards in one order among their optimizers' parameters.

    Raises:
        ValueError: a range that is not in the weight.
    """

    weight: Any
    start: int
    group: dist.ProcessGroup | None
    order: int | None

    @staticmethod
    def __new__(
        cls: type[Float8Shard],
        weight: Tensor,
        start: int,
        stop: int,
        group: dist.ProcessGroup | None = None,
        order: int | None = None,
    ) -> Float8Shard:
        """Checks the range."""
        if not 0 <= start <= stop <= weight.numel():
            raise ValueError(
                f"start and stop must be from 0 to {weight.numel()}, in order, got {start} and "
                f"{stop}"
            )
        shard: Float8Shard = Tensor._make_wrapper_subclass(
            cls, (stop - start,), dtype=weight.dtype, device=weight.device, requires_grad=True
        )
        shard.weight, shard.start, shard.group, shard.order = weight, start, group, order
        return shard

    def __repr__(self) -> str:  # type: ignore[override]  # torch's takes what its printer passes
        return f"Float8Shard({self.start}:{self.start + self.numel()} of {self.weight!r})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares a stand-in
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            shard = args[0]
            stop = shard.start + shard.numel()
            return Float8Shard(shard.weight, shard.start, stop, shard.group, shard.order)
        raise TypeError(f"{func} must be given the weight of a Float8Shard, got the shard")
