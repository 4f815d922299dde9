"""What ranks do in the tests of settings and parameters that are not the same on all ranks."""

import contextlib

import torch
import torch.distributed as dist
from fsdp2_ranks import Bare, give, gradients, mesh_of, raised_by, sharded, snapshot, train, whole
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

SHAPES = [(24, 10), (7, 9), (9,), (6, 30)]


def built(make, options, replicas=1):
    """A model of DTensors, and its optimizer in two groups, each with a matrix or more."""
    model = sharded(Bare(SHAPES), replicas)
    params = list(model.parameters())
    return model, make([{"params": params[:2]}, {"params": params[2:]}], **options)


def one_matrix(make, options, replicas=1):
    """The same, of a matrix and a vector."""
    model = sharded(Bare([(24, 10), (9,)]), replicas)
    return model, make([{"params": [param]} for param in model.parameters()], **options)


def meshes_apart(make, options, replicas=1):
    """The same, of which the first matrix alone is on a mesh of its own, of all ranks too."""
    model, params = Bare(SHAPES), []
    for index, param in enumerate(model.parameters()):
        mesh = mesh_of() if index else init_device_mesh("cpu", (1, dist.get_world_size()))
        place = [Shard(0)] if index else [Replicate(), Shard(0)]
        params.append(distribute_tensor(param.detach(), mesh, place, src_data_rank=None))
        setattr(model, f"p{index}", torch.nn.Parameter(params[-1]))
    params = list(model.parameters())
    first = {"params": params[:1], "param_numbers": [0]}
    return model, make([first, {"params": params[1:], "param_numbers": [1, 2, 3]}], **options)


def others(group, values):
    """Options of a group are others."""
    group.update(values)


def no_tensor(group, _):
    group["params"][0] = "weight"


def removed(group, _):
    for name in ("params", "param_numbers"):
        del group.get(name, [0])[0]


def turned(group, _):
    group["params"].reverse()


def no_list(group, value):
    group["params"] = value


def without(group, _):
    del group["params"]


def marked(group, name):
    setattr(group["params"][0], name, True)


@contextlib.contextmanager
def edited(optimizer, number, edit, value):
    """Within it a group is another."""
    group = optimizer.param_groups[number]
    lists = {name: list(group[name]) for name in ("params", "param_numbers") if name in group}
    kept, params = dict(group), lists["params"]
    counts = isinstance(value, dict) and "step" in value
    edit(group, value)
    try:
        yield
    finally:
        for param in params:
            vars(param).pop(value if isinstance(value, str) else "", None)
        step = kept["step"] if counts else group["step"]
        group.clear()
        group.update({**kept, **lists, "step": step})


def said_of(make, options, changes, steps=0, replicas=1, build=built):
    """The error of a step in which some ranks have others, and what was before, is, and then is.

    Args:
        make: the optimizer's class.
        options: of it.
        changes: for each such rank the number of a group, its edit and the value.
        steps: taken before.
        replicas: rows of the mesh.
        build: makes model and optimizer.
    """
    model, optimizer = build(make, options, replicas)
    train(model, optimizer, steps)
    before, params = snapshot(optimizer), list(model.parameters())
    shapes = [tuple(param.shape) for param in params]
    give(params, gradients(steps, shapes))
    own = changes.get(dist.get_rank())
    with edited(optimizer, *own) if own else contextlib.nullcontext():
        error = raised_by(optimizer.step)
    after = snapshot(optimizer)
    give(params, gradients(steps, shapes))
    optimizer.step()
    return error, before, after, snapshot(optimizer)


def trained(make, options, steps, replicas=1, build=built):
    """What the same has after steps in which all ranks agree."""
    model, optimizer = build(make, options, replicas)
    train(model, optimizer, steps)
    return snapshot(optimizer)


def said_of_a_norm(make, options):
    """The error of a first step in which the last rank alone clips."""
    model, optimizer = built(make, options)
    give(model.parameters(), gradients(0, SHAPES))
    norm = 1.0 if dist.get_rank() == dist.get_world_size() - 1 else None
    return raised_by(lambda: optimizer.step(clip_norm=norm))


def going_together(make, options):
    """Weights after steps before the last of which all ranks take the first parameter out.

    And those of a run whose first parameter has no gradient from then on.
    """
    found = []
    for is_removed in (True, False):
        model, optimizer = meshes_apart(make, options)
        train(model, optimizer, 2)
        if is_removed:
            optimizer.param_groups[0].update(params=[], param_numbers=[])
        for step in (2, 3):
            give(model.parameters(), gradients(step, SHAPES))
            model.p0.grad = None
            optimizer.step()
        found.append(whole([param.detach() for param in model.parameters()]))
    return found
