"""Plain tensors that are parts of matrices, as Megatron's tensor parallelism cuts them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch.distributed as dist

from megaopt.kernels.place import Place, place_of_box
from megaopt.kernels.rules.matrix import WHOLE, Matrix
from megaopt.options.options import Options
from megaopt.params.view import MatrixView

SPLIT = "megaopt_split"
"""The attribute of a parameter, (process group, dimension): each rank of the group, in its order,
has an equal part of that dimension. Only rules that bring whole matrices together read it."""


@cache
def _mesh_of(group: Any, device: str) -> Any:
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh.from_group(group, device)


class SplitMatrixView(MatrixView):
    """A plain tensor that is this rank's part of a matrix; its state is, too."""

    def __init__(self, param: Any, matrix: Matrix) -> None:
        super().__init__(param, matrix)
        self._group, self._dim = getattr(param, SPLIT)
        self._ranks = dist.get_world_size(self._group)

    @property
    def split(self) -> tuple[Any, tuple[int, ...]] | None:  # type: ignore[override]  # computed
        """The mesh of the group's ranks, and its only dimension."""
        return _mesh_of(self._group, self.param.device.type), (0,)

    @property
    def sharding(self) -> tuple[object, ...]:
        """The dimension that is cut."""
        return SPLIT, self._dim

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """The matrix's."""
        shape = list(self.param.shape)
        shape[self._dim] *= self._ranks
        return tuple(shape)

    def boxes(self, coordinates: Sequence[tuple[int, ...]]) -> list[tuple[tuple[int, int], ...]]:
        """The parts at places of the mesh: the first index and the one behind the last."""
        shape, dim = self.param.shape, self._dim
        found = []
        for (rank,) in coordinates:
            begins = [rank * size if i == dim else 0 for i, size in enumerate(shape)]
            found.append(tuple((a, a + n) for a, n in zip(begins, shape, strict=True)))
        return found

    @property
    def kept(self) -> dict[str, tuple[int, ...]]:
        """What the rule keeps, of the whole matrix."""
        return self.matrix.kept(self.whole_shape)

    @property
    def first_element(self) -> int:
        """The index of the part's first element in the matrix."""
        inner = self.param.shape[self._dim :].numel()
        rank: int = dist.get_rank(self._group)
        return rank * inner

    def place(self, number: int) -> Place:
        """The place of the part's elements in the matrix."""
        found = place_of_box(number, self.first_element, self.param.shape, self.whole_shape)
        assert found is not None
        return found

    def _check_kind(
        self, where: str, options: Options, moments: tuple[str, ...], masters: bool
    ) -> None:
        super()._check_kind(where, options, moments, masters)
        if self.matrix.rule.meets != WHOLE:
            raise ValueError(
                f"{where}: {SPLIT} must be left out with {self.matrix.rule.name}, which brings no "
                "whole matrices together, got one"
            )
        for name in moments:
            form, columns = options.moment_format(name), self.param.shape[1:].numel()
            if form.scaled or (form.block and self.keeps_blocks(form) and columns % form.block):
                raise ValueError(
                    f"{where}: {name}_dtype must have no scales of whole tensors, and whole blocks "
                    f"in a part of a matrix of shape {tuple(self.param.shape)}, got {form.name!r}"
                )
