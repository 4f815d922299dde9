"""The plan of parameters that Muon steps.

Launches are imported where a step takes them: without a GPU nobody needs what they import.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from megaopt.kernels.backends import BACKENDS
from megaopt.kernels.chunks.batch import Formats
from megaopt.kernels.matrix.plan import LaunchedStep, MatrixPlan
from megaopt.kernels.muon.orthogonal import OWN
from megaopt.kernels.muon.rule import MuonMaking
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
    # launches: what steps whole batches, if anything does; making: the same among ranks
    launches: Any = None
    making: Any = MuonMaking(formats.matrix)
    if how.contract != OWN:
        # other libraries' steps are torch's operations on every backend
        from megaopt.kernels.muon.peers import PeerMaking, PeerSteps

        launches, making = PeerSteps(formats, groups), PeerMaking(formats.matrix)
    elif is_launched:
        # all matrices in waves, on a GPU or interpreted
        from megaopt.kernels.muon.launch import ROOM, MuonLaunches, local_launches
        from megaopt.kernels.muon.layout import parts_of
        from megaopt.kernels.muon.ranks import MuonBucket

        parts = parts_of(formats, shapes)
        if parts is not None:
            tables = (parts, shapes, groups, places, device, room or ROOM)
            launches = MuonLaunches(formats, *tables)
            if not formats.scaled:
                # ranks that share matrices launch buckets, and waves of those one rank alone has
                making.launches, making.alone = MuonBucket, partial(local_launches, formats)

    # without launches of whole batches matrices go one by one, by torch and this step
    step = LaunchedStep() if is_launched else step_tensor
    return MatrixPlan(formats, groups, places, step, launches, making)
