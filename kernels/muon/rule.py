"""Muon's rule: a direction becomes an update."""

from __future__ import annotations

from dataclasses import replace

import torch

from megaopt.kernels.muon.newton_schulz import orthogonal
from megaopt.kernels.muon.normuon import normalized
from megaopt.kernels.muon.orthogonal import Orthogonal
from megaopt.kernels.rules.matrix import (
    SAME,
    SECOND_MOMENT,
    WHOLE,
    MatrixRule,
    Transform,
    Work,
    joined,
    split,
)
from megaopt.kernels.rules.muon import MUON_APPLY, MUON_DIRECTION, PEER_APPLY, PEER_DIRECTION


def _after(direction: torch.Tensor, work: Work) -> torch.Tensor:
    """Returns the update of a parameter, fp32."""
    how: Orthogonal = work.how
    # rows: those of the parameter's matrices so far, as second moments lie
    updates, rows, cuts = [], 0, how.cuts(direction.shape)
    for piece in split(cuts, direction):
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
    state_shapes=Orthogonal.state_shapes,
    meets=WHOLE,
    cut=Orthogonal.cuts,
)
MUON_PEER = replace(MUON, name="muon_peer", inner=PEER_DIRECTION, apply=PEER_APPLY)
"""MUON with the row of contracts "torch" and "eo"."""
