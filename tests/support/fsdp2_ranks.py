"""What ranks do in the tests of DTensor parameters: real fully_shard, on CPUs, over gloo."""

from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from runs import BF16, FP32, assert_same, params_of, values
from torch.distributed._functional_collectives import AsyncCollectiveTensor, reduce_scatter_tensor
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
from megaopt.kernels.step.reference import ReferencePlan

SHAPES = [(5, 3), (7,), (1, 4), (6, 2, 3), (2, 600)]
"""Cut in the first dimension: uneven on 2 to 4 ranks, the third empty on all but one."""


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


def build(options, replicas=1, dtype=None, shapes=SHAPES, seed=0):
    """A model and its optimizer; without a process group a whole one.

    options: FusedAdam's, or those of the class that "optimizer" is or names; "external" makes
        fp32 masters of the values before bf16.
    """
    options = dict(options)
    dtype = dtype or options.pop("weights", FP32)
    model = Bare(shapes, dtype, seed)
    if dist.is_initialized():
        sharded(model, replicas)
    if options.pop("external", False):
        options["master_weights"] = [param.detach().clone() for param in model.parameters()]
        model.to(BF16)
    kind = options.pop("optimizer", FusedAdam)
    kind = getattr(megaopt, kind) if isinstance(kind, str) else kind
    return model, kind(model.parameters(), **options)


def train(model, optimizer, steps, first=0, **step):
    params = list(model.parameters())
    shapes = [tuple(param.shape) for param in params]
    for number in range(first, first + steps):
        name = "decoupled_grad" if optimizer.use_decoupled_grad else "grad"
        give(params, gradients(number, shapes, params[0].dtype), name)
        optimizer.step(**step)


def trained(options, steps, replicas=1, shapes=SHAPES, **step):
    """What an optimizer has after some steps; of all ranks the same."""
    model, optimizer = build(options, replicas, shapes=shapes)
    train(model, optimizer, steps, **step)
    return snapshot(optimizer)


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


# --- what belongs to the processes alone


def kinds_of_state(options, replicas):
    """Whether each state tensor is a DTensor of the parameter's mesh and placements."""
    model, optimizer = build(options, replicas)
    train(model, optimizer, 1)
    return [
        isinstance(tensor, DTensor)
        and tensor.placements == param.placements
        and tensor.device_mesh == param.device_mesh
        and tensor.shape == param.shape
        and tensor.stride() == param.stride()
        for param in model.parameters()
        for tensor in optimizer.state[param].values()
        if tensor is not None
    ]


def options_of(flat, full=False):
    return StateDictOptions(
        flatten_optimizer_state_dict=flat, full_state_dict=full, broadcast_from_rank0=full
    )


def content_of(model, optimizer, given):
    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=given),
    }


def save(options, steps, folder, flat, shapes=SHAPES):
    model, optimizer = build(options, shapes=shapes)
    train(model, optimizer, steps)
    dcp.save(content_of(model, optimizer, options_of(flat)), checkpoint_id=folder)
    return snapshot(optimizer)


def load(options, folder, flat, shapes=SHAPES):
    """Model and optimizer from a checkpoint; all that was made here is overwritten."""
    model, optimizer = build({**options, "lr": 77.0}, shapes=shapes, seed=50)
    given = options_of(flat)
    content = content_of(model, optimizer, given)
    dcp.load(content, checkpoint_id=folder)
    set_model_state_dict(model, content["model"])
    set_optimizer_state_dict(model, optimizer, content["optimizer"], options=given)
    return model, optimizer


def load_and_train(options, steps, first, folder, flat, shapes=SHAPES):
    """From a checkpoint of another number of ranks on: what is loaded, and what it comes to."""
    model, optimizer = load(options, folder, flat, shapes)
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


def look_before_the_first_step(options, steps, poison):
    """What get_optimizer_state_dict leaves behind, and what training then comes to."""
    model, optimizer = build(options)
    if poison:
        with torch.no_grad():
            for param in model.parameters():
                flat = param.to_local().view(-1)
                flat[:1], flat[1:2] = float("nan"), -0.0
                flat[2:3], flat[3:4] = float("inf"), 1e-40
    before = [param.to_local().clone() for param in model.parameters()]
    lrs = [group["lr"] for group in optimizer.param_groups]
    saved = get_optimizer_state_dict(model, optimizer)
    after = [param.to_local().clone() for param in model.parameters()]
    state = snapshot(optimizer)
    assert [group["lr"] for group in optimizer.param_groups] == lrs
    assert all(param.grad is None for param in model.parameters())
    train(model, optimizer, steps)
    names = {name: sorted(own) for name, own in saved["state"].items()}
    return before, after, state, snapshot(optimizer), names


def warm_up_from_zero(options, shapes, row):
    """The first step has lr=0, and gradients that are 0 but for one row; then a second step."""
    model, optimizer = build(options, shapes=shapes)
    params = list(model.parameters())
    for lr in (0.0, 0.5):
        for group in optimizer.param_groups:
            group["lr"] = lr
        grads = [torch.zeros(shape) for shape in shapes]
        grads[0][row] = 1.0
        give(params, grads)
        optimizer.step()
    return snapshot(optimizer)


def gradients_of_0(options):
    model, optimizer = build(options)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    return snapshot(optimizer)


# --- the norm over ranks


def clipped(options, steps, replicas, beside):
    """Steps that clip; and the norms. With a plain parameter, the same on all ranks, beside."""
    model, optimizer = build(options, replicas)
    if beside:
        plain = torch.nn.Parameter(values((9,), 70))
        optimizer.add_param_group({"params": [plain]})
    norms = []
    for step in range(steps):
        shapes = [tuple(param.shape) for param in model.parameters()]
        give(model.parameters(), gradients(step, shapes, next(model.parameters()).dtype))
        if beside:
            plain.grad = values((9,), 90 + step)
        optimizer.step(clip_norm=1.0)
        norms.append(optimizer.grad_norm.clone())
    return snapshot(optimizer), norms


