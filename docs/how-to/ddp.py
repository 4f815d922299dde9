"""Plain torch DistributedDataParallel: bf16 weights, fp32 masters, a checkpoint to go on from.

torchrun --nproc-per-node 2 docs/how-to/ddp.py --folder out [--resume out/step-3.pt]
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from megaopt import FusedAdam

STEPS, WARMUP, BATCH = 6, 3, 8


def build_model() -> nn.Module:
    """The same weights on every rank, in bf16."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)).bfloat16()


def batch_of(step: int, rank: int) -> torch.Tensor:
    """Each rank's own (BATCH, 16) in each step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(BATCH, 16, generator=generator).bfloat16()


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """How badly the model gives its input back."""
    return nn.functional.mse_loss(model(batch), batch)


def build_optimizer(
    model: nn.Module,
) -> tuple[FusedAdam, torch.optim.lr_scheduler.LRScheduler]:
    """FusedAdam with fp32 masters of the bf16 weights, and a warmup."""
    optimizer = FusedAdam(model.parameters(), lr=1e-2, weight_decay=0.1, dtype=torch.float32)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.25, 1.0, WARMUP)
    return optimizer, warmup


def train(folder: Path, resume: Path | None = None) -> None:
    """Trains up to step STEPS, with a checkpoint after WARMUP steps and at the end."""
    folder.mkdir(parents=True, exist_ok=True)
    rank = dist.get_rank()
    model = DistributedDataParallel(build_model())
    optimizer, warmup = build_optimizer(model)
    first = 0
    if resume is not None:
        saved = torch.load(resume)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        warmup.load_state_dict(saved["warmup"])
        first = saved["step"]
    for step in range(first, STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, batch_of(step, rank))
        loss.backward()
        optimizer.step()
        warmup.step()
        print(f"rank {rank} step {step + 1} loss {loss.item():.6f}", flush=True)
        if step + 1 in (WARMUP, STEPS):
            state = {
                "step": step + 1,
                "model": model.module.state_dict(),
                "optimizer": optimizer.state_dict(),
                "warmup": warmup.state_dict(),
            }
            # every rank has the same bits: rank 0's are saved; the others' show here that they do
            name = f"step-{step + 1}.pt" if rank == 0 else f"step-{step + 1}-rank-{rank}.pt"
            torch.save(state, folder / name)


def main(options: Sequence[str] | None = None) -> None:
    """What torchrun starts once for each rank, with these options instead of the command line's."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="for checkpoints")
    parser.add_argument("--resume", type=Path, help="the checkpoint to go on from")
    arguments = parser.parse_args(options)
    dist.init_process_group("gloo")
    train(arguments.folder, arguments.resume)
    dist.barrier()  # gloo's threads abort a process that exits while they still hold tensors
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
