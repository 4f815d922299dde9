"""torchtitan: FusedAdam in its optimizer container, with its schedule and its checkpoints.

python docs/how-to/torchtitan_container.py --folder out   (run again, it goes on from there)
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.optimizer import (
    LRSchedulersContainer,
    OptimizersContainer,
    ParamGroupConfig,
)

from megaopt import FusedAdam

STEPS, WARMUP, BATCH = 6, 3, 8


class FusedAdamContainer(OptimizersContainer[FusedAdam]):
    """torchtitan's container, which knows FusedAdam beside its own optimizers."""

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        """The same fields; it builds this container."""

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Callable[..., torch.optim.Optimizer]:
        if name == "FusedAdam":
            return FusedAdam
        return OptimizersContainer._resolve_optimizer_factory(name)


def optimizer_config() -> FusedAdamContainer.Config:
    """What goes into a trainer's config as `optimizer`.

    What may differ from group to group stands with the group; what holds for all, as the masters,
    goes to FusedAdam itself.
    """
    decayed = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}
    return FusedAdamContainer.Config(
        param_groups=[
            ParamGroupConfig(
                pattern="bias$",
                optimizer_name="FusedAdam",
                optimizer_kwargs={**decayed, "weight_decay": 0.0},
            ),
            ParamGroupConfig(pattern=".*", optimizer_name="FusedAdam", optimizer_kwargs=decayed),
        ],
        optimizer_factory_kwargs_by_name={"FusedAdam": {"dtype": torch.float32}},
    )


def build_model() -> nn.Module:
    """The same weights every time, in bf16."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)).bfloat16()


def batch_of(step: int) -> torch.Tensor:
    """Of shape (BATCH, 16)."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(BATCH, 16, generator=generator).bfloat16()


class Progress:
    """How many steps were taken: part of the checkpoint, as torchtitan's trainer is."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"step": torch.tensor(self.step)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """From a checkpoint."""
        self.step = int(state_dict["step"])


def train(folder: Path) -> tuple[nn.Module, FusedAdamContainer]:
    """Goes on from the last checkpoint in the folder, if there is one, up to step STEPS."""
    model, progress = build_model(), Progress()
    optimizers = optimizer_config().build(model_parts=[model])
    schedule = LRSchedulersContainer.Config(warmup_steps=WARMUP, decay_type="cosine").build(
        optimizers=optimizers, training_steps=STEPS
    )
    checkpoints = CheckpointManager.Config(
        enable=True, interval=WARMUP, last_save_model_only=False, keep_latest_k=0
    ).build(
        dataloader=None,
        model_parts=[model],
        optimizers=optimizers,
        lr_schedulers=schedule,
        states={"train_state": progress},
        sd_adapter=None,
        base_folder=str(folder),
    )
    checkpoints.load()
    while progress.step < STEPS:
        batch = batch_of(progress.step)
        optimizers.zero_grad()
        loss = nn.functional.mse_loss(model(batch), batch)
        loss.backward()
        optimizers.step()
        schedule.step()
        progress.step += 1
        print(f"step {progress.step} loss {loss.item():.6f}")
        checkpoints.save(progress.step, last_step=progress.step == STEPS)
    checkpoints.close()
    return model, optimizers


def main(options: Sequence[str] | None = None) -> tuple[nn.Module, FusedAdamContainer]:
    """Trains with these options instead of the command line's."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="for checkpoints")
    arguments = parser.parse_args(options)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        return train(arguments.folder)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
