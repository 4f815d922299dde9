"""DTensors on a GPU: the kernels, CPU offload, CUDA graphs, on one rank, and two that share it."""

import galore_ranks
import pytest
import torch
from fsdp2_ranks import Bare, assert_same_on_all, give, gradients, snapshot
from galore_ranks import placed_galore
from muon_ranks import placed
from runs import BF16, MASTER, REMAINDERS, assert_same, on_cpu, values
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

from megaopt import FusedAdam, GaLoreAdamW

pytestmark = pytest.mark.gpu
HYPER = {"lr": 0.01, "weight_decay": 0.1}


def give_on_gpu(model, step, dtype):
    give(model.parameters(), [grad.cuda() for grad in gradients(step, dtype=dtype)])


@pytest.mark.parametrize("capturable", [False, True], ids=["host", "capturable"])
@pytest.mark.parametrize("options", [MASTER, REMAINDERS], ids=["masters", "remainders"])
def test_the_kernel_steps_shards_as_the_reference_whole_tensors(gpu_mesh, options, capturable):
    options = {**HYPER, **options, "capturable": capturable}
    model, whole = fully_shard(Bare(dtype=BF16).cuda(), mesh=gpu_mesh), Bare(dtype=BF16)
    own = FusedAdam(model.parameters(), **options)
    expected = FusedAdam(whole.parameters(), **options)
    for step in range(3):
        give_on_gpu(model, step, BF16)
        give(whole.parameters(), gradients(step, dtype=BF16))
        own.step(clip_norm=1.0)
        expected.step(clip_norm=1.0)
    assert_same(on_cpu(snapshot(own)), snapshot(expected))
    assert_same(own.grad_norm.cpu(), expected.grad_norm)


def losses(gpu_mesh, policy):
    torch.manual_seed(0)
    layers = [torch.nn.Linear(6, 10), torch.nn.GELU(), torch.nn.Linear(10, 3)]
    model = fully_shard(torch.nn.Sequential(*layers), mesh=gpu_mesh, offload_policy=policy)
    optimizer = FusedAdam(model.parameters(), **HYPER)
    found = []
    for step in range(4):
        loss = model(values((4, 6), step).cuda()).square().mean()
        loss.backward()
        optimizer.step(clip_norm=0.5)
        optimizer.zero_grad()
        found.append(loss.detach().cpu())
    devices = {
        t.device.type for own in optimizer.state.values() for t in own.values() if t is not None
    }
    return found, devices


def test_offloaded_parameters_are_stepped_on_the_cpu(gpu_mesh):
    offloaded, devices = losses(gpu_mesh, CPUOffloadPolicy())
    assert devices == {"cpu"}
    assert_same(offloaded, losses(gpu_mesh, OffloadPolicy())[0])


def test_a_graph_replays_clipped_steps_of_shards(gpu_mesh):
    options = {**HYPER, "capturable": True}
    models = [fully_shard(Bare().cuda(), mesh=gpu_mesh) for _ in range(2)]
    own, expected = (FusedAdam(model.parameters(), **options) for model in models)
    for model, optimizer in zip(models, (own, expected), strict=True):
        give_on_gpu(model, 0, torch.float32)
        optimizer.step(clip_norm=1.0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        own.step(clip_norm=1.0)
    for _ in range(3):
        graph.replay()
        expected.step(clip_norm=1.0)
    assert_same(snapshot(own), snapshot(expected))


@pytest.mark.parametrize("capturable", [False, True], ids=["host", "capturable"])
def test_galore_steps_shards_as_whole_matrices(gpu_mesh, capturable):
    """All rows on one rank: NCCL's sums are of one part, and products of the same matrices."""
    options = {**galore_ranks.NUMBERS, **galore_ranks.RANKED, **MASTER, "capturable": capturable}
    shapes = galore_ranks.SHAPES
    models = [Bare(shapes, BF16).cuda() for _ in range(2)]
    fully_shard(models[0], mesh=gpu_mesh)
    pair = [GaLoreAdamW(model.parameters(), **options) for model in models]
    for step in range(5):
        for model, optimizer in zip(models, pair, strict=True):
            give(model.parameters(), [g.cuda() for g in gradients(step, shapes, BF16)])
            if capturable:
                optimizer.refresh(steps=step)
            optimizer.step(clip_norm=1.0)
    assert_same(*(on_cpu(snapshot(each)) for each in pair))


OVER_RANKS = {
    "muon": (placed, {"momentum_buffer_dtype": BF16, "second_moment": "normuon"}),
    "muon, fp16": (placed, {**MASTER, "weights": BF16, "precision": "fp16", "method": "auto"}),
    "galore": (placed_galore, {"proj_type": "left", "precision": "bf16"}),
    # in ieee owners take torch's products
    "galore, ieee": (
        placed_galore, {"proj_type": "left", "weights": BF16, "kernel": "torch", **MASTER},
    ),
    "galore, tf32": (
        placed_galore, {"proj_type": "left", "weights": BF16, "precision": "tf32", **MASTER},
    ),
}  # fmt: skip


@pytest.mark.parametrize("placements", ["rows", "by turns"])
@pytest.mark.parametrize("name", OVER_RANKS)
def test_two_ranks_on_one_card_have_the_bits_of_one_process(on_ranks, name, placements):
    """Over gloo, which sends from host memory; matrices are stepped by launches of their owners."""
    made, options = OVER_RANKS[name]
    own = {"clip_norm": 1.0, "device": "cuda"}
    found = on_ranks(2, made, options, 3, placements=placements, sizes=(2,), **own)
    assert_same_on_all(found, made(options, 3, **own))
