"""A model under Megatron-FSDP on GPUs, in processes that meet over NCCL."""

import contextlib
import importlib
import io

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from megaopt import FusedAdam

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
