"""What ranks do in the tests of DTensor parameters: real fully_shard, on CPUs, over gloo."""

import contextlib
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from runs import BF16, FP32, assert_same, on_cpu, params_of, values
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import megaopt
from megaopt import FusedAdam

SHAPES = [(5, 3), (7,), (1, 4), (6, 2, 3), (2, 600)]
"""Cut in the first dimension: uneven on 2 to 4 ranks, the third empty on all but one."""


PLACEMENTS = {
    "rows": lambda shape: [Shard(0)],
    "columns": lambda shape: [Shard(len(shape) - 1)],
    "by turns": lambda shape: [Shard(sum(shape) % len(shape))],
}
MESHES = {
    "rows and columns": lambda shape: [Shard(0), Shard(len(shape) - 1)],
    "rows twice": lambda shape: [Shard(0), Shard(0)],
    "the last two": lambda shape: [Shard(max(len(shape) - 2, 0)), Shard(len(shape) - 1)],
    "copies of rows": lambda shape: [Replicate(), Shard(0)],
    "copies of columns": lambda shape: [Replicate(), Shard(len(shape) - 1)],
    "columns and copies": lambda shape: [Shard(len(shape) - 1), Replicate()],
}
COPIES = ("group", "mesh", "mesh of two dimensions")


class Bare(torch.nn.Module):
    """Parameters alone; gradients are given by hand."""

    def __init__(self, shapes=SHAPES, dtype=FP32, seed=0):
        super().__init__()
        for index, shape in enumerate(shapes):
            value = values(shape, seed + index).to(dtype)
            setattr(self, f"p{index}", torch.nn.Parameter(value))


def gradients(step, shapes=SHAPES, dtype=FP32):
    return [values(shape, 100 * (step + 1) + i).to(dtype) for i, shape in enumerate(shapes)]


