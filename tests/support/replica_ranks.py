"""What ranks do in the tests of FusedMuon's replicas: plain parameters that all of them have."""

import torch.distributed as dist
from fsdp2_ranks import Bare, snapshot, train
from muon_ranks import groups_of
from runs import FP32, on_cpu
from torch.distributed.device_mesh import init_device_mesh

from megaopt import FusedMuon

SHAPES = [(24, 10), (7, 33), (9,), (1, 40), (33, 20), (20, 33), (5, 6, 7), (4, 3, 2, 2)]
"""Tall, wide, a vector, one of one row, two of the same products, experts, a convolution."""


def ranks_as(kind):
    """All ranks, as a process group or as a mesh of one dimension or two."""
    world = dist.get_world_size()
    if kind == "group":
        return dist.group.WORLD
    sizes = (world,) if kind == "mesh" else (2, world // 2)
    names = ("a", "b")[: len(sizes)]
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def made(options, shapes=SHAPES, kind="group", split=False, alone=False, device="cpu"):
    """A model and its optimizer, of which all ranks have all; alone: they divide no work."""
    options = dict(options)
    model = Bare(shapes, options.pop("weights", FP32)).to(device)
    if dist.is_initialized() and not alone:
        options["replicas"] = ranks_as(kind)
    return model, FusedMuon(groups_of(list(model.parameters()), split), **options)


def trained(options, steps, clip_norm=None, **named):
    """What an optimizer has after steps."""
    model, optimizer = made(options, **named)
    train(model, optimizer, steps, clip_norm=clip_norm)
    return on_cpu(snapshot(optimizer))
