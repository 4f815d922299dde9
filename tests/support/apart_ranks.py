"""What ranks do in the tests of settings and parameters that are not the same on all ranks."""

import contextlib

import torch
import torch.distributed as dist
from fsdp2_ranks import Bare, give, gradients, mesh_of, raised_by, sharded, snapshot, train
from torch.distributed.tensor import Shard, distribute_tensor

import megaopt

SHAPES = [(24, 10), (7, 9), (9,), (6, 30)]


def built(kind, options, replicas=1, shapes=SHAPES):
    """A model of DTensors, and its optimizer in two groups, each with a matrix or more."""
    model = sharded(Bare(shapes), replicas)
    params = list(model.parameters())
    groups = [{"params": params[:2]}, {"params": params[2:]}]
    return model, getattr(megaopt, kind)(groups, **options)


def meshes_apart(kind, options):
    """The same, of which the first matrix alone is on a mesh of its own, of all ranks too."""
    model, params = Bare(SHAPES), []
    for index, param in enumerate(model.parameters()):
        mesh = mesh_of() if index else mesh_of(dist.get_world_size())
        place = [Shard(0)] * mesh.ndim
        params.append(distribute_tensor(param.detach(), mesh, place, src_data_rank=None))
        setattr(model, f"p{index}", torch.nn.Parameter(params[-1]))
    params = list(model.parameters())
    groups = [{"params": params[:1]}, {"params": params[1:]}]
    return model, getattr(megaopt, kind)(groups, **options)


def others(group, values):
    """Options of a group are others."""
    group.update(values)


def no_tensor(group, _):
    group["params"][0] = "weight"


def removed(group, _):
    del group["params"][0]


def turned(group, _):
    group["params"].reverse()


def no_list(group, value):
    group["params"] = value


def without(group, _):
    del group["params"]


def marked(group, name):
    setattr(group["params"][0], name, name != "use_muon")


@contextlib.contextmanager
def edited(optimizer, number, edit, value):
    """Within it a group is another."""
    group = optimizer.param_groups[number]
    kept, params = dict(group), list(group["params"])
    edit(group, value)
    try:
        yield
    finally:
        for param in params:
            vars(param).pop(value if isinstance(value, str) else "", None)
        kept["params"][:] = params
        group.clear()
        group.update(kept)


def said_of(kind, options, changes, steps=0, replicas=1, build=built, **step):
    """The error of a step in which some ranks have others, and what was before, is, and then is.

    Args:
        changes: for each such rank the number of a group, its edit and the value.
        steps: taken before.
        step: the arguments of the step.
    """
    given = () if build is meshes_apart else (replicas,)
    model, optimizer = build(kind, options, *given)
    train(model, optimizer, steps)
    before, params = snapshot(optimizer), list(model.parameters())
    give(params, gradients(steps, SHAPES))
    own = changes.get(dist.get_rank())
    with edited(optimizer, *own) if own else contextlib.nullcontext():
        error = raised_by(lambda: optimizer.step(**step))
    after = snapshot(optimizer)
    give(params, gradients(steps, SHAPES))
    optimizer.step()
    return error, before, after, snapshot(optimizer)


def straight(kind, options, steps, replicas=1, build=built):
    """What the same has after steps in which all ranks agree."""
    given = () if build is meshes_apart else (replicas,)
    model, optimizer = build(kind, options, *given)
    train(model, optimizer, steps)
    return snapshot(optimizer)
