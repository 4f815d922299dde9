"""GaLore's step in launches over many matrices: project, Adam's step, project back and update."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import torch

from megaopt.kernels.backends import BACKENDS
from megaopt.kernels.calling import Replayed
from megaopt.kernels.chunks.batch import Buffers, Formats, Scalars
from megaopt.kernels.chunks.table import addresses_of, stream_of
from megaopt.kernels.formats import NONE
from megaopt.kernels.galore.compiled import why_not_compiled
from megaopt.kernels.galore.rule import LowRank
from megaopt.kernels.galore.tiles import ProjectionTiles, tiles_of
from megaopt.kernels.galore.wave import BY_SHAPE, How, ProjectionWave
from megaopt.kernels.matrix.plan import MatrixPlan
from megaopt.kernels.place import Place, in_order
from megaopt.kernels.rules.galore import GALORE_APPLY
from megaopt.kernels.rules.matrix import PROJECTION, Work
from megaopt.kernels.step.launch import TritonPlan

LAUNCHED = ("hybrid", "grouped", "fused")
"""Kernels that are Triton's."""
AUTO = {"ieee": "hybrid", "tf32": BY_SHAPE, "bf16": BY_SHAPE}
"""The kernel that "auto" takes on a GPU for each precision.

One H200, ms, torch's projection and Triton's: bf16, 8 matrices of 4096 x 11008 on the left at rank
128 0.270 and 0.214, at 512 0.676 and 0.574; 8 of 4096 x 4096 on the right at 128 0.141 and 0.090.
"""
ROOM = 2**25
"""Bytes of a workspace, or, where that is more, PART of the weights' bytes."""
PART = 0.009


def why_not_kernel(kernel: str, device: torch.device) -> str | None:
    """Returns the reason why a kernel does not step matrices on a device; None where it does."""
    if kernel == "compiled":
        return why_not_compiled(device)
    return BACKENDS["triton"].why_not(device) if kernel in LAUNCHED else None


def launched_plan(
    formats: Formats,
    shapes: Sequence[torch.Size],
    groups: Sequence[int],
    device: torch.device,
    places: Sequence[Place] | None = None,
    kernel: str = "hybrid",
    tiles: ProjectionTiles | None = None,
) -> MatrixPlan:
    """Makes the plan of launches over many matrices, of GALORE's formats, masters without scales.

    kernel: "hybrid" has torch project gradients, with precision "ieee"; "grouped" a launch; "fused"
    the same that steps the moments, where `is_fused`; BY_SHAPE. tiles: for tests.
    """
    assert formats.matrix is not None
    low_rank: LowRank = formats.matrix.how
    how = How(formats, low_rank, kernel, tiles or tiles_of(low_rank))
    # by default every matrix is a whole parameter of its own
    places = places or in_order(len(shapes))
    launches = GaLoreLaunches(how, device, shapes, groups, places)
    return MatrixPlan(formats, groups, places, launches=launches)


class GaLoreLaunches:
    """The launches of a batch, in waves of as many matrices as a small workspace has room for.

    For each matrix `groups` is its row in the scalars that `step` is given, and `places` where it
    lies in its parameter, for random bits.
    """

    many_calls = False

    def __init__(
        self,
        how: How,
        device: torch.device,
        shapes: Sequence[torch.Size],
        groups: Sequence[int],
        places: Sequence[Place],
    ) -> None:
        formats, sizes = how.formats, [shape.numel() for shape in shapes]
        # bytes of the workspace that a wave may take
        room = max(ROOM, PART * sum(sizes) * formats.dtype("weight").itemsize)
        self._waves = []
        # a wave is some of the batch's matrices, which are launched over together
        for indices in waves(how, shapes, room):
            of_matrices: Any = (
                [sequence[i] for i in indices] for sequence in (shapes, groups, places)
            )
            self._waves.append((indices, ProjectionWave(how, device, *of_matrices)))

        # a plan of the whole gradients, for their norm alone
        measured = Formats(formats.grad, formats.weight, NONE, (), ())
        self._measured = TritonPlan(measured, GALORE_APPLY, sizes, groups, device)
        self._device, self._replayed = device, Replayed(device)
        # without products by torch a step is the same launches each time
        self._by_launches = all(wave.how.grouped for _, wave in self._waves)
        self._workspace_bytes = max((wave.workspace_bytes for _, wave in self._waves), default=0)

    def accumulate(self, buffers: Buffers, bins: torch.Tensor) -> None:
        """Adds the squares of the whole gradients to the bins of megaopt.kernels.norm."""
        self._measured.look({slot: buffers[slot] for slot in ("grad", "weight")})
        self._measured.accumulate(bins)

    def step(
        self, buffers: Buffers, works: Sequence[Work], scalars: Scalars, controls: Any
    ) -> None:
        """Takes one step of every matrix, by its projection."""
        scalars = self._measured.on_device(scalars)
        # kernels take projections without gaps: others are copied
        state_projections = [work.kept[PROJECTION] for work in works]
        projections = [projection.contiguous() for projection in state_projections]
        # uint8, taken anew in each step; waves use it one after another, on one stream
        workspace = torch.empty(self._workspace_bytes, dtype=torch.uint8, device=self._device)
        # int64 [matrices] for each slot
        addresses = addresses_of({**buffers, PROJECTION: projections})
        numbers = (scalars, controls)

        def launches() -> None:
            # a wave is given the rows of its own matrices
            for places, wave in self._waves:
                rows = {slot: row[places] for slot, row in addresses.items()}
                grads = [buffers["grad"][place] for place in places]
                wave.step(rows, grads, [projections[i] for i in places], workspace, *numbers)

        # torch's products, and copies of projections, take other memory in each step
        if not self._by_launches or any(map(operator.is_not, projections, state_projections)):
            return launches()
        # the graph is replayed while all addresses and the stream stay
        state: list[Any] = [row.tobytes() for row in addresses.values()]
        state += [None if tensor is None else tensor.data_ptr() for tensor in (workspace, *numbers)]
        self._replayed((stream_of(self._device), state), launches)


def waves(how: How, shapes: Sequence[torch.Size], room: float) -> Iterator[list[int]]:
    """Returns the places of matrices that are stepped together, as many as there is room for."""

    # slabs and evenness are constants of a kernel: a wave has matrices of one kind
    def kind(index: int) -> Any:
        return how.slabs(shapes[index]), how.even(shapes[index])

    indices = [index for index, shape in enumerate(shapes) if shape.numel()]  # a rank may have none
    for _, alike in groupby(sorted(indices, key=kind), kind):
        wave: list[int] = []
        used = 0
        for index in alike:
            # a matrix too large for the room has a wave of its own
            needed = how.workspace_bytes(shapes[index])
            if wave and used + needed > room:
                yield wave
                wave, used = [], 0
            wave.append(index)
            used += needed
        yield wave
