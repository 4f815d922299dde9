"""The question of torch.distributed.checkpoint which states an optimizer would have.

It gives every parameter a gradient of 0, sets lr to 0, and steps; then it takes the state dict, and
loads into the states.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from megaopt.kernels.shards import PLAIN, local_of
from megaopt.params import ParamView
from megaopt.state.owned import Group, Owned
from megaopt.state.watch import grads_of

if TYPE_CHECKING:
    from megaopt.step.collect import Check
    from megaopt.step.stepper import Stepper

ASKS = "torch.distributed.checkpoint.state_dict"
"""The module of get_optimizer_state_dict, which says nowhere else that it asks."""


def is_asked_by_torch() -> bool:
    """Whether get_optimizer_state_dict, or the like, is among the callers."""
    # up the stack, as there is no flag to read
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") != ASKS:
        frame = frame.f_back
    return frame is not None


@functools.cache
def loads_frozen() -> bool:
    """Whether set_optimizer_state_dict of this torch loads the state of a frozen parameter.

    Until 2.13 it does not, and its full_state_dict puts the optimizer's own in the place.
    """
    from torch.distributed.checkpoint import state_dict  # whoever asks has imported it

    # a small trial: a frozen weight with a state, saved and loaded
    model = torch.nn.Linear(1, 1, bias=False, device="cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.state[model.weight]["momentum_buffer"] = torch.ones((1, 1), device="cpu")
    model.requires_grad_(False)
    saved = state_dict.get_optimizer_state_dict(model, optimizer)
    state_dict.set_optimizer_state_dict(model, optimizer, saved)
    return "momentum_buffer" in optimizer.state.get(model.weight, {})


def answers_torch(
    stepper: Stepper, groups: Sequence[Group], state: Any, decoupled: bool, check: Check | None
) -> bool:
    """Makes the states, and steps nothing, where an optimizer's first step is such a question.

    It is on all ranks or on none: with DTensors ranks that do not know of one another have to
    agree. All of them meet at a first step with lr=0, whatever is in the state of one. Arguments
    as for Stepper.step. Returns whether it was the question.
    """
    owned = stepper.owned(groups)
    # lr says on all ranks alike whether they go on to the exchange
    lrs: list[Any] = [group.get("lr") for group in owned.groups]
    for lr in lrs:
        # the step refuses by name what is no number
        is_tensor = isinstance(lr, torch.Tensor) and lr.numel() == 1
        if not (isinstance(lr, (int, float)) or is_tensor) or float(lr):
            return False
    if not any(view.is_sharded for view in owned.views):
        is_probe = is_asked_by_torch() and _is_asked(owned, state, decoupled)
    else:
        # 0 on each rank that sees the question; the largest of all, mesh after mesh
        sees = _is_asked(owned, state, decoupled)
        flag = torch.tensor([not sees], dtype=torch.int64, device="cpu")
        for mesh in _meshes(owned.views):
            flag = _largest(flag, mesh)
        is_probe = not bool(flag)
    if not is_probe:
        return False

    # what comes between it and the first step may differ
    stepper.ties.has_agreed = False
    stepper.was_stepped = stepper.options.MATRIX is None
    # gradients are elsewhere than torch put them: all parameters' states are made
    if decoupled:
        stepper.make_states(groups, state, range(len(owned.params)), check)
    else:
        stepper.gather(groups, state, decoupled, check)
    return True


def _is_asked(owned: Owned, state: Mapping[Any, Any], decoupled: bool) -> bool:
    """Whether there is no state, and p.grad is 0 wherever there could be a gradient.

    torch.distributed.checkpoint gives p.grad, whatever the optimizer reads.
    """
    # the question gives each parameter that requires one a gradient
    grads = [param.grad for param in owned.params if param.requires_grad]
    if any(state.values()) or not grads or any(grad is None for grad in grads):
        return False
    decoupled_grads = grads_of(owned.params, decoupled=True) if decoupled else []
    if not all(grad is None for grad in decoupled_grads):
        return False
    # each can be read, and this rank's part of it is 0
    shards = map(local_of, grads)
    return all(
        type(local) in PLAIN and local.layout == torch.strided and not bool(local.any())
        for local in shards
    )


def on_any_rank(flags: Sequence[bool], views: Sequence[ParamView]) -> list[bool]:
    """Returns for each parameter whether its flag is set on any rank of its mesh; waits for it."""
    numbers = torch.tensor(flags, dtype=torch.int64, device="cpu")
    for mesh in _meshes(views):
        # one exchange a mesh, of the flags of its own parameters
        places = [i for i, v in enumerate(views) if v.is_sharded and v.param.device_mesh == mesh]
        numbers[places] = _largest(numbers[places], mesh).cpu()
    return [bool(flag) for flag in numbers.tolist()]


def _meshes(views: Sequence[ParamView]) -> list[Any]:
    return list(dict.fromkeys(view.param.device_mesh for view in views if view.is_sharded))


def _largest(numbers: torch.Tensor, mesh: Any) -> torch.Tensor:
    """The largest numbers among all ranks of a mesh, on its device."""
    # one all-reduce for each dimension, on the device that the mesh's backend serves
    from megaopt.step.ranks.peers import reduced  # ranks that have DTensors alone

    groups = [mesh.get_group(dim) for dim in range(mesh.ndim) if mesh.size(dim) > 1]
    return reduced(numbers.to(mesh.device_type), groups)
