"""What ranks do in the tests of GaLore's DTensors: real fully_shard, on CPUs, over gloo."""

from functools import partial
from unittest import mock

import fsdp2_ranks as ranks
import torch
import torch.distributed as dist
from fsdp2_ranks import (
    Bare,
    give,
    gradients,
    mesh_of,
    raised_by,
    said,
    sharded,
    snapshot,
    train,
    whole,
)
from galore_cases import GAP as TWINS_GAP
from galore_cases import Twin
from runs import BF16, values
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megaopt import FusedAdam, GaLoreAdamW
from megaopt.kernels.galore import rule
from megaopt.params import view_of
from megaopt.step.matrix import parts_of

SHAPES = [(24, 10), (7, 6), (9,), (6, 30), (4, 40), (12, 12)]
"""Tall, wide and square; even and uneven on 2 and 3 ranks, the fifth empty on the last of 3."""
GAP, RANK = 3, 3
NUMBERS = {"lr": 0.01, "weight_decay": 0.1, "eps": 1e-4}
KEPT = ("projection", "captured_energy")
RANKED = {"rank": RANK, "update_proj_gap": GAP, "scale": 0.25, "proj_type": "auto"}


def ranked(options):
    """A GaLoreAdamW's, as fsdp2_ranks takes them."""
    return {**NUMBERS, **RANKED, "optimizer": GaLoreAdamW, **options}


def build(options, replicas=1, shapes=SHAPES):
    """A model and its GaLoreAdamW; without a process group a whole one."""
    return ranks.build(ranked(options), replicas, shapes=shapes)


def trained(options, steps, replicas=1, shapes=SHAPES, **step):
    return ranks.trained(ranked(options), steps, replicas, shapes, **step)


def refreshed_by_hand(options, steps):
    """With capturable: a refresh before each step."""
    model, optimizer = build({**options, "capturable": True})
    params = list(model.parameters())
    for number in range(steps):
        give(params, gradients(number, [tuple(p.shape) for p in params]))
        optimizer.refresh(None if number % 2 else number)
        optimizer.step()
    return snapshot(optimizer)


