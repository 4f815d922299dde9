"""The plan of parameters that Muon steps.

Launches are imported where a step takes them, and what ranks need where they share matrices.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from megaopt.kernels.backends import BACKENDS
from megaopt.kernels.chunks.batch import Formats
from megaopt.kernels.matrix.plan import MatrixPlan, Step
from megaopt.kernels.muon.orthogonal import OWN
from megaopt.kernels.place import Place, in_order
from megaopt.kernels.step.reference import step_tensor


def muon_plan(
    backend: str,
    formats: Formats,
    shapes: Sequence[torch.Size],
    groups: Sequence[int],
    places: Sequence[Place] | None,
    device: torch.device,
    room: int | None = None,
) -> MatrixPlan:
    """Makes the plan of parameters that MUON steps: in launches where the backend is "triton".

    Contracts "torch" and "eo" are torch's operations on every backend. Where several matrices share
    a scale, and their rows do not follow each other or their forms differ, all are stepped one by
    one.

    Arguments as Options.matrix_plan has them. room: of the workspace, in bytes; None:
    launch.ROOM.
    """
    assert formats.matrix is not None
    how, places = formats.matrix.how, places or in_order(len(shapes))
    is_launched = backend == BACKENDS["triton"].name
    # what steps whole batches, if anything does
    launches: Any = None
    if how.contract != OWN:
        # other libraries' steps are torch's operations on every backend
        from megaopt.kernels.muon.peers import PeerSteps

        launches = PeerSteps(formats, groups)
    elif is_launched:
        # all matrices in waves, on a GPU or interpreted
        from megaopt.kernels.muon.launch import ROOM, MuonLaunches
        from megaopt.kernels.muon.layout import parts_of

        parts = parts_of(formats, shapes)
        if parts is not None:
            tables = (parts, shapes, groups, places, device, room or ROOM)
            launches = MuonLaunches(formats, *tables)

    # without launches of whole batches matrices go one by one, by torch and this step
    step: Step = step_tensor
    if is_launched:
        from megaopt.kernels.matrix.launch import LaunchedStep

        step = LaunchedStep()
    making = partial(_making, formats, is_launched and launches is not None)
    return MatrixPlan(formats, groups, places, step, launches, making)


def _making(formats: Formats, is_launched: bool) -> Any:
    """Makes the UpdateMaker of matrices that ranks share."""
    assert formats.matrix is not None
    if formats.matrix.how.contract != OWN:
        from megaopt.kernels.muon.peers import PeerMaking

        return PeerMaking(formats.matrix)
    from megaopt.kernels.muon.ranks import MuonBucket, MuonMaking

    making = MuonMaking(formats.matrix)
    if is_launched and not formats.scaled:
        # ranks that share matrices launch buckets, and waves of those one rank alone has
        from megaopt.kernels.muon.launch import local_launches

        making.launches, making.alone = MuonBucket, partial(local_launches, formats)
    return making
