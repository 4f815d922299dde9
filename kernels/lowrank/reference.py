"""The twin of the step of low rank, matrix by matrix in plain torch, on any device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy
import torch

from megaopt.kernels.lowrank.basis import (
    FIRST_PASSES,
    PASSES,
    captured_energy,
    iterated,
    says_something,
    singular,
    sketched,
)
from megaopt.kernels.lowrank.compiled import CompiledStep
from megaopt.kernels.lowrank.formats import apply_formats, direction_formats
from megaopt.kernels.lowrank.operands import IEEE
from megaopt.kernels.lowrank.parts import WHOLE, Parts
from megaopt.kernels.lowrank.products import projected, projected_back
from megaopt.kernels.lowrank.spec import LowRank
from megaopt.kernels.norm.reference import accumulate_reference
from megaopt.kernels.rules.galore import GALORE_APPLY, GALORE_DIRECTION
from megaopt.kernels.step.batch import Buffers, Formats
from megaopt.kernels.step.controls import SKIP
from megaopt.kernels.step.draws import Place, in_order
from megaopt.kernels.step.reference import step_tensor


class LowRankReferencePlan:
    """Steps the matrices of one combination of formats, side and rank.

    Args:
        formats: of every buffer; `low_rank` is set.
        refresh: "subspace" or "svd", how projections are made.
        groups: for each matrix, its row in the scalars that `step` is given.
        places: of each matrix in its parameter, for random bits.
        precision: of the two products, of operands.PRECISIONS.
        compiled: the elementwise parts by torch.compile.
    """

    many_calls = True

    def __init__(
        self,
        formats: Formats,
        refresh: str,
        groups: Sequence[int],
        places: Sequence[Place] | None = None,
        precision: str = IEEE,
        compiled: bool = False,
    ) -> None:
        assert formats.low_rank is not None
        self.formats, self.low_rank = formats, formats.low_rank
        self.by_svd, self.groups = refresh == "svd", groups
        self.places = places or in_order(len(groups))
        self.precision = precision
        self._compiled = CompiledStep() if compiled else None
        self.addresses: dict[str, numpy.ndarray] = {}  # it works on the tensors themselves
        self.stale = True
        self.projections: Sequence[torch.Tensor] = ()
        """Of each matrix, for the coming step."""
        self._buffers: Buffers = {}

    def look(self, buffers: Buffers) -> None:
        """Notes the buffers for the step."""
        self._buffers = buffers

    def accumulate(self, bins: torch.Tensor) -> None:
        """Adds the squares of the whole gradients to the bins of megaopt.kernels.norm."""
        accumulate_reference(self._buffers["grad"], bins)

    def refreshed(
        self, index: int, known: torch.Tensor | None, seed: int, parts: Parts = WHOLE
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A matrix's projection by its gradient, and what part of the gradient that captures.

        Args:
            index: the matrix's place.
            known: its projection so far, None where there was none.
            seed: of the sketch that the first one begins with.
            parts: whoever holds its other rows.
        """
        how = (self.by_svd, seed, parts)
        return refreshed_with_energy(self._grad(index), self.low_rank, known, *how)

    def says(
        self, index: int, parts: Parts = WHOLE, skip: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Whether a matrix's gradient can make a first projection: basis.says_something."""
        return says_something(self._grad(index), parts, skip)

    def ready(self, scalars: Any) -> Any:
        """Nothing: a step of many calls takes memory all the time."""
        return scalars

    def step(
        self, scalars: Sequence[tuple[float, ...]], controls: torch.Tensor | None = None
    ) -> None:
        """One step, by `projections`; arguments as megaopt.kernels.backends.Plan has them."""
        if controls is None or not bool(controls[SKIP]):
            for index, group in enumerate(self.groups):
                if self._buffers["weight"][index].numel():
                    self._step_matrix(index, scalars[group], controls)
        self._buffers = {}  # gradients may go

    def _step_matrix(
        self, index: int, scalars: tuple[float, ...], controls: torch.Tensor | None
    ) -> None:
        projection, side, place = self.projections[index], self.low_rank.side, self.places[index]
        low = projected(self._grad(index), projection, side, self.precision)
        formats = direction_formats(self.formats)
        own = self._tensors(formats, index, grad=low, weight=low)
        step = self._compiled or step_tensor
        low_place = self.low_rank.low_place(place, self._buffers["weight"][index].shape)
        step(own, formats, GALORE_DIRECTION, scalars, controls, low_place)
        back = projected_back(low, projection, side, self.precision)
        formats = apply_formats(self.formats)
        own = self._tensors(formats, index, grad=back)
        step(own, formats, GALORE_APPLY, scalars, None, place)

    def _tensors(
        self, formats: Formats, index: int, **others: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """By slot of an elementwise step; others: in the place of the matrix's own."""
        own = {slot: each[index] for slot, each in self._buffers.items()}
        return {slot: {**own, **others}[slot] for slot in formats.slots}

    def _grad(self, index: int) -> torch.Tensor:
        return self.formats.grad.decode_reference(self._buffers["grad"][index])

    def cast(self) -> None:
        """Nothing: these weights are stored with the step."""

    def move_scales(self) -> None:
        """Nothing: these weights have no scales."""


def refreshed_with_energy(
    grad: torch.Tensor,
    low_rank: LowRank,
    known: torch.Tensor | None,
    by_svd: bool,
    seed: int,
    parts: Parts = WHOLE,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A new projection of a gradient, and what part of the gradient's square it keeps."""
    projection = refreshed(grad, low_rank, known, by_svd, seed, parts)
    return projection, captured_energy(grad, low_rank, projection, parts)


def refreshed(
    grad: torch.Tensor,
    low_rank: LowRank,
    known: torch.Tensor | None,
    by_svd: bool,
    seed: int,
    parts: Parts = WHOLE,
) -> torch.Tensor:
    """A new projection of a gradient [m, n]; fp32 or fp64, as the gradient is."""
    passes = PASSES
    if known is None:
        passes = FIRST_PASSES
        known = sketched(low_rank, grad.shape, seed, grad.device).to(grad.dtype)
    if by_svd:
        return singular(grad, low_rank, known)
    return iterated(grad, low_rank, known, passes, parts)
