"""A plain PyTorch loop: autocast, GradScaler, clipping, a warmup, a checkpoint to go on from.

python docs/how-to/torch_loop.py --folder out [--resume out/step-3.pt]
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megaopt import FusedAdam, checkpoint

STEPS, WARMUP, BATCH = 6, 3, 8
OPTIONS: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.01}


def build_model() -> nn.Module:
    """The same fp32 weights each time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))


def batch_of(step: int) -> torch.Tensor:
    """(BATCH, 16), the step's own."""
    return torch.randn(BATCH, 16, generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """How badly the model gives its input back; products in fp16."""
    with torch.autocast("cpu", dtype=torch.float16):
        return nn.functional.mse_loss(model(batch).float(), batch)


def from_torch(model: nn.Module, theirs: torch.optim.AdamW) -> FusedAdam:
    """Goes on where torch's AdamW stopped: moments, step counts, lr, weight decay."""
    optimizer = FusedAdam(model.parameters(), **OPTIONS)
    optimizer.load_state_dict(theirs.state_dict())
    return optimizer


def to_torch(model: nn.Module, ours: FusedAdam) -> torch.optim.AdamW:
    """And back."""
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIONS)
    optimizer.load_state_dict(ours.to_torch_state_dict())
    return optimizer


def in_bf16(model: nn.Module, ours: FusedAdam) -> FusedAdam:
    """The same run with moments in bf16: a state dict alone does not change its formats."""
    moments = {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16}
    optimizer = FusedAdam(model.parameters(), **OPTIONS, **moments)
    optimizer.load_state_dict(ours.to_torch_state_dict())
    return optimizer


def train(folder: Path, resume: Path | None = None) -> tuple[nn.Module, FusedAdam]:
    """Trains up to step STEPS, with a checkpoint after WARMUP steps and at the end."""
    folder.mkdir(parents=True, exist_ok=True)
    model = build_model()
    optimizer = FusedAdam(model.parameters(), **OPTIONS)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.25, 1.0, WARMUP)
    scaler = torch.amp.GradScaler("cpu")
    parts = {"model": model, "optimizer": optimizer, "warmup": warmup, "scaler": scaler}
    first = 0
    if resume is not None:
        saved = checkpoint.load(resume)
        for name, part in parts.items():
            part.load_state_dict(saved[name])
        first = saved["step"]
    for step in range(first, STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, batch_of(step))
        scaler.scale(loss).backward()
        scaler.step(optimizer, clip_norm=0.5)
        scaler.update()
        warmup.step()
        print(f"step {step + 1} loss {loss.item():.6f} scale {scaler.get_scale():g}")
        if step + 1 in (WARMUP, STEPS):
            states = {name: part.state_dict() for name, part in parts.items()}
            checkpoint.save(folder / f"step-{step + 1}.pt", {"step": step + 1, **states})
    return model, optimizer


def main(options: Sequence[str] | None = None) -> tuple[nn.Module, FusedAdam]:
    """The run, with these options instead of the command line's."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="for checkpoints")
    parser.add_argument("--resume", type=Path, help="the checkpoint to go on from")
    arguments = parser.parse_args(options)
    return train(arguments.folder, arguments.resume)


if __name__ == "__main__":
    main()
