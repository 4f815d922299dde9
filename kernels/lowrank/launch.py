"""The step of low rank in launches over many matrices: project, Adam's step, project back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import numpy
import torch

from megaopt.kernels.formats import NONE
from megaopt.kernels.lowrank.basis import says_something
from megaopt.kernels.lowrank.how import How
from megaopt.kernels.lowrank.operands import IEEE
from megaopt.kernels.lowrank.parts import WHOLE, Parts
from megaopt.kernels.lowrank.reference import refreshed_with_energy
from megaopt.kernels.lowrank.tiles import Tiles, tiles_of
from megaopt.kernels.lowrank.wave import Wave
from megaopt.kernels.rules.galore import GALORE_APPLY
from megaopt.kernels.step.batch import Buffers, Formats
from megaopt.kernels.step.draws import Place, in_order
from megaopt.kernels.step.launch import TritonPlan

ROOM = 2**25
"""Bytes of a workspace, or, where that is more, PART of the weights' bytes."""
PART = 0.009


class LaunchedPlan:
    """Steps the matrices of one combination of formats, side and rank.

    Args:
        formats: of every buffer; `low_rank` is set, and no master has a scale.
        refresh: "subspace" or "svd", how projections are made.
        shapes: of the matrices.
        groups: for each matrix, its row in the scalars that `step` is given.
        device: a CUDA device, or the CPU under Triton's interpreter.
        places: of each matrix in its parameter, for random bits.
        grouped: gradients are projected by one launch, not by torch.
        precision: of the two products, of operands.PRECISIONS.
        tiles: for tests; otherwise those of the formats and the precision.
    """

    many_calls = False

    def __init__(
        self,
        formats: Formats,
        refresh: str,
        shapes: Sequence[torch.Size],
        groups: Sequence[int],
        device: torch.device,
        places: Sequence[Place] | None = None,
        *,
        grouped: bool = False,
        precision: str = IEEE,
        tiles: Tiles | None = None,
    ) -> None:
        assert formats.low_rank is not None
        self.formats, self.low_rank = formats, formats.low_rank
        self.by_svd = refresh == "svd"
        self.addresses: dict[str, numpy.ndarray] = {}  # `look` is told the tensors
        self.stale = True
        self.projections: Sequence[torch.Tensor] = ()
        """Of each matrix, for the coming step."""
        self._buffers: Buffers = {}
        places = places or in_order(len(shapes))
        how = How(formats, grouped, precision, tiles or tiles_of(formats, precision))
        room = max(ROOM, PART * sum(_bytes(shape, formats) for shape in shapes))
        self._waves = []
        for own in _waves(how, shapes, room):
            of_matrices: Any = ([each[i] for i in own] for each in (shapes, groups, places))
            self._waves.append((own, Wave(how, device, *of_matrices)))
        sizes = [shape.numel() for shape in shapes]
        measured = Formats(formats.grad, formats.weight, NONE, (), ())
        self._measured = TritonPlan(measured, GALORE_APPLY, sizes, groups, device)

    def look(self, buffers: Buffers) -> None:
        """Notes the buffers for the step."""
        self._buffers = buffers
        self._measured.look({slot: buffers[slot] for slot in ("grad", "weight")})

    def accumulate(self, bins: torch.Tensor) -> None:
        """Adds the squares of the whole gradients to the bins of megaopt.kernels.norm."""
        self._measured.accumulate(bins)

    def refreshed(
        self, index: int, known: torch.Tensor | None, seed: int, parts: Parts = WHOLE
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As LowRankReferencePlan.refreshed."""
        how = (self.by_svd, seed, parts)
        return refreshed_with_energy(self._grad(index), self.low_rank, known, *how)

    def says(
        self, index: int, parts: Parts = WHOLE, skip: torch.Tensor | None = None
    ) -> torch.Tensor:
        """As LowRankReferencePlan.says."""
        return says_something(self._grad(index), parts, skip)

    def _grad(self, index: int) -> torch.Tensor:
        return self.formats.grad.decode_reference(self._buffers["grad"][index])

    def ready(self, scalars: Any) -> Any:
        """Nothing: workspaces are taken between the launches."""
        return scalars

    def step(
        self,
        scalars: Sequence[tuple[float, ...]] | torch.Tensor,
        controls: torch.Tensor | None = None,
    ) -> None:
        """One step, by `projections`; arguments as megaopt.kernels.backends.Plan has them."""
        for own, wave in self._waves:
            buffers = {slot: [each[i] for i in own] for slot, each in self._buffers.items()}
            wave.step(buffers, [self.projections[i] for i in own], scalars, controls)
        self._buffers = {}  # gradients may go

    def cast(self) -> None:
        """Nothing: these weights are stored with the step."""

    def move_scales(self) -> None:
        """Nothing: these weights have no scales."""


def _bytes(shape: torch.Size, formats: Formats) -> int:
    return shape.numel() * formats.dtype("weight").itemsize


def _waves(how: How, shapes: Sequence[torch.Size], room: float) -> Iterator[list[int]]:
    """The places of the matrices that are stepped together, as many as there is room for."""

    def kind(index: int) -> Any:
        return how.slabs(shapes[index]), how.even(shapes[index])

    there = [index for index, shape in enumerate(shapes) if shape.numel()]  # a rank may have none
    for _, alike in groupby(sorted(there, key=kind), kind):
        own: list[int] = []
        used = 0
        for index in alike:
            needed = how.workspace_bytes(shapes[index])
            if own and used + needed > room:
                yield own
                own, used = [], 0
            own.append(index)
            used += needed
        yield own
