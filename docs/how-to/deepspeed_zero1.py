"""DeepSpeed ZeRO-1: FusedAdam steps each rank's part of DeepSpeed's fp32 masters.

torchrun --nproc-per-node 2 docs/how-to/deepspeed_zero1.py --folder out [--resume out/step-3]
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

from megaopt import FusedAdam

STEPS, WARMUP, BATCH = 6, 3, 8
CONFIG = {
    "train_micro_batch_size_per_gpu": BATCH,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 1},
    "zero_allow_untested_optimizer": True,
}


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
    model: nn.Module, *, masters: bool = False
) -> tuple[FusedAdam, torch.optim.lr_scheduler.LRScheduler]:
    """FusedAdam and a warmup; masters are DeepSpeed's unless they are asked for."""
    optimizer = FusedAdam(model.parameters(), lr=1e-2, weight_decay=0.1, master_weights=masters)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / WARMUP))
    return optimizer, warmup


def train(folder: Path, resume: Path | None = None) -> None:
    """Trains up to step STEPS, with a checkpoint after WARMUP steps and at the end."""
    model = build_model()
    optimizer, warmup = build_optimizer(model)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=warmup, config=CONFIG
    )
    if resume is not None:
        engine.load_checkpoint(str(resume.parent), tag=resume.name)
    rank = dist.get_rank()
    for step in range(engine.global_steps, STEPS):
        loss = loss_of(engine, batch_of(step, rank))
        engine.backward(loss)
        engine.step()
        print(f"rank {rank} step {step + 1} loss {loss.item():.6f}", flush=True)
        if step + 1 in (WARMUP, STEPS):
            engine.save_checkpoint(str(folder), tag=f"step-{step + 1}")


def main(options: Sequence[str] | None = None) -> None:
    """What torchrun starts once for each rank, with these options instead of the command line's."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="for checkpoints")
    parser.add_argument("--resume", type=Path, help="the checkpoint to go on from")
    arguments = parser.parse_args(options)
    deepspeed.init_distributed()
    train(arguments.folder, arguments.resume)


if __name__ == "__main__":
    main()
