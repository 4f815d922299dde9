"""Muon's step in launches over many matrices, in waves of as many as a workspace has room for.

Of a wave the first launch steps all momenta and leaves the directions in the workspace, others make
their norms, the products of `newton_schulz.iterated`, and the last updates all weights and masters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy
import torch

from megaopt.kernels.calling import Replayed, compiling_together
from megaopt.kernels.chunks.batch import Buffers, Formats, Scalars
from megaopt.kernels.chunks.table import DeviceTable, addresses_of, stream_of
from megaopt.kernels.formats import NONE
from megaopt.kernels.matrix.exchange import NEUTRAL, WHOLLY, Local
from megaopt.kernels.muon.layout import MatrixGroup, waves
from megaopt.kernels.muon.wave import MuonWave
from megaopt.kernels.place import Place
from megaopt.kernels.rules.matrix import SECOND_MOMENT, Work
from megaopt.kernels.step.controls import COUNT, SKIP
from megaopt.kernels.step.launch import TritonPlan

ROOM = 2**29
"""Bytes of the workspace at most, or as many as the largest parameter needs.

A wave is to keep a GPU busy for longer than its 20 launches take: 57 matrices of 768 x 2048, for
which this is enough, have 9 rounds of tiles for 132 processors in each of their Gram products.
"""


def local_launches(
    formats: Formats,
    local: Sequence[Local],
    shapes: Sequence[torch.Size],
    groups: Sequence[int],
    places: Sequence[Place],
    device: torch.device,
) -> MuonLaunches:
    """Makes the launches of matrices that one rank alone has; shapes, places: of its parts."""
    # as `parts_of` makes them, of the tensors that this rank has
    parts = []
    for piece, runs in local:
        row = 0 if piece.rows is WHOLLY else piece.rows.start
        parts.append(MatrixGroup(piece.param, row, [piece.shape], runs))
    return MuonLaunches(formats, parts, shapes, groups, places, device, ROOM)


class MuonLaunches:
    """The launches of a batch; room: of the workspace, in bytes."""

    many_calls = False

    def __init__(
        self,
        formats: Formats,
        parts: Sequence[MatrixGroup],
        shapes: Sequence[torch.Size],
        groups: Sequence[int],
        places: Sequence[Place],
        device: torch.device,
        room: int,
    ) -> None:
        assert formats.matrix is not None
        self._device, self._how = device, formats.matrix.how
        # each wave is planned once, and all use one workspace, one after another
        layouts = waves(self._how, parts, room)
        self._waves = [MuonWave(formats, layout, groups, places, device) for layout in layouts]

        # the formats of the gradients' norm: without moments and master
        measured = Formats(formats.grad, formats.weight, NONE, (), ())
        sizes = [shape.numel() for shape in shapes]
        self._measured = TritonPlan(measured, formats.matrix.rule.apply, sizes, groups, device)

        # fp32 [groups, numbers of a rule]: the scalars, uploaded where they change
        self._rows, self._replayed = DeviceTable(device), Replayed(device)
        self._is_noted = False
        # fp32 [COUNT] and bool [COUNT]
        self._neutral = torch.tensor(NEUTRAL, device=device)
        self._skip = torch.arange(COUNT, device=device) == SKIP

    def accumulate(self, buffers: Buffers, bins: torch.Tensor) -> None:
        """Adds the squares of the whole gradients to the bins of megaopt.kernels.norm."""
        self._measured.look({slot: buffers[slot] for slot in ("grad", "weight")})
        self._measured.accumulate(bins)

    def step(
        self, buffers: Buffers, works: Sequence[Work], scalars: Scalars, controls: Any
    ) -> None:
        """Takes one step of every parameter."""
        if not isinstance(scalars, torch.Tensor):
            # numbers of the host become a tensor, fp32 [groups, numbers of a rule]
            scalars = self._rows.update(numpy.array(scalars, dtype=numpy.float32))

        # uint8, taken anew in each step: the memory is others' between steps
        most = max((wave.layout.used for wave in self._waves), default=0)
        workspace = torch.empty(most, dtype=torch.uint8, device=self._device)
        # of the controls an update is told one: fp32 [groups, COUNT], neutral but for SKIP
        left_out = None if controls is None else torch.where(self._skip, controls, self._neutral)

        # int64 [parameters] for each slot, and for second moments where there are any
        tensors = dict(buffers)
        if self._how.second_moment:
            tensors[SECOND_MOMENT] = [work.kept[SECOND_MOMENT] for work in works]
        addresses = addresses_of(tensors)
        arguments = (workspace, scalars, controls, left_out)
        # the first step: products are noted, and all their kernels compiled at once
        if not self._is_noted:
            with compiling_together(self._device):
                for wave in self._waves:
                    wave.note(workspace)
            self._is_noted = True

        def launches() -> None:
            for wave in self._waves:
                wave.step(addresses, *arguments)

        # a CUDA graph repeats the launches while all tensors lie where they did
        state = [row.tobytes() for row in addresses.values()]
        places = [None if tensor is None else tensor.data_ptr() for tensor in arguments]
        self._replayed((stream_of(self._device), state, places), launches)
