"""Matrices that are stepped through a projection of their gradients."""

from __future__ import annotations

import math

import torch

from megaopt.kernels.formats import Format
from megaopt.kernels.lowrank.spec import LowRank
from megaopt.params.view import FEWEST_IN_ROWS, ParamView

PROJECTION, CAPTURED_ENERGY = "projection", "captured_energy"
"""What a state has beside the moments, from the parameter's first step on."""


class LowRankView(ParamView):
    """A plain matrix whose moments are those of its projected gradient."""

    def __init__(self, param: torch.Tensor, low_rank: LowRank) -> None:
        super().__init__(param)
        self.low_rank: LowRank = low_rank

    def state_shape(self, name: str) -> tuple[int, ...]:
        """The projected gradient's, but for the master."""
        shape = self.local.shape
        return tuple(shape) if name == "master_param" else self.low_rank.low_shape(shape)

    @property
    def kept(self) -> dict[str, tuple[int, ...]]:
        """The projection, and how much of the gradient's square it captured when it was made."""
        return {
            PROJECTION: self.low_rank.projection_shape(self.local.shape),
            CAPTURED_ENERGY: (),
        }

    def keeps_blocks(self, form: Format) -> bool:
        """By the size of the projected gradient, and of packed codes its last dimension."""
        columns = self.low_rank.low_shape(self.local.shape)[1]
        in_blocks = form.packed == 1 or columns % form.block == 0
        return in_blocks and self._low_numel >= FEWEST_IN_ROWS

    def block_scales_shape(self, block: int) -> tuple[int, ...]:
        """Of the moments' scales."""
        return (-(-self._low_numel // block),)

    @property
    def _low_numel(self) -> int:
        return math.prod(self.low_rank.low_shape(self.local.shape))
