"""FSDP2 with bf16 weights and fp32 masters, saved and resumed on any number of ranks.

    torchrun --nproc-per-node 2 docs/how-to/fsdp2.py checkpoint

trains 6 steps, saving after 3; started again, with another number of ranks say, it goes on from
there. fsdp2.md explains it.
"""

import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.nn import GELU, Embedding, Linear, Sequential

from megaopt import FusedAdam

STEPS, SAVE_AT = 6, 3


def build(device: torch.device) -> tuple[torch.nn.Module, FusedAdam]:
    """A model whose layers are sharded over all ranks, and its optimizer."""
    torch.manual_seed(0)
    model = Sequential(Embedding(256, 32), Linear(32, 64), GELU(), Linear(64, 256)).to(device)
    for layer in (model[0], model[1], model[3], model):
        fully_shard(layer)
    masters = [param.detach().clone() for param in model.parameters()]  # this rank's shards, fp32
    model.bfloat16()  # what is gathered, and what the step writes
    optimizer = FusedAdam(model.parameters(), lr=1e-2, weight_decay=0.1, master_weights=masters)
    return model, optimizer


def contents(model: torch.nn.Module, optimizer: FusedAdam) -> dict[str, object]:
    """The contents of a checkpoint: each rank writes, and reads, its own shards."""
    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }


def resume(model: torch.nn.Module, optimizer: FusedAdam, folder: str) -> int:
    """Takes over the checkpoint, if there is one; the number of steps that were taken."""
    if not os.path.exists(os.path.join(folder, ".metadata")):
        return 0
    saved = contents(model, optimizer)
    dcp.load(saved, checkpoint_id=folder)
    set_model_state_dict(model, saved["model"])
    set_optimizer_state_dict(model, optimizer, saved["optimizer"])
    step: int = optimizer.param_groups[0]["step"]
    return step


def train(folder: str, device: torch.device) -> list[float]:
    """The losses of the steps that were left to take."""
    model, optimizer = build(device)
    losses = []
    for step in range(resume(model, optimizer, folder), STEPS):
        tokens = torch.arange(128, device=device) * (step + 1) % 256  # in a real run, its own
        loss = torch.nn.functional.cross_entropy(model(tokens).float(), (tokens + 1) % 256)
        loss.backward()
        optimizer.step(clip_norm=1.0)  # by the norm over all ranks
        optimizer.zero_grad()
        losses.append(loss.item())
        if step + 1 == SAVE_AT:
            dcp.save(contents(model, optimizer), checkpoint_id=folder)
    return losses


def main() -> None:
    """A rank of torchrun."""
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if on_gpu else "gloo")
    for loss in train(sys.argv[1], torch.device("cuda" if on_gpu else "cpu")):
        if dist.get_rank() == 0:
            print(f"{loss!r}")
    dist.barrier()  # gloo's threads abort a process that exits while they still hold tensors
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
