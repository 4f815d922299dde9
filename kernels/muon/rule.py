"""Muon's rule: a direction becomes an update, of a matrix alone and of one that ranks share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from megaopt.kernels.formats import WEIGHTS
from megaopt.kernels.matrix.exchange import MatrixPart, ParameterMatrix, UpdateMaker
from megaopt.kernels.muon import newton_schulz
from megaopt.kernels.muon.newton_schulz import (
    Immediate,
    Matrices,
    MatrixScales,
    Workspace,
    orthogonal,
    room_of,
    scales_reference,
)
from megaopt.kernels.muon.normuon import normalized
from megaopt.kernels.muon.orthogonal import FP16, Orthogonal
from megaopt.kernels.norm.bins import ROWS
from megaopt.kernels.norm.reference import accumulate_reference, total_reference
from megaopt.kernels.rules.matrix import (
    SAME,
    SECOND_MOMENT,
    WHOLE,
    Matrix,
    MatrixRule,
    Shape,
    Transform,
    Work,
    joined,
)
from megaopt.kernels.rules.muon import MUON_APPLY, MUON_DIRECTION, PEER_APPLY, PEER_DIRECTION


def _after(direction: torch.Tensor, work: Work) -> torch.Tensor:
    """Returns the update of a parameter, fp32."""
    how: Orthogonal = work.how
    # rows: those of the parameter's matrices so far, as second moments lie
    updates, rows, cuts = [], 0, how.cuts(direction.shape)
    for piece in (cut.of(direction) for cut in cuts):
        update = orthogonal(piece.float(), how)
        if how.second_moment:
            # a view, which is stepped in place
            second = work.kept[SECOND_MOMENT][rows : rows + len(piece)]
            update = normalized(update, second, how.beta2, how.ratio(piece.shape))
        updates.append(update.float())
        rows += len(piece)
    # fp32, each matrix's rows back where they were in the parameter
    return joined(cuts, updates, direction.shape)


MUON = MatrixRule(
    "muon",
    SAME,
    MUON_DIRECTION,
    Transform(_after),
    MUON_APPLY,
    kept=Orthogonal.kept,
    meets=WHOLE,
    cut=Orthogonal.cuts,
)
MUON_PEER = replace(MUON, name="muon_peer", inner=PEER_DIRECTION, apply=PEER_APPLY)
"""MUON with the row of contracts "torch" and "eo"."""


# --- among ranks


class MuonMaking(UpdateMaker):
    """The way from directions to updates: MUON's, alone and with other ranks, in plain torch."""

    def __init__(self, matrix: Matrix) -> None:
        super().__init__(matrix)
        self.how: Orthogonal = matrix.how
        # ranks send 16 bits a number, both ways
        self.sent = WEIGHTS[self.how.dtype]
        self.is_scaled = self.how.precision == FP16
        """Directions are fp32 first, and cast when their norms are known."""
        self.direction = WEIGHTS["float32"] if self.is_scaled else self.sent
        self.shares_work = True

    def sums(self, pieces: Sequence[ParameterMatrix], device: torch.device) -> torch.Tensor:
        """Makes bins of the norm of each matrix: a bank."""
        return torch.zeros((len(pieces), ROWS, 2), dtype=torch.int64, device=device)

    def measure(
        self, directions: Matrices, parts: Sequence[MatrixPart], sums: torch.Tensor
    ) -> None:
        """Adds the squares of directions to the bins."""
        for part, direction in zip(parts, directions, strict=True):
            # parts of one matrix add to the same bins: whole numbers, in any order
            accumulate_reference([direction], sums[part.piece][None])

    def notes(self, sums: torch.Tensor, pieces: Sequence[ParameterMatrix]) -> MatrixScales:
        """Makes the factors of the matrices."""
        # with second moments the ratio comes behind these
        ratios = [
            1.0 if self.how.second_moment else self.how.ratio(piece.shape) for piece in pieces
        ]
        # fp32 (1,) of each matrix, alike on all ranks
        norms = [total_reference(bins[None])[0].view(1) for bins in sums]
        pairs = zip(norms, ratios, strict=True)
        scales = [
            scales_reference(norm, self.how.eps, ratio, self.is_scaled) for norm, ratio in pairs
        ]
        # of each factor one tensor, fp32 [matrices]
        return MatrixScales(*map(torch.cat, zip(*scales, strict=True)))

    def send(
        self, directions: Matrices, parts: Sequence[MatrixPart], notes: MatrixScales, out: Matrices
    ) -> None:
        """Casts directions, times their matrices' powers of two."""
        # bf16 directions were made in the place that they are sent from
        if self.is_scaled:
            powers = notes.power.unbind()
            for part, direction, target in zip(parts, directions, out, strict=True):
                target.copy_((direction * powers[part.piece]).to(target.dtype))

    def make(
        self,
        wholes: Matrices,
        pieces: Sequence[ParameterMatrix],
        indices: Sequence[int],
        notes: MatrixScales,
        states: Any,
    ) -> Matrices:
        """Iterates all matrices of one form together, and then steps second moments."""
        # indices: of `wholes` among the bucket's matrices, of all of which the notes have factors
        updates_by_index: dict[int, torch.Tensor] = {}
        for is_gram in (False, True):
            chosen = [
                i for i, whole in enumerate(wholes) if self.how.is_gram(whole.shape) is is_gram
            ]
            if chosen:
                # this form's factors, fp32 [chosen]
                places = torch.tensor([indices[i] for i in chosen], device=wholes[0].device)
                scales = MatrixScales(*(factors[places] for factors in notes))
                room = room_of([wholes[i] for i in chosen], is_gram)
                matrices = newton_schulz.iterated(room, scales, self.how, is_gram, Immediate())
                updates_by_index.update(zip(chosen, matrices, strict=True))

        # back in the order of `wholes`
        updates = [updates_by_index[i] for i in range(len(wholes))]
        return self.finish(updates, states)

    def finish(self, updates: Matrices, states: Sequence[dict[str, Any]]) -> Matrices:
        """Steps second moments, if there are any."""
        if not self.how.second_moment:
            return updates
        normalized_updates = []
        for update, state in zip(updates, states, strict=True):
            # the second moments of the matrix, fp32 [rows], are stepped in place
            numbers = (state[SECOND_MOMENT], self.how.beta2, self.how.ratio(update.shape))
            normalized_updates.append(normalized(update, *numbers))
        return normalized_updates

    def room(self, shape: Shape, device: torch.device) -> Workspace:
        """Makes the memory of the iteration of a matrix that ranks make together."""
        # into which the owner's direction comes
        first = torch.empty(tuple(shape), dtype=self.how.dtype, device=device)
        return room_of([first], self.how.is_gram(shape))

    def together(self, room: Workspace, notes: Any, make: Any) -> torch.Tensor:
        """Returns the update of one matrix, by the products of `make`.

        notes: None where this rank failed: then it makes no products, and goes on with the others.
        """
        # anything stands for factors: a failed rank's products are never made
        scales: Any = notes or MatrixScales(*[make] * len(MatrixScales._fields))
        is_gram = self.how.is_gram(room.first[0].shape)
        return newton_schulz.iterated(room, scales, self.how, is_gram, make)[0]
