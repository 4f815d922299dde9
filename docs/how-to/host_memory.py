"""Training with moments and masters in host memory, which the step reads and writes over the bus.

python docs/how-to/host_memory.py --folder out [--resume out/step-3.pt]
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from megaopt import FusedAdam, checkpoint, release_gradients

STEPS, SAVED, BATCH = 6, 3, 8
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def build(state_device: str | None = "cpu") -> tuple[nn.Module, FusedAdam]:
    """A model in bf16; exact fp32 masters and 8-bit moments: 4 bytes a parameter on the host."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)).bfloat16().to(DEVICE)
    optimizer = FusedAdam(
        model.parameters(),
        lr=1e-2,
        dtype=torch.float32,
        store_param_remainders=True,
        exp_avg_dtype="block_e4m3",
        exp_avg_sq_dtype="block_e5m3",
        state_device=state_device,
    )
    return model, optimizer


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    """How badly the model gives the step's input back."""
    batch = torch.randn(BATCH, 64, generator=torch.Generator().manual_seed(step))
    own = batch.bfloat16().to(DEVICE)
    return nn.functional.mse_loss(model(own).float(), own.float())


def train(
    folder: Path, resume: Path | None = None, state_device: str | None = "cpu"
) -> tuple[nn.Module, FusedAdam]:
    """Trains up to step STEPS, with checkpoints."""
    folder.mkdir(parents=True, exist_ok=True)
    model, optimizer = build(state_device)
    first = 0
    if resume is not None:
        saved = checkpoint.load(resume)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"]
    release_gradients(model, optimizer)  # steps go on beside the backward pass
    for step in range(first, STEPS):
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        print(f"step {step + 1} loss {loss.item():.6f}")
        if step + 1 in (SAVED, STEPS):
            states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            checkpoint.save(folder / f"step-{step + 1}.pt", {"step": step + 1, **states})
    return model, optimizer


def main(options: Sequence[str] | None = None) -> tuple[nn.Module, FusedAdam]:
    """The run, with these options instead of the command line's."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="for checkpoints")
    parser.add_argument("--resume", type=Path, help="the checkpoint to go on from")
    parser.add_argument("--on-the-card", action="store_true", help="states beside the weights")
    given = parser.parse_args(options)
    return train(given.folder, given.resume, None if given.on_the_card else "cpu")


if __name__ == "__main__":
    main()
