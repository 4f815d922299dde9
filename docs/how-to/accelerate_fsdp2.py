"""Accelerate with FSDP2: bf16 weights and fp32 masters in shards, a checkpoint to go on from.

torchrun --nproc-per-node 2 docs/how-to/accelerate_fsdp2.py --folder out [--resume out/step-3]
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch import nn

from megaopt import FusedAdam, FusedMuon

STEPS, WARMUP, BATCH, WIDTH = 6, 3, 8, 128
OPTIMIZERS = {
    "adam": (FusedAdam, {"dtype": torch.float32}),
    "adam_8_bit": (
        FusedAdam,
        {
            "dtype": torch.float32,
            "store_param_remainders": True,
            "exp_avg_dtype": "block_e4m3",
            "exp_avg_sq_dtype": "block_e5m3",
        },
    ),
    "muon": (FusedMuon, {"dtype": torch.float32}),
}
"""Masters in each; moments of 8 bits and masters in 2 bytes; Muon for the matrices."""


def build_model() -> nn.Module:
    """The same weights on every rank, in bf16."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)).bfloat16()


def batch_of(step: int, rank: int) -> torch.Tensor:
    """Each rank's own (BATCH, WIDTH) in each step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(BATCH, WIDTH, generator=generator).bfloat16()


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """How badly the model gives its input back."""
    return nn.functional.mse_loss(model(batch), batch)


def build_optimizer(
    model: nn.Module, kind: str = "adam"
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """The optimizer of whole parameters, whose place `prepare` gives to shards, and a warmup."""
    make, options = OPTIMIZERS[kind]
    hidden, *others = model.parameters()
    groups: list[dict[str, Any]] = [{"params": [hidden]}, {"params": others}]
    if kind == "muon":  # AdamW steps the output layer, and biases
        for group, use_muon in zip(groups, (True, False), strict=True):
            group["use_muon"] = use_muon
    optimizer = make(groups, lr=1e-2, weight_decay=0.1, **options)
    return optimizer, torch.optim.lr_scheduler.LinearLR(optimizer, 0.25, 1.0, WARMUP)


def build_accelerator() -> Accelerator:
    """FSDP2 on GPUs. On CPUs Accelerate does not shard: there it is DistributedDataParallel."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="no_wrap", cpu_ram_efficient_loading=False
    )
    # no mixed_precision: Accelerate would make the weights fp32, which are their own masters
    return Accelerator(cpu=not torch.cuda.is_available(), fsdp_plugin=plugin)


def train(folder: Path, resume: Path | None, kind: str) -> None:
    """Trains up to step STEPS, with a checkpoint after WARMUP steps and at the end."""
    accelerator = build_accelerator()
    plain = build_model()
    optimizer, warmup = build_optimizer(plain, kind)
    model, optimizer = accelerator.prepare(plain, optimizer)
    accelerator.register_for_checkpointing(warmup)
    first = 0
    if resume is not None:
        accelerator.load_state(resume)
        first = warmup.last_epoch
    for step in range(first, STEPS):
        batch = batch_of(step, accelerator.process_index).to(accelerator.device)
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        accelerator.backward(loss)
        optimizer.step()
        warmup.step()
        accelerator.print(f"step {step + 1} loss {loss.item():.6f}", flush=True)
        if step + 1 in (WARMUP, STEPS):
            accelerator.save_state(folder / f"step-{step + 1}")
    accelerator.end_training()


def main(options: Sequence[str] | None = None) -> None:
    """What torchrun starts once for each rank, with these options instead of the command line's."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="for checkpoints")
    parser.add_argument("--resume", type=Path, help="the checkpoint to go on from")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adam")
    arguments = parser.parse_args(options)
    train(arguments.folder, arguments.resume, arguments.optimizer)


if __name__ == "__main__":
    main()
