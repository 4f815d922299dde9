"""What ranks do in the tests of FSDP2 as it is used: small models, with the gradients it makes.

Gradients have the bits that torch's products and sums over ranks give them. So each rank has beside
the model an optimizer of plain tensors, which gets the whole gradients that FSDP2 made, and nothing
else: its weights and states are never set anew, and each step has to leave the same bits in both.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsdp2_ranks import snapshot, whole
from runs import BF16, FP32, REMAINDERS, assert_same, on_cpu
from torch import nn
from torch.distributed._functional_collectives import (
    all_gather_tensor_autograd,
    reduce_scatter_tensor_autograd,
)
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from megaopt import (
    FusedAdam,
    FusedLion,
    FusedMuon,
    GaLoreAdamW,
)

WIDTH, HIDDEN, VOCABULARY = 7, 10, 11
"""Uneven on 2 and 4 ranks; tensor parallelism wants halves of HIDDEN."""
OPTIMIZERS = {
    "adam": (FusedAdam, {"dtype": FP32, "weight_decay": 0.1}),
    "muon": (FusedMuon, {"dtype": FP32, "second_moment": "normuon"}),
    "lion": (FusedLion, {"dtype": FP32, "weight_decay": 0.1}),
    "galore": (
        GaLoreAdamW,
        {"dtype": FP32, "update_proj_gap": 2, "proj_type": "left", "precision": "tf32"},
    ),
}


# --- models


class Perceptron(nn.Module):
    """The part of a transformer's layer that needs no other tokens."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, inputs):
        return inputs + self.down(nn.functional.gelu(self.up(self.norm(inputs))))


class Experts(nn.Module):
    """Weights [experts, rows, columns]; each token goes to one expert.

    With a mesh each of its ranks has some experts, in the order of ranks.
    """

    def __init__(self, count):
        super().__init__()
        self.up = nn.Parameter(torch.randn(count, WIDTH, HIDDEN) / 3)
        self.down = nn.Parameter(torch.randn(count, HIDDEN, WIDTH) / 3)
        self.count, self.mesh = count, None

    def forward(self, inputs):
        if self.mesh is None:
            return self.of_some(inputs, 0, self.up, self.down)
        # tokens of all ranks come together, and each adds what its experts make of theirs
        tokens = all_gather_tensor_autograd(inputs, 0, self.mesh)
        first = self.mesh.get_local_rank() * -(-self.count // self.mesh.size())
        up, down = (w.to_local() if isinstance(w, DTensor) else w for w in (self.up, self.down))
        outputs = self.of_some(tokens, first, up, down)
        return reduce_scatter_tensor_autograd(outputs, "sum", 0, self.mesh)

    def of_some(self, tokens, first, ups, downs):
        chosen = torch.arange(len(tokens), device=tokens.device) % self.count
        outputs = torch.zeros_like(tokens)
        for number, (up, down) in enumerate(zip(ups, downs, strict=True), first):
            made = nn.functional.gelu(tokens @ up) @ down
            outputs = outputs + torch.where((chosen == number)[:, None], made, 0.0)
        return outputs


class Small(nn.Module):
    """Embedding, two layers, a norm, a head.

    experts: as many are in the second layer, if any.
    ties: the head has the embedding's weight.
    leaves_out: each second forward passes over the first layer, which gets no gradients then.
    """

    def __init__(self, experts=0, ties=False, leaves_out=False):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        second = Experts(experts) if experts else Perceptron()
        self.layers = nn.ModuleList([Perceptron(), second])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        if ties:
            self.head.weight = self.embedding.weight
        self.leaves_out, self.forwards = leaves_out, 0

    def forward(self, tokens):
        values = self.embedding(tokens)
        first = self.forwards % 2 if self.leaves_out else 0
        self.forwards += 1
        for layer in self.layers[first:]:
            values = layer(values)
        return self.head(self.norm(values))


# --- how models are sharded: the model, and this rank's place (ranks of one get the same tokens)


def by_layers(model, device, sizes=None, **options):
    """Each layer, and all else with the model.

    sizes: of the mesh; two make copies of shards (HSDP).
    options: fully_shard's.
    """
    sizes = sizes or (dist.get_world_size(),)
    mesh = init_device_mesh(device, sizes, mesh_dim_names=("replicate", "shard")[-len(sizes) :])
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options), dist.get_rank()


def root_alone(model, device):
    return fully_shard(model, mesh=init_device_mesh(device, (2,))), dist.get_rank()


def norms_apart(model, device):
    """Norms by themselves: FSDP2 takes one dtype in what it gathers together."""
    mesh = init_device_mesh(device, (2,))
    for norm in (model.layers[0].norm, model.layers[1].norm, model.norm):
        fully_shard(norm, mesh=mesh)
    return by_layers(model, device)


def by_columns(model, device):
    """Matrices by columns where these are even, which torch asks for; all else by rows."""

    def place(param):
        return Shard(1) if param.dim() == 2 and param.shape[1] % 2 == 0 else None

    return by_layers(model, device, shard_placement_fn=place)


