"""What comes together of a matrix whose parts are on several ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megaopt.kernels.rules.matrix import ALONE, Parts
from megaopt.params import ParamView
from megaopt.params.dtensor import local_of
from megaopt.step.ranks.peers import SUM, reduced

MAGNITUDE = 0x7FFFFFFF
"""The bits of an fp32 number but its sign's: as integers in the order of the magnitudes, NaN
last. What collectives make of a NaN among numbers differs."""


def parts_of(view: ParamView) -> Parts:
    """The ranks that hold the other parts of a parameter, or nobody."""
    return ALONE if view.split is None else PartsOnRanks(view)


class PartsOnRanks:
    """This rank's part of a DTensor, and those of the others.

    Sums are made in fp64 of numbers that were fp32: what is added up in another order differs by
    2**-53 of them at most, and on most gradients not at all.

    Args:
        view: of a DTensor; for all but `joined` and `part` it is split in its first dimension.
    """

    def __init__(self, view: ParamView) -> None:
        assert view.split is not None
        mesh, dims = view.split
        self._view, self._rows = view, view.whole_shape[0]
        self._groups = [mesh.get_group(dim) for dim in dims]
        self._copies = [mesh.get_group(dim) for dim in range(mesh.ndim) if dim not in dims]

    def rows(self, own: int) -> int:
        """Of all ranks."""
        return self._rows

    def largest(self, own: torch.Tensor) -> torch.Tensor:
        """Of all ranks' magnitudes, fp32 of shape ()."""
        return reduced(own.view(torch.int32) & MAGNITUDE, self._groups).view(torch.float32)

    def add_up(self, own: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks, fp64; in place."""
        return reduced(own, self._groups, SUM)

    def alike(self, own: torch.Tensor) -> torch.Tensor:
        """The projection of the first of the ranks that have copies of the same rows; in place."""
        for group in self._copies:
            first: Any = dist.get_global_rank(group, 0)  # untyped in torch
            dist.broadcast(own, first, group=group)
        return own

    def joined(self, own: torch.Tensor) -> torch.Tensor:
        """The whole matrix: shards of any sizes, of any placements."""
        whole: Any = self._view.wrap(own)
        return local_of(whole.full_tensor())  # type: ignore[no-any-return]

    def part(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's shard of it, without a word between ranks."""
        everywhere: Any = self._view.replicated(whole)  # type: ignore[attr-defined]
        placements = self._view.param.placements
        return local_of(everywhere.redistribute(placements=placements))  # type: ignore[no-any-return]