def one_infinity(options, place):
    """An infinity in one element of one tensor, which one rank holds."""
    model, optimizer = build({**options, "nonfinite": "skip"})
    train(model, optimizer, 1)
    before = snapshot(optimizer)
    grads = gradients(1)
    grads[4].view(-1)[place] = float("inf")
    give(model.parameters(), grads)
    optimizer.step()
    return before, snapshot(optimizer)


def without_gradients_here(options):
    """Only the last parameters have gradients, of which some ranks hold nothing."""
    model, optimizer = build(options, shapes=[(1, 4), (1,)])
    train(model, optimizer, 2, clip_norm=0.5)
    return snapshot(optimizer), optimizer.grad_norm


def scaled_by_a_grad_scaler(options, overflow_on, step_unscales):
    """torch.amp.GradScaler over DTensors: an infinity in one row of one gradient."""
    model, optimizer = build(options)
    optimizer.step_unscales = step_unscales
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    scaler.scale(torch.ones(()))
    counts = []
    for step in range(3):
        grads = [grad * scaler.get_scale() for grad in gradients(step)]
        if step == 1:
            grads[0][overflow_on] = float("inf")
        give(model.parameters(), grads)
        scaler.step(optimizer)
        scaler.update()
        counts.append(optimizer.param_groups[0]["step"])
    return snapshot(optimizer), counts, scaler.get_scale()


def unscaled_by_a_step(options, transposed):
    """The gradients that steps under a scale leave, and the scaled ones."""
    model, optimizer = build({**options, "write_unscaled_grads": True})
    optimizer.grad_scale, seen = torch.tensor(256.0), []
    for step in range(2):
        given = [grad * 256.0 for grad in gradients(step)]
        give(model.parameters(), given)
        if transposed:
            shard = model.p0.grad._local_tensor
            model.p0.grad._local_tensor = shard.t().contiguous().t()
        optimizer.step()
        seen.append([whole(param.grad) for param in model.parameters()])
    return snapshot(optimizer), seen


# --- shards that move, and what lies beside them


def moved(options):
    """Shards in new memory, some of them transposed, between steps; what was left stays."""
    model, optimizer = build(options)
    train(model, optimizer, 1)
    left = []
    for param in model.parameters():
        for own in (param, *optimizer.state[param].values()):
            if own is not None:
                left.append((own._local_tensor, own._local_tensor.clone()))
                own._local_tensor = own._local_tensor.clone()
    shard = model.p0._local_tensor
    model.p0._local_tensor = shard.t().contiguous().t()
    train(model, optimizer, 2, first=1)
    assert all(torch.equal(was, copy) for was, copy in left)
    return snapshot(optimizer)


def beside_plain_ones(options):
    """DTensors and plain parameters in one optimizer; and the launches of each step."""
    mesh, launch_alone = mesh_of(), ReferencePlan.step
    wholes = [values(shape, i) for i, shape in enumerate([(5, 3), (7,), (4,)])]
    given = [
        distribute_tensor(wholes[0], mesh, [Replicate()], src_data_rank=None),
        wholes[1],
        distribute_tensor(wholes[2], mesh, [Replicate()], src_data_rank=None),
    ]
    params = [torch.nn.Parameter(value) for value in given]
    optimizer = FusedAdam(params, **options)
    launches = []
    for step in range(3):
        give(params, gradients(step, [tuple(param.shape) for param in params]))
        with mock.patch.object(ReferencePlan, "step", autospec=True) as launch:
            launch.side_effect = launch_alone
            optimizer.step()
        launches.append(launch.call_count)
    return snapshot(optimizer), launches


def read_and_set(options):
    """Values read, and set again into another optimizer; what they are, and its state."""
    model, optimizer = build(options)
    train(model, optimizer, 2)
    other_model, other = build(options, seed=50)
    read = {}
    for name in ("exp_avg", "exp_avg_sq", "master_param"):
        pairs = zip(model.parameters(), other_model.parameters(), strict=True)
        for index, (param, own) in enumerate(pairs):
            value = optimizer.get_unscaled_state(param, name)
            assert value.placements == param.placements
            assert value.device_mesh == param.device_mesh
            other.set_scaled_state(own, name, value.clone())
            read[f"{name} {index}"] = whole(value)
    for own in other.param_groups:
        own["step"] = 2
    # an fp32 master sets no weight before the next step
    train(other_model, other, 1, first=2)
    train(model, optimizer, 1, first=2)
    return read, snapshot(other), snapshot(optimizer)


def gradients_that_are_on_their_way(options):
    """Each rank has half of every gradient; collectives that nobody has waited for add them up."""
    mesh, shapes = mesh_of(), [(4, 3), (6,)]
    params = [torch.nn.Parameter(split_like_rows(mesh, s, i)) for i, s in enumerate(shapes)]
    optimizer = FusedAdam(params, **options)
    for step in range(3):
        for param, grad in zip(params, gradients(step, shapes), strict=True):
            param.grad = distribute_tensor(grad, mesh, [Shard(0)], src_data_rank=None)
            half = grad / dist.get_world_size()
            if step:  # the batches are made with a tensor that is there
                local = reduce_scatter_tensor(half, "sum", 0, mesh)
                assert type(local) is AsyncCollectiveTensor
                param.grad._local_tensor = local
        optimizer.step(clip_norm=1.0)
    return snapshot(optimizer)


def split_like_rows(mesh, shape, seed):
    return distribute_tensor(values(shape, seed), mesh, [Shard(0)], src_data_rank=None)