def with_tensor_parallel(model, device):
    """2 x 2: the matrices of layers by tensor parallelism, then everything by FSDP2."""
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    return over_tensor_parallel(model, device, {}, plan)


def with_sequence_parallel(model, device):
    """2 x 2: norms have copies, and the vocabulary is split unevenly before FSDP2 splits it."""
    norm, rows = SequenceParallel(sequence_dim=0), Shard(0)
    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=rows),
        "norm": norm,
        "head": ColwiseParallel(input_layouts=rows, output_layouts=Replicate()),
    }
    of_layers = {
        "norm": norm,
        "up": ColwiseParallel(input_layouts=rows),
        "down": RowwiseParallel(output_layouts=rows),
    }
    return over_tensor_parallel(model, device, plan, of_layers)


def over_tensor_parallel(model, device, plan, of_layers):
    mesh = init_device_mesh(device, (2, 2), mesh_dim_names=("data", "tensor"))
    parallelize_module(model, mesh["tensor"], plan)
    for layer in model.layers:
        parallelize_module(layer, mesh["tensor"], of_layers)
        fully_shard(layer, mesh=mesh["data"])
    return fully_shard(model, mesh=mesh["data"]), mesh.get_local_rank("data")


def beside_experts(model, device):
    """2 ranks: each has some of the experts whole, and FSDP2 shards all else."""
    mesh = init_device_mesh(device, (2,), mesh_dim_names=("experts",))
    experts = split_experts(model.layers[1], mesh)
    fully_shard(model.layers[0], mesh=mesh)
    ignored = set(experts.parameters())
    return fully_shard(model, mesh=mesh, ignored_params=ignored), dist.get_rank()


def sharded_experts(model, device):
    """2 x 2, as torchtitan: FSDP2 shards experts over two ranks that have them, the rest over 4."""
    mesh = init_device_mesh(device, (2, 2), mesh_dim_names=("shard", "experts"))
    fully_shard(split_experts(model.layers[1], mesh["experts"]), mesh=mesh["shard"])
    everyone = mesh._flatten("everyone")
    fully_shard(model.layers[0], mesh=everyone)
    return fully_shard(model, mesh=everyone), dist.get_rank()


def split_experts(experts, mesh):
    """Experts of which each rank of the mesh has some."""
    for name, param in list(experts.named_parameters()):
        part = distribute_tensor(param.detach(), mesh, [Shard(0)], src_data_rank=None)
        setattr(experts, name, nn.Parameter(part))
    experts.mesh = mesh
    return experts


def compiled_by_layers(model, device):
    torch._dynamo.reset()  # after some models it would compile no more
    for index, layer in enumerate(model.layers):
        model.layers[index] = torch.compile(layer, backend="aot_eager")
    return by_layers(model, device)


def compiled_whole(model, device):
    torch._dynamo.reset()
    model, place = by_layers(model, device)
    return torch.compile(model, backend="eager"), place


# --- uses


class Use(NamedTuple):
    """A way in which people shard a model and train it."""

    shard: Callable = by_layers
    ranks: int = 2
    weights: torch.dtype = FP32
    backwards: int = 1
    """Micro-batches of a step, of which the last alone sums gradients over ranks."""
    model: Callable = Small


MIXED = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)
COPIES = partial(by_layers, sizes=(2, 2))
USES = {
    "layers": Use(),
    "root alone": Use(root_alone),
    "not resharded": Use(partial(by_layers, reshard_after_forward=False)),
    "resharded over 2": Use(partial(by_layers, reshard_after_forward=2), ranks=4),
    "norms apart": Use(norms_apart),
    "columns": Use(by_columns),
    "tied": Use(model=partial(Small, ties=True)),
    "left out": Use(model=partial(Small, leaves_out=True)),
    "mixed": Use(partial(by_layers, mp_policy=MIXED)),
    "mixed, bf16": Use(partial(by_layers, mp_policy=MIXED), weights=BF16),
    "micro-batches": Use(backwards=3),
    "micro-batches, bf16": Use(partial(by_layers, mp_policy=MIXED), weights=BF16, backwards=3),
    "copies": Use(COPIES, ranks=4),
    "copies, micro-batches": Use(COPIES, ranks=4, backwards=2),
    "tensor parallel": Use(with_tensor_parallel, ranks=4),
    "tensor parallel, bf16": Use(with_tensor_parallel, ranks=4, weights=BF16),
    "sequence parallel": Use(with_sequence_parallel, ranks=4),
    "experts": Use(beside_experts, model=partial(Small, experts=3)),
    "experts, bf16": Use(beside_experts, weights=BF16, model=partial(Small, experts=3)),
    "sharded experts": Use(sharded_experts, ranks=4, model=partial(Small, experts=6)),
    "uneven experts": Use(sharded_experts, ranks=4, model=partial(Small, experts=5)),
    "compiled layers": Use(compiled_by_layers),
    "compiled": Use(compiled_whole),
}


class Run(NamedTuple):
    """A model under FSDP2, and the optimizers of its parameters."""

    use: Use
    model: nn.Module
    optimizers: list[torch.optim.Optimizer]
    place: int
    """Ranks of one place get the same tokens."""
    device: str