class Bytes(TorchDispatchMode):
    """Counts what this rank hands to collectives, whatever they are."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "c10d" in func.namespace:
            place = 1 if "alltoall" in func._schema.name else 0  # which has its output first
            tensors = torch.utils._pytree.tree_leaves(args[place])
            self.count += sum(t.nbytes for t in tensors if isinstance(t, torch.Tensor))
        return func(*args, **(kwargs or {}))


def bytes_of_steps(options, steps, replicas=1, clip_norm=None):
    """For each step what this rank communicates."""
    model, optimizer = build(options, replicas)
    params, found = list(model.parameters()), []
    for number in range(steps):
        give(params, gradients(number, [tuple(p.shape) for p in params], params[0].dtype))
        with Bytes() as counted:
            optimizer.step(clip_norm=clip_norm)
        found.append(counted.count)
    return found


def bytes_of_a_refresh(shape, number, is_first, low, rank, world, replicas):
    """The rows of ranks that send the maker theirs, fp32; projection and energy come back to all.

    A maker has copies of some rows.
    """
    asked = 4 if is_first else 0  # whether the gradient can make a projection
    shards = world // replicas
    most = -(-shape[0] // shards)
    rows = max(0, min(most, shape[0] - rank % shards * most))
    gives = rank // shards == number % world // shards
    return gives * 4 * rows * shape[1] + 4 * (low * shape[1] + 1) + asked


MESSAGE = 8 * (16 * 16 * 2 + 4)
"""Bytes of the message in which ranks compare what they are going to step, at the first step."""


def bytes_by_turns(steps, stagger, rank, world, replicas=1, shapes=SHAPES, low=RANK):
    """For each step what a rank hands others: refreshes whose turn it is; at first a message."""
    found = []
    for step in range(steps):
        due = [
            (shape, number, step == 0)
            for number, shape in enumerate(shapes)
            if len(shape) == 2 and (step == 0 or step % GAP == (number % GAP if stagger else 0))
        ]
        layout = (low, rank, world, replicas)
        found.append(sum(bytes_of_a_refresh(*each, *layout) for each in due))
    found[0] += MESSAGE * min(replicas, 2)  # one for each dimension of the mesh
    return found


# --- against fp64


def exact_weights(steps, stagger, shapes=SHAPES, rank=RANK):
    """Of the matrices, in fp64, by the twin."""
    assert TWINS_GAP == GAP
    group, found = {**NUMBERS, "betas": (0.9, 0.999), "bias_correction": True, "scale": 0.25}, []
    for number, shape in enumerate(shapes):
        if len(shape) == 2:
            turn = number if stagger else 0
            weight, how = values(shape, number).double(), {"refresh": "subspace", "number": turn}
            twin = Twin(weight, "right", rank, group, **how)
            for step in range(steps):
                twin.step(gradients(step, shapes)[number].double())
            found.append(twin.weight)
    return found


def norm_of_errors(found, exact):
    pairs = zip(found, exact, strict=True)
    return sum((own.double() - other).square().sum() for own, other in pairs).sqrt()


def matrices_of(run):
    return [weight for weight in run["weights"] if weight.dim() == 2]


def stepped_on(device, options, steps, shapes):
    """On a device, of this rank's rows where there are ranks: the weights, whole; bytes of steps.

    fp32 weights; a process group has to be there, or not.
    """
    model, found = Bare(shapes).to(device), []
    if dist.is_initialized():
        fully_shard(model, mesh=init_device_mesh(device.type, (dist.get_world_size(),)))
    params = list(model.parameters())
    optimizer = GaLoreAdamW(params, **{**NUMBERS, **RANKED, **options})
    for step in range(steps):
        give(params, [grad.to(device) for grad in gradients(step, shapes)])
        with Bytes() as counted:
            optimizer.step()
        found.append(counted.count)
    return [weight.cpu() for weight in whole([p.detach() for p in params])], found


def rank_of_two(rank, folder, options, steps, shapes):
    """A process for torch.multiprocessing: steps on a GPU of its own, and leaves what came out."""
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", f"file://{folder}/meeting", world_size=2, rank=rank)
    torch.save(
        stepped_on(torch.device("cuda", rank), options, steps, shapes), f"{folder}/{rank}.pt"
    )
    dist.destroy_process_group()


# --- products that are exact


def selecting(optimizer, offset=0):
    """Gives every matrix a projection of 0 and 1, with which all products are exact.

    Of other numbers where a precision says how they are multiplied.
    """
    optimizer.initialize_states()
    for number, own in enumerate(optimizer.state.values()):
        if "projection" in own:
            basis = own["projection"]
            basis = basis.to_local() if isinstance(basis, DTensor) else basis
            if optimizer.options.precision != "ieee":
                basis.copy_(values(basis.shape, number))
                continue
            is_wide = basis.shape[0] < basis.shape[1]
            rows = basis if is_wide else basis.T
            rows.zero_().diagonal(offset).fill_(1.0)


def selected(options, steps, replicas=1, shapes=SHAPES, **step):
    """Steps by such projections, which stay; the norms too where steps clip."""
    given = {"update_proj_gap": 1000, **options}
    model, optimizer = build(given, replicas, shapes)
    optimizer.param_groups[0]["param_numbers"] = [500 + i for i in range(len(shapes))]
    selecting(optimizer)
    train(model, optimizer, steps, **step)
    found = snapshot(optimizer)
    return (found, optimizer.grad_norm.clone()) if "clip_norm" in step else found


# --- gradients that say nothing


def largest_of(sent):
    """Of one number from each rank."""
    param = distribute_tensor(torch.ones(6, 30), mesh_of(), [Shard(0)], src_data_rank=None)
    parts = parts_of(view_of(param), 0)
    return parts.largest(torch.tensor(sent[dist.get_rank()]))


def after_a_gradient(options, change, shape, before=3):
    """Projections before and after a refresh by a changed gradient, and after the next one."""
    model, optimizer = build({**options, "stagger": False}, shapes=[shape])
    train(model, optimizer, before)
    found = [projection_of(optimizer)] if before else []
    for number in range(before, before + GAP + 1):
        grad = gradients(number, [shape])[0]
        give(model.parameters(), [change(grad) if number == before else grad])
        optimizer.step()
        if number in (before, before + GAP):
            found.append(projection_of(optimizer))
    return found


def projection_of(optimizer):
    (own,) = optimizer.state.values()
    basis = own.get("projection")
    return (basis.to_local() if isinstance(basis, DTensor) else basis).clone()


def zeros(grad):
    return torch.zeros_like(grad)


def nan_in_the_last_row(grad):
    grad[-1, 2] = torch.nan
    return grad


def infinite_in_the_first_row(grad):
    grad[0, 1] = -torch.inf
    return grad


def of_one_dimension(grad):
    return grad[:, :1] * torch.arange(1.0, grad.shape[1] + 1)


def zeros_in_the_first_rows(grad):
    grad[: grad.shape[0] // 2] = 0
    return grad


def failing_at_a_refresh(failing, before=GAP, groups=1, **step):
    """Returns what a rank raises at a refresh that fails on one of them, and its projections.

    groups: so many, each of another rank.
    """
    model = sharded(Bare(SHAPES))
    params = list(model.parameters())
    lows = [{"params": params[i::groups], **RANKED, "rank": RANK - i} for i in range(groups)]
    optimizer = GaLoreAdamW(lows, **NUMBERS, stagger=False)
    train(model, optimizer, before, **step)
    give(model.parameters(), gradients(before, SHAPES))
    error = RuntimeError("no memory") if dist.get_rank() == failing else None
    with mock.patch.object(rule, "refreshed", side_effect=error, wraps=rule.refreshed):
        message = raised_by(partial(optimizer.step, **step))
    projections = [optimizer.state[p].get("projection") for low in lows for p in low["params"]]
    return message, [None if p is None else p.to_local().clone() for p in projections]


def of_another_gap():
    """Returns what a rank raises at a clipped step after one of them has set another gap."""
    model, optimizer = build({})
    train(model, optimizer, 2, clip_norm=1.0)
    give(model.parameters(), gradients(2, SHAPES))
    optimizer.param_groups[0]["update_proj_gap"] += dist.get_rank()
    return said(partial(optimizer.step, clip_norm=1.0))


def at_places(mesh, steps, shapes=SHAPES):
    """Projections and energies where ranks lie so in a mesh; None: of one process."""
    model, options = Bare(shapes), {**NUMBERS, **RANKED}
    if mesh is not None:
        mesh = DeviceMesh("cpu", mesh)
        for name, param in list(model.named_parameters()):
            placements = [Replicate()] * (mesh.ndim - 1) + [Shard(0)]
            split = distribute_tensor(param.detach(), mesh, placements, src_data_rank=None)
            setattr(model, name, torch.nn.Parameter(split))
    optimizer = GaLoreAdamW(model.parameters(), **options)
    train(model, optimizer, steps)
    tensors = [state[n] for state in optimizer.state.values() for n in KEPT if n in state]
    return [t.to_local().clone() if isinstance(t, DTensor) else t for t in tensors]


# --- states


def kinds_of_state(options, replicas):
    """By name of each state tensor: mesh and strides as they must be, placement, shapes."""
    model, optimizer = build(options, replicas)
    train(model, optimizer, 1)
    return [
        {
            name: (
                t.device_mesh == p.device_mesh and t.stride() == torch.empty(t.shape).stride(),
                str(t.placements[-1]), tuple(t.shape), tuple(t.to_local().shape),
            )
            for name, t in optimizer.state[p].items() if t is not None
        }
        for p in model.parameters()
    ]  # fmt: skip


def save(options, steps, folder, flat):
    return ranks.save(ranked(options), steps, folder, flat, SHAPES)


def load_and_train(options, steps, first, folder, flat):
    """The seed too is the checkpoint's."""
    own = ranked({**options, "seed": 5})
    return ranks.load_and_train(own, steps, first, folder, flat, SHAPES)