def mesh_of(replicas=1):
    """All ranks in one row, or in so many rows that have copies of one another's shards."""
    world = dist.get_world_size()
    if replicas == 1:
        return init_device_mesh("cpu", (world,))
    return init_device_mesh("cpu", (replicas, world // replicas), mesh_dim_names=("copy", "shard"))


def sharded(model, replicas=1):
    return fully_shard(model, mesh=mesh_of(replicas))


def split_like(param, whole):
    """A whole tensor, the same on all ranks, as a DTensor of the parameter's sharding."""
    return distribute_tensor(whole, param.device_mesh, param.placements, src_data_rank=None)


def give(params, grads, name="grad"):
    for param, grad in zip(params, grads, strict=True):
        grad = grad.clone().to(param.device)
        setattr(param, name, split_like(param, grad) if isinstance(param, DTensor) else grad)


def whole(value):
    """Everything in it without a DTensor."""
    if isinstance(value, DTensor):
        own = value.detach()
        if own.is_cuda and dist.get_backend() == "gloo":
            # its gather of a GPU's shards ends the process where it is waited for, in torch 2.11
            mesh, local = DeviceMesh("cpu", own.device_mesh.mesh), own.to_local().cpu()
            place = {"shape": own.shape, "stride": own.stride(), "run_check": False}
            own = DTensor.from_local(local, mesh, own.placements, **place)
        if value.dtype == torch.int16:  # gloo cannot send it
            return own.int().full_tensor().short()
        return own.full_tensor().clone()  # a single rank's is its shard
    if isinstance(value, dict):
        return {name: whole(content) for name, content in value.items()}
    if isinstance(value, (list, tuple)):
        return [whole(content) for content in value]
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def snapshot(optimizer):
    """Weights, states, step counts, whole."""
    params = params_of(optimizer)
    states = [dict(optimizer.state.get(param, {})) for param in params]
    steps = [int(group["step"]) for group in optimizer.param_groups]
    return whole({"weights": params, "states": states, "steps": steps})


def groups_of(params, split):
    """All parameters in a group; split: those of 24 rows in one of their own, of three matrices."""
    if not split:
        return params
    is_fused = [param.shape[0] == 24 for param in params]
    fused = [param for param, own in zip(params, is_fused, strict=True) if own]
    rest = [param for param, own in zip(params, is_fused, strict=True) if not own]
    return [{"params": fused, "split_sizes": [10, 10, 4]}, {"params": rest}]


def ranks_as(kind):
    """All ranks, as a process group or as a mesh of one dimension or two."""
    world = dist.get_world_size()
    if kind == "group":
        return dist.group.WORLD
    sizes = (world,) if kind == "mesh" else (2, world // 2)
    return init_device_mesh("cpu", sizes, mesh_dim_names=("a", "b")[: len(sizes)])


def build(
    options, replicas=1, shapes=SHAPES, seed=0, place="shards", sizes=(), split=False, device="cpu"
):
    """A model and its optimizer.

    options: FusedAdam's, or those of the class that "optimizer" is or names; "external" makes
        fp32 masters of the values before bf16.
    place: "shards" are fully_shard's, with so many `replicas`; without a process group tensors are
        whole. None: they are whole. Of PLACEMENTS or MESHES: DTensors on a mesh of these `sizes`.
        Of COPIES: whole ones that all ranks have, among which they divide the work.
    split: as groups_of takes it.
    """
    options = dict(options)
    model = Bare(shapes, options.pop("weights", FP32), seed).to(device)
    if place == "shards" and dist.is_initialized():
        sharded(model, replicas)
    elif place in COPIES and dist.is_initialized():
        options["replicas"] = ranks_as(place)
    elif place in {**PLACEMENTS, **MESHES}:
        mesh = init_device_mesh(device, sizes, mesh_dim_names=("a", "b")[: len(sizes)])
        for name, param in list(model.named_parameters()):
            lies = {**PLACEMENTS, **MESHES}[place](param.shape)
            part = distribute_tensor(param.detach(), mesh, lies, src_data_rank=None)
            setattr(model, name, torch.nn.Parameter(part))
    if options.pop("external", False):
        options["master_weights"] = [param.detach().clone() for param in model.parameters()]
        model.to(BF16)
    kind = options.pop("optimizer", FusedAdam)
    kind = getattr(megaopt, kind) if isinstance(kind, str) else kind
    return model, kind(groups_of(list(model.parameters()), split), **options)


def train(model, optimizer, steps, first=0, **step):
    params = list(model.parameters())
    shapes = [tuple(param.shape) for param in params]
    for number in range(first, first + steps):
        name = "decoupled_grad" if optimizer.use_decoupled_grad else "grad"
        give(params, gradients(number, shapes, params[0].dtype), name)
        optimizer.step(**step)


def trained(
    options, steps, replicas=1, shapes=SHAPES, *, place="shards", sizes=(), split=False,
    device="cpu", **step,
):  # fmt: skip
    """What an optimizer has after some steps; of all ranks the same."""
    own = {"place": place, "sizes": sizes, "split": split, "device": device}
    model, optimizer = build(options, replicas, shapes, **own)
    train(model, optimizer, steps, **step)
    return on_cpu(snapshot(optimizer))


def odd_step(model, optimizer, steps, oddity, more=1, **step):
    """Steps, an odd one, and `more`: its error, what there was before it, is after it and then.

    oddity: what the odd step is taken within, of the optimizer, whose gradients are there.
    """
    train(model, optimizer, steps, **step)
    before, params = snapshot(optimizer), list(model.parameters())
    give(params, gradients(steps, [tuple(param.shape) for param in params], params[0].dtype))
    with oddity(optimizer):
        error = raised_by(lambda: optimizer.step(**step))
    after = snapshot(optimizer)
    train(model, optimizer, more, first=steps, **step)
    return error, before, after, snapshot(optimizer)


@contextlib.contextmanager
def odd_last_rank(optimizer, kind, places, options=None):
    """Within it the last rank does something else than the others.

    kind: it lacks a "gradient", has one of another "dtype", has another group, of `options`, or
        fails in one of `places`, which are attributes, where others may wait for it.
    """
    if not is_last_rank():
        yield
        return
    group, own = optimizer.param_groups[0], (options or {}).get(kind, {})
    was, failing = {name: group[name] for name in own}, contextlib.nullcontext()
    group.update(own)
    if kind == "gradient":
        group["params"][1].grad = None
    elif kind == "dtype":
        group["params"][1].grad_dtype = None
        group["params"][1].grad = group["params"][1].grad.float()
    elif not own:
        failing = mock.patch.object(*places[kind], side_effect=RuntimeError("no memory"))
    with failing:
        yield
    group.update(was)


@contextlib.contextmanager
def left_out(optimizer, reason, here=True):
    """Within it "found_inf" is set, or the first gradient's last row has a "nan" `here`."""
    grad = optimizer.param_groups[0]["params"][0].grad
    if reason == "found_inf":
        optimizer.found_inf = torch.tensor(1.0)
    elif here:
        (grad.to_local() if isinstance(grad, DTensor) else grad)[-1] = torch.nan
    yield
    optimizer.found_inf = None


def is_last_rank():
    return not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1


def split_muon(params, **options):
    """FusedMuon of matrices of 4 rows that come again: q of two rows, k and v of one each."""
    return megaopt.FusedMuon([{"params": params, "split_sizes": (2, 1, 1)}], **options)


def said(action):
    """What is said of an action that is refused."""
    try:
        action()
    except ValueError as error:
        return str(error)
    return "nothing was refused"


def raised_by(action):
    """The type and the words of what an action raises; None where it raises nothing."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def assert_same_on_all(found, expected):
    for rank, own in enumerate(found):
        assert_same(own, expected, f"rank {rank}")


def perceptron(dtype=BF16):
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
    for seed, param in enumerate(model.parameters()):
        param.data = values(param.shape, seed).to(dtype)
    return model


def released(options, releases, steps=3):
    """What steps of a model leave behind, with its gradients released or not."""
    options = {"lr": 0.01, "optimizer": FusedAdam, **options}
    model = perceptron()
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh_of())
    optimizer = options.pop("optimizer")(model.parameters(), **options)
    if releases:
        megaopt.release_gradients(model, optimizer)
    for step in range(steps):
        model(values((4, 6), step, BF16)).float().pow(2).sum().backward()
        assert all((param.grad is None) is releases for param in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    return snapshot(optimizer)


# --- what belongs to the processes alone


def options_of(flat, full=False):
    return StateDictOptions(
        flatten_optimizer_state_dict=flat, full_state_dict=full, broadcast_from_rank0=full
    )


def content_of(model, optimizer, given):
    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=given),
    }


def save(options, steps, folder, flat, shapes=SHAPES, replicas=1):
    model, optimizer = build(options, replicas, shapes)
    train(model, optimizer, steps)
    dcp.save(content_of(model, optimizer, options_of(flat)), checkpoint_id=folder)
    return snapshot(optimizer)


def load(options, folder, flat, shapes=SHAPES, replicas=1):
    """Model and optimizer from a checkpoint; all that was made here is overwritten."""
    model, optimizer = build({**options, "lr": 77.0}, replicas, shapes, seed=50)
    given = options_of(flat)
    content = content_of(model, optimizer, given)
    dcp.load(content, checkpoint_id=folder)
    set_model_state_dict(model, content["model"])
    set_optimizer_state_dict(model, optimizer, content["optimizer"], options=given)
    return model, optimizer


def load_and_train(options, steps, first, folder, flat, shapes=SHAPES, replicas=1):
    """From a checkpoint of another number of ranks on: what is loaded, and what it comes to."""
    model, optimizer = load(options, folder, flat, shapes, replicas)
    loaded = snapshot(optimizer)
    train(model, optimizer, steps, first)
    return loaded, snapshot(optimizer)


def through_full_state(options, steps, more, shapes=SHAPES):
    """By way of a whole state on rank 0, into another model and optimizer."""
    model, optimizer = build(options, shapes=shapes)
    train(model, optimizer, steps)
    given = options_of(flat=False, full=True)  # torch itself does not load flat full ones
    weights = get_model_state_dict(model, options=given)
    saved = get_optimizer_state_dict(model, optimizer, options=given)
    if dist.get_rank():
        weights, saved = {}, {}
    model, optimizer = build({**options, "lr": 77.0}, shapes=shapes, seed=50)
    set_model_state_dict(model, weights, options=given)
    set_optimizer_state_dict(model, optimizer, saved, options=given)
    train(model, optimizer, more, steps)
    return snapshot(optimizer)