def started(use, kind, device="cpu", seed=0, several=False):
    """A run of a new model; several: matrices of layers have another optimizer than the rest."""
    use = USES[use]
    torch.manual_seed(seed)
    model, place = use.shard(use.model().to(device, use.weights), device)
    optimizers = optimizers_of(kind, dict(model.named_parameters()), several)
    return Run(use, model, optimizers, place, device)


def optimizers_of(kind, named, several=False):
    """One of all named parameters, or, with several, FusedAdam of those that are outside layers."""
    kind, options = OPTIMIZERS[kind]
    in_layers = {n: p for n, p in named.items() if ".layers." in f".{n}" and p.dim() > 1}
    matrices = {"params": list(in_layers.items())}
    others = {"params": [(n, p) for n, p in named.items() if n not in in_layers]}
    if kind is FusedAdam and next(iter(named.values())).dtype == BF16:
        options = {**options, **REMAINDERS}
    if kind is GaLoreAdamW:
        matrices["rank"] = 3
    if several:
        return [kind([matrices], lr=0.01, **options), FusedAdam([others], dtype=FP32)]
    if kind is FusedMuon:
        others["use_muon"] = False
    return [kind([matrices, others], lr=0.01, **options)]


def backward(run, step):
    """The losses of a step's micro-batches; gradients are there then."""
    losses = []
    for number in range(run.use.backwards):
        run.model.set_requires_gradient_sync(number == run.use.backwards - 1)
        chance = torch.Generator().manual_seed(100 * step + 10 * number + run.place)
        tokens = torch.randint(VOCABULARY, (8,), generator=chance).to(run.device)
        loss = nn.functional.cross_entropy(run.model(tokens).float(), (3 * tokens) % VOCABULARY)
        loss.backward()
        losses.append(loss.detach())
    return losses


def take_step(optimizers, step):
    """Each second step measures the norm, for which ranks meet otherwise."""
    for optimizer in optimizers:
        optimizer.step(clip_norm=0.5 if step % 2 else None)


def snapshots(optimizers):
    return on_cpu([snapshot(optimizer) for optimizer in optimizers])


class Alone:
    """Whole weights and the optimizers of one process; a run's gradients step them."""

    def __init__(self, kind, run):
        named = run.model.named_parameters()
        self.named = {name: nn.Parameter(whole(param)) for name, param in named}
        self.optimizers = optimizers_of(kind, self.named, len(run.optimizers) > 1)

    def step(self, run, step):
        for name, param in run.model.named_parameters():
            self.named[name].grad = whole(param.grad) if param.grad is not None else None
        take_step(self.optimizers, step)


def stepped(run, alone, steps):
    """Takes steps with both, after each of which they have the same bits; the run's losses."""
    losses = []
    for step in steps:
        losses += backward(run, step)
        alone.step(run, step)
        take_step(run.optimizers, step)
        assert_same(snapshots(run.optimizers), snapshots(alone.optimizers), f"step {step}")
        run.model.zero_grad()
    return losses


def stepped_beside_one(use, kind, device="cpu"):
    """The names of parameters that are no DTensors, or that no step has moved: none."""
    run = started(use, kind, device)
    alone = Alone(kind, run)
    before = {name: whole(param) for name, param in alone.named.items()}
    stepped(run, alone, range(4))
    return [
        name
        for name, param in run.model.named_parameters()
        if not isinstance(param, DTensor) or torch.equal(whole(param), before[name])
    ]


# --- checkpoints


def content_of(run, options):
    weights, states = get_state_dict(run.model, run.optimizers, options=options)
    return {"model": weights, "optimizer": states}


def load(run, folder, options):
    content = content_of(run, options)
    dcp.load(content, checkpoint_id=folder)
    states = {"model_state_dict": content["model"], "optim_state_dict": content["optimizer"]}
    set_state_dict(run.model, run.optimizers, **states, options=options)


def resumed_beside_one(use, kind, folder, is_async=False, several=False, flat=False, device="cpu"):
    """Saves after two steps, takes two more, and these again with what is made anew and loads.

    is_async: the two are taken while the checkpoint is written.
    flat: of the optimizers' state dict.

    Returns the losses of the two steps, from one run and the other.
    """
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    run = started(use, kind, device, several=several)
    alone = Alone(kind, run)
    stepped(run, alone, range(2))
    saved, content = snapshots(run.optimizers), content_of(run, options)
    if is_async:
        group = dist.new_group(backend="gloo")
        writing = dcp.async_save(content, checkpoint_id=folder, process_group=group)
        losses = stepped(run, alone, range(2, 4))
        writing.result()
        dist.destroy_process_group(group)
    else:
        dcp.save(content, checkpoint_id=folder)
        losses = stepped(run, alone, range(2, 4))
    other = started(use, kind, device, seed=1, several=several)
    load(other, folder, options)
    assert_same(snapshots(other.optimizers), saved, "what was loaded")
    again = []
    for step in range(2, 4):
        again += backward(other, step)
        take_step(other.optimizers, step)
        other.model.zero_grad()
    assert_same(snapshots(other.optimizers), snapshots(alone.optimizers), "the end")
    return on_cpu(losses), on_cpu(again)
