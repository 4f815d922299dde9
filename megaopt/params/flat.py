"""Flat parts of matrices: rules for whole matrices step them only where all ranks' are known."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from megaopt.kernels.shards import PLAIN
from megaopt.params.view import MASTER, ParamView

if TYPE_CHECKING:
    from megaopt.kernels.rules.matrix import Matrix

FLATTENED_BY_FSDP1 = "_fsdp_flattened"
"""The mark of FullyShardedDataParallel's flat parameters, and of views into them."""
FLAT = (
    "flat part of a matrix, which has neither its rows nor its columns; FSDP2 (fully_shard) splits "
    "matrices by rows"
)

PARTS = "megaopt_parts"
"""The attribute of a flat part that says where all other parts are: its `FlatParts`."""


class FlatParts(NamedTuple):
    """The elements of a parameter that each rank has: a run without gaps."""

    mesh: Any
    """The ranks, a DeviceMesh of one dimension."""
    ends: Sequence[tuple[int, int]]
    """The first element of the parameter on each rank, and the one behind the last."""


class FlatMatrixView(ParamView):
    """A flat part of a matrix whose other parts are on known ranks; one dimension.

    Its moments are cut at the same parts of the whole.
    """

    is_flat = True

    def __init__(self, param: Any, matrix: Matrix) -> None:
        super().__init__(param, matrix)
        self._parts: FlatParts = getattr(param, PARTS)
        self.split = self._parts.mesh, (0,)

    def boxes(
        self, coordinates: Sequence[Sequence[int]], shape: Sequence[int]
    ) -> list[tuple[tuple[int, int], ...]]:
        """The parts at places of the mesh: the first element and the one behind the last.

        shape: the parameter's, or that of its moments.
        """
        # parts of moments with fewer elements are cut in proportion
        numel, whole = math.prod(shape), math.prod(self.whole_shape)
        ends = [self._parts.ends[rank] for (rank,) in coordinates]
        return [((begin * numel // whole, end * numel // whole),) for begin, end in ends]

    def _ends(self, name: str) -> tuple[int, int]:
        """The first element of this rank's state tensor in the whole one, and the one behind."""
        first = super().first_of(name)
        if name == MASTER or self.matrix is None:
            return first, first + self.local.numel()
        here, low = self._parts.mesh.get_coordinate(), self.matrix.low_shape(self.whole_shape)
        ((ends,),) = self.boxes([here], low)
        return ends

    def state_shape(self, name: str) -> tuple[int, ...]:
        """The shape of this rank's tensor of the state: one dimension."""
        begin, end = self._ends(name)
        return (end - begin,)

    def whole_state_shape(self, name: str) -> tuple[int, ...]:
        """The shape of this rank's part: the optimizer's user sees no other."""
        return self.state_shape(name)

    def first_of(self, name: str = MASTER) -> int:
        """The index of the part's first element in the whole state tensor of this name."""
        return self._ends(name)[0]


def is_flat_part(param: torch.Tensor) -> bool:
    """Whether a tensor is a part of matrices without their rows and columns, or marked as one."""
    whole = getattr(param, "megaopt_whole_shape", ())
    if type(param) not in PLAIN:
        from megaopt.float8.shard import Float8Shard

        if isinstance(param, Float8Shard):
            whole = param.weight.shape
    return len(whole) >= 2 or getattr(param, FLATTENED_BY_FSDP1, False)