def values_read_and_set(options, shapes):
    """fp32 values of moments, whole, and what a second optimizer has that was given them."""
    (model, optimizer), (_, other) = (build(options, shapes=shapes) for _ in range(2))
    train(model, optimizer, 2)
    other.initialize_states()
    read, found = [], []
    for param, twin in zip(model.parameters(), other.param_groups[0]["params"], strict=True):
        for name in ("exp_avg", "exp_avg_sq"):
            value = optimizer.get_unscaled_state(param, name)
            other.set_scaled_state(twin, name, value)
            for each, own in ((read, value), (found, other.get_unscaled_state(twin, name))):
                each.append(own.full_tensor() if isinstance(own, DTensor) else own.clone())
    return read, found


# --- beside other parameters


def beside_fused_adam(options, steps):
    """Parameters without a rank: of this optimizer, and of FusedAdam."""
    runs = []
    for kind in (GaLoreAdamW, FusedAdam):
        model = sharded(Bare(SHAPES, BF16))
        if kind is GaLoreAdamW:
            params = list(model.parameters())
            ranked = [{"params": params[:2], **RANKED}, {"params": params[2:], "rank": None}]
            optimizer = kind(ranked, **NUMBERS, **options)
        else:
            optimizer = kind(model.parameters(), **NUMBERS, **options)
        train(model, optimizer, steps)
        found = snapshot(optimizer)
        runs.append([found["weights"][2:], found["states"][2:]])
    return runs


