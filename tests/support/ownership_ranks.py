"""Writes to DTensor weights with masters, as a rank makes them."""

import torch
from runs import FP32
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from megaopt import FusedAdam

WHOLE = torch.arange(10.0).reshape(5, 2) / 8


def write(param, how):
    """In place, in two ways; or another shard of other or the same values, as FSDP2 puts it."""
    with torch.no_grad():
        if how in ("dtensor", "to_local"):
            (param if how == "dtensor" else param.to_local()).fill_(0.75)
            return
        kept = param._local_tensor.clone()
        param._local_tensor = torch.full_like(kept, 0.75) if how == "shard" else kept


def written(how, on_external_write="refresh"):
    """This rank's master after a write and a refresh by the step; or the step's error."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    weight = distribute_tensor(WHOLE.bfloat16(), mesh, [Shard(0)])
    param = torch.nn.Parameter(weight)
    options = {"dtype": FP32, "on_external_write": on_external_write}
    optimizer = FusedAdam([param], lr=0.0, **options)
    for step in range(2):
        param.grad = distribute_tensor(torch.ones(5, 2).bfloat16(), mesh, [Shard(0)])
        if step:
            write(param, how)
        try:
            optimizer.step()
        except RuntimeError as error:
            return str(error)
    return optimizer.state[param]["master_param"].to_local().clone()
