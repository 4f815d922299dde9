"""Matrices that are stepped through a projection of their gradients."""

from __future__ import annotations

import math
from typing import Any

import torch

from megaopt.kernels.formats import Format
from megaopt.kernels.lowrank.spec import RIGHT, LowRank
from megaopt.kernels.step.draws import Place
from megaopt.params.dtensor import DTensorView, dtensor_class, is_dtensor
from megaopt.params.view import FEWEST_IN_ROWS, ParamView

PROJECTION, CAPTURED_ENERGY = "projection", "captured_energy"
"""What a state has beside the moments; zeros until the parameter's first step."""


def low_rank_view(param: Any, low_rank: LowRank) -> ParamView:
    """Of a plain matrix or a DTensor that is projected so."""
    kind = LowRankDTensorView if is_dtensor(param) else LowRankView
    return kind(param, low_rank)


class LowRankView(ParamView):
    """A plain matrix whose moments are those of its projected gradient."""

    low_rank: LowRank

    def __init__(self, param: Any, low_rank: LowRank) -> None:
        super().__init__(param)
        self.low_rank = low_rank

    def state_shape(self, name: str) -> tuple[int, ...]:
        """The projected gradient's, but for the master."""
        return self._shape(name, tuple(self.local.shape))

    def whole_state_shape(self, name: str) -> tuple[int, ...]:
        """The same over all ranks."""
        return self._shape(name, tuple(self.param.shape))

    def _shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape if name == "master_param" else self.low_rank.low_shape(shape)

    @property
    def kept(self) -> dict[str, tuple[int, ...]]:
        """The projection, and how much of the gradient's square it captured when it was made."""
        return {
            PROJECTION: self.low_rank.projection_shape(self.local.shape),
            CAPTURED_ENERGY: (),
        }

    def keeps_blocks(self, form: Format) -> bool:
        """By the size of the projected gradient, whose rows have to be of whole blocks."""
        shape = self.low_rank.low_shape(self.whole_shape)
        return shape[1] % form.block == 0 and math.prod(shape) >= FEWEST_IN_ROWS

    def block_scales_shape(self, block: int) -> tuple[int, ...]:
        """The shape of the moments' scales: (rows, blocks of a row)."""
        rows, columns = self.low_rank.low_shape(self.local.shape)
        return (rows, columns // block)


class LowRankDTensorView(LowRankView, DTensorView):
    """A DTensor whose moments are sharded as it is, and whose projection every rank has."""

    def first_of(self, name: str) -> int:
        """The index of the shard's first element in the whole state tensor of this name."""
        if name == "master_param":
            return self.first_element
        shape = self.local.shape
        return self.low_rank.low_place(Place(0, self.first_element), shape).first

    def wrap(self, local: torch.Tensor) -> torch.Tensor:
        """A DTensor split as the parameter is, with the shard's memory."""
        if local.shape == self.local.shape:
            return super().wrap(local)
        rows, columns = local.shape
        is_split = self.low_rank.side == RIGHT
        return self._reshaped(local, (self.param.shape[0] if is_split else rows, columns))

    def wrap_scales(self, local: torch.Tensor) -> torch.Tensor:
        """The scales of the moments' blocks, likewise."""
        return self.wrap(local)

    def wrap_named(self, name: str, local: torch.Tensor) -> torch.Tensor:
        """Projection and energy as DTensors that every rank has whole; others as of the parameter.

        Args:
            name: of the state tensor.
            local: this rank's.
        """
        return self.replicated(local) if name in self.kept else super().wrap_named(name, local)

    def replicated(self, local: torch.Tensor) -> torch.Tensor:
        """A DTensor on the parameter's mesh that every rank has whole."""
        from torch.distributed.tensor import Replicate

        own = self.param._spec
        meta = own.tensor_meta._replace(shape=local.shape, stride=local.stride(), dtype=local.dtype)
        spec = type(own)(own.mesh, (Replicate(),) * own.mesh.ndim, meta)
        made: torch.Tensor = dtensor_class()(local.detach(), spec, requires_grad=False)
        return made