# --- the whole gradient


def norm_of(steps, kind):
    options = {} if kind == "FusedAdam" else RANKED
    model, optimizer = ranks.build({"optimizer": kind, **options}, shapes=SHAPES)
    train(model, optimizer, steps, clip_norm=1.0)
    return optimizer.grad_norm.clone()


def one_infinity(options):
    """In the last row of a matrix, at a refresh."""
    model, optimizer = build({**options, "stagger": False})
    train(model, optimizer, GAP)
    before, grads = snapshot(optimizer), gradients(GAP, SHAPES)
    grads[0][-1, 0] = torch.inf
    give(model.parameters(), grads)
    optimizer.step()
    return before, snapshot(optimizer)


# --- what is refused


def under_fsdp1():
    """Views into a flat parameter, and the flat parameter itself."""
    found = []
    for originals in (True, False):
        model = torch.nn.Sequential(torch.nn.Linear(30, 20, bias=False))
        wrapped = FullyShardedDataParallel(
            model, use_orig_params=originals, device_id=torch.device("cpu")
        )
        found.append(said(lambda own=wrapped: GaLoreAdamW(own.parameters(), rank=3)))
    return found


# --- ranks that differ


def differing(what):
    """One rank's gradient, or its rank, is another, in a step that clips and refreshes."""
    model, optimizer = build({"stagger": False})
    train(model, optimizer, GAP, clip_norm=1.0)
    give(model.parameters(), gradients(GAP, SHAPES))
    before, is_other = snapshot(optimizer), dist.get_rank() == 1
    if is_other and what == "gradient":
        model.p0.grad = torch.ones(24, 10)
    if is_other and what == "error":
        optimizer.param_groups[0]["update_proj_gap"] = 0
    found = said(lambda: optimizer.step(clip_norm=1.0))
    optimizer.param_groups[0]["update_proj_gap"] = GAP
    give(model.parameters(), gradients(GAP, SHAPES))
    changed = snapshot(optimizer)
    optimizer.step(clip_norm=1.0)
    return found, before, changed, snapshot(optimizer)


def of_another_rank():
    """The first step of an optimizer whose matrices one rank would project to other dimensions."""
    _, optimizer = build({"rank": 2 + dist.get_rank()})
    params = optimizer.param_groups[0]["params"]
    give(params, gradients(0, SHAPES))
    return said(lambda: optimizer.step(clip_norm=1.0))
