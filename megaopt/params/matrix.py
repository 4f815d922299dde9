"""Matrices that a rule for whole matrices steps."""

from __future__ import annotations

import math
from typing import Any

import torch

from megaopt.kernels.formats import Format
from megaopt.kernels.place import Place
from megaopt.kernels.rules.matrix import Matrix
from megaopt.params.dtensor import DTensorView, dtensor_class, is_dtensor
from megaopt.params.view import FEWEST_IN_ROWS, ParamView


def matrix_view(param: Any, matrix: Matrix) -> ParamView:
    """The view of a plain matrix or a DTensor that is stepped so."""
    kind = MatrixDTensorView if is_dtensor(param) else MatrixView
    return kind(param, matrix)


class MatrixView(ParamView):
    """A plain matrix whose moments are of the rule's low shape."""

    matrix: Matrix

    def __init__(self, param: Any, matrix: Matrix) -> None:
        super().__init__(param)
        self.matrix = matrix

    def state_shape(self, name: str) -> tuple[int, ...]:
        """The low shape, but for the master."""
        return self._shape(name, tuple(self.local.shape))

    def whole_state_shape(self, name: str) -> tuple[int, ...]:
        """The same over all ranks."""
        return self._shape(name, tuple(self.param.shape))

    def _shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape if name == "master_param" else self.matrix.low_shape(shape)

    @property
    def kept(self) -> dict[str, tuple[int, ...]]:
        """What the rule keeps."""
        return self.matrix.kept(self.local.shape)

    def keeps_blocks(self, form: Format) -> bool:
        """Whether the moments are large enough, and their rows of whole blocks."""
        shape = self.matrix.low_shape(self.whole_shape)
        return shape[1] % form.block == 0 and math.prod(shape) >= FEWEST_IN_ROWS

    def block_scales_shape(self, block: int) -> tuple[int, ...]:
        """The shape of the moments' scales: (rows, blocks of a row)."""
        rows, columns = self.matrix.low_shape(self.local.shape)
        return (rows, columns // block)


class MatrixDTensorView(MatrixView, DTensorView):
    """A DTensor whose moments are sharded as it is, and of which every rank has what is kept."""

    def first_of(self, name: str) -> int:
        """The index of the shard's first element in the whole state tensor of this name."""
        if name == "master_param":
            return self.first_element
        return self.matrix.low_place(Place(0, self.first_element), self.local.shape).first

    def wrap(self, local: torch.Tensor) -> torch.Tensor:
        """A DTensor split as the parameter is, with the shard's memory."""
        if local.shape == self.local.shape or self._keeps_shape:
            return super().wrap(local)
        return self._reshaped(local, (self.matrix.low_shape(self.param.shape)[0], local.shape[1]))

    def wrap_scales(self, local: torch.Tensor) -> torch.Tensor:
        """The scales of the moments' blocks, likewise."""
        return super().wrap_scales(local) if self._keeps_shape else self.wrap(local)

    @property
    def _keeps_shape(self) -> bool:
        return self.matrix.low_shape(self.local.shape) == tuple(self.local.shape)

    def wrap_named(self, name: str, local: torch.Tensor) -> torch.Tensor:
        """What is kept as DTensors that every rank has whole; others as of the parameter.

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
