"""Megatron-Core on GPUs: captured steps, states in host memory, FusedAdam in Megatron-FSDP."""

import contextlib
import importlib
import io
import json
import multiprocessing

import pytest
import torch
import torch.distributed as dist
from how_to import needs
from tiny_runs import tiny_run, variant
from torch.distributed.device_mesh import init_device_mesh

from megaopt import FusedAdam
from megaopt.commands.regression.command import regress

# A model under Megatron-FSDP on GPUs, in processes that meet over NCCL.

HYPER = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}


def inner(kind, params):
    if kind == "torch":
        return torch.optim.AdamW(params, fused=True, **HYPER)
    return FusedAdam(params, contract="torch", **HYPER)


def run(rank, world, kind, meeting, replies):
    """Steps of one inner optimizer; what this rank has of weights and states is sent back."""
    torch.cuda.set_device(rank)
    with contextlib.redirect_stdout(io.StringIO()):
        dist.init_process_group("nccl", f"file://{meeting}", world_size=world, rank=rank)
        try:
            replies.put((rank, train(rank, world, kind)))
        finally:
            dist.destroy_process_group()


def train(rank, world, kind):
    name = "megatron.core.distributed.fsdp.src.megatron_fsdp.fully_shard"
    sharding = importlib.import_module(name)
    torch.manual_seed(0)
    layers = [torch.nn.Linear(32, 48), torch.nn.GELU(), torch.nn.Linear(48, 9)]
    model = sharding.fully_shard_model(
        torch.nn.Sequential(*layers).bfloat16().cuda(),
        device_mesh=init_device_mesh("cuda", (world, 1), mesh_dim_names=("dp", "tp")),
        dp_shard_dim="dp",
        tp_dim="tp",
        fsdp_unit_modules=[torch.nn.Linear],
        zero_dp_strategy=3,
    )
    optimizer = sharding.fully_shard_optimizer(inner(kind, model.parameters()))
    losses = []
    for step in range(4):
        generator = torch.Generator().manual_seed(10 * step + rank)
        batch = torch.randn(8, 32, generator=generator).bfloat16().cuda()
        loss = model(batch).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return {
        "losses": losses,
        "weights": [local(param) for param in params],
        "exp_avg": [local(optimizer.state[p]["exp_avg"]) for p in params if p in optimizer.state],
    }


def local(tensor):
    own = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return own.detach().float().cpu().numpy().tobytes()


pytestmark = [pytest.mark.gpu, pytest.mark.long, needs("megatron")]
STOCK = tiny_run(
    8,
    batch_size=4,
    device="cuda",
    optimizer="warmup_steps = 2\nbeta2 = 0.95\nweight_decay = 0.1",
    megatron="ranks = 1\nmicro_batch_size = 2\nbucket_size = 2500\nclip_grad = 0.1",
) + variant("stock", "stock", inner="transformer_engine")


def ours(name, baseline="stock", **keys):
    return variant(name, "megaopt", baseline=baseline, contract="te", **keys)


GRAPHS = ours("eager") + ours("graph", cuda_graph=True)
GRAPHS += ours("precision_aware_graph", mode="precision_aware", cuda_graph=True)
HOST = {"cpu_offload": True, "resume_after": 4}
BLOCKS = {"exp_avg_dtype": "block_e4m3", "exp_avg_sq_dtype": "block_e5m3"}
FORMATS = {
    "bf16": dict.fromkeys(BLOCKS, "bfloat16"),
    "8 bits": {"store_param_remainders": True, **BLOCKS},
}


def regressed(folder, variants):
    """Stock and these variants, in one run of the command, by name."""
    (folder / "tiny.toml").write_text(STOCK + variants, encoding="utf-8")
    regress(folder / "tiny.toml", out=folder / "out")
    record = json.loads((folder / "out" / "tiny" / "record.json").read_text(encoding="utf-8"))
    return record["variants"]


def assert_as_their_baselines(found, *names):
    told = {name: (found[name]["failure"], found[name]["identical"]) for name in names}
    assert told == dict.fromkeys(names, (None, True))


@needs("transformer_engine")
def test_a_captured_step_has_the_bits_of_transformer_engines_eager_one(tmp_path):
    """Over Megatron's own wrapper, with its norm on the device; clipped."""
    found = regressed(tmp_path, GRAPHS)
    assert_as_their_baselines(found, "eager", "graph", "precision_aware_graph")
    assert len(set(found["stock"]["losses"])) == 8


@needs("transformer_engine")
def test_states_in_host_memory_have_the_bits_of_stocks_and_are_resumed(tmp_path):
    """Moments, and all states; straight, and from Megatron's checkpoint after step 4."""
    hosts = ours("straight", cpu_offload=True) + ours("main_shards", **HOST)
    hosts += ours("precision_aware", mode="precision_aware", **HOST)
    found = regressed(tmp_path, hosts)
    assert_as_their_baselines(found, "straight", "main_shards", "precision_aware")


@needs("transformer_engine")
@pytest.mark.parametrize("name", FORMATS)
def test_moments_of_fewer_bits_in_host_memory_have_the_bits_of_the_card(tmp_path, name):
    """All states, resumed from Megatron's checkpoint after step 4."""
    formats = {"mode": "precision_aware", **FORMATS[name]}
    on_card = variant("card", "megaopt", contract="te", **formats)
    found = regressed(tmp_path, on_card + ours("host", "card", **formats, **HOST))
    assert_as_their_baselines(found, "host")
    assert found["card"]["losses"] != found["stock"]["losses"]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_fused_adam_in_megatron_fsdp_has_torchs_bits(tmp_path):
    """Its DTensors are cut unevenly; contract torch is torch's fused AdamW."""
    context, found = multiprocessing.get_context("spawn"), {}
    for kind in ("torch", "megaopt"):
        replies = context.Queue()
        ranks = [
            context.Process(target=run, args=(rank, 2, kind, tmp_path / kind, replies))
            for rank in range(2)
        ]
        for rank in ranks:
            rank.start()
        found[kind] = dict(replies.get(timeout=120) for _ in ranks)
        for rank in ranks:
            rank.join(60)
    assert found["torch"] == found["megaopt"]
    assert len(set(found["torch"][0]["losses"])) == 4
    assert any(found["torch"][0]["exp_avg"])
