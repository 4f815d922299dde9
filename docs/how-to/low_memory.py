"""Training with 7 bytes a parameter: a 24-bit master, bf16 moments, gradients that are freed.

python docs/how-to/low_memory.py --folder out [--resume out/step-3.pt]
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megaopt import (
    FusedAdam,
    cast_model,
    checkpoint,
    get_fp32_model_state_dict,
    release_gradients,
)

STEPS, SAVED, BATCH = 6, 3, 8
OPTIONS: dict[str, Any] = {
    "lr": 1e-2,
    "master_weights": True,
    "master_weight_dtype": "remainder8_stochastic",
    "exp_avg_dtype": "bfloat16_stochastic",
    "exp_avg_sq_dtype": "bfloat16_stochastic",
    "seed": 0,
}


def build() -> tuple[nn.Module, FusedAdam]:
    """A model in bf16 but for its norm, with the bits that the cast drops in the masters."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 16))
    optimizer = FusedAdam(model.parameters(), **OPTIONS)
    cast_model(model, torch.bfloat16, optimizer=optimizer)
    return model, optimizer


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    """How badly the model gives the step's input back."""
    batch = torch.randn(BATCH, 16, generator=torch.Generator().manual_seed(step)).bfloat16()
    return nn.functional.mse_loss(model(batch).float(), batch.float())


def train(folder: Path, resume: Path | None = None) -> tuple[nn.Module, FusedAdam]:
    """Trains up to step STEPS, with checkpoints, and leaves the fp32 weights in weights.pt."""
    folder.mkdir(parents=True, exist_ok=True)
    model, optimizer = build()
    first = 0
    if resume is not None:
        saved = checkpoint.load(resume)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"]
    release_gradients(model, optimizer)
    for step in range(first, STEPS):
        loss = loss_of(model, step)
        loss.backward()  # steps each parameter, and frees its gradient
        optimizer.step()  # counts the step
        print(f"step {step + 1} loss {loss.item():.6f}")
        if step + 1 in (SAVED, STEPS):
            states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            checkpoint.save(folder / f"step-{step + 1}.pt", {"step": step + 1, **states})
    checkpoint.save(folder / "weights.pt", dict(get_fp32_model_state_dict(model, optimizer)))
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
