"""torchtitan: FusedAdam or FusedMuon in its optimizer container, with its schedule and checkpoints.

python docs/how-to/torchtitan_container.py --folder out [--muon]

Run again, it goes on from where it ended.
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

from megaopt import FusedAdam, FusedMuon

STEPS, WARMUP, BATCH = 6, 3, 8


OURS = {"FusedAdam": FusedAdam, "FusedMuon": FusedMuon}


class MegaoptContainer(OptimizersContainer[torch.optim.Optimizer]):
    """torchtitan's container, which knows these beside its own optimizers."""

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        """The same fields; it builds this container."""

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Callable[..., torch.optim.Optimizer]:
        return OURS.get(name) or OptimizersContainer._resolve_optimizer_factory(name)


def optimizer_config() -> MegaoptContainer.Config:
    """What goes into a trainer's config as `optimizer`.

    What may differ from group to group stands with the group; what holds for all, as the masters,
    goes to FusedAdam itself.
    """
    decayed = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}
    return MegaoptContainer.Config(
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


def muon_config() -> MegaoptContainer.Config:
    """Muon for the first layer, AdamW for the output layer and biases, in one optimizer."""
    own = {"lr": 1e-2, "weight_decay": 0.1}
    patterns = {r"^2\.|bias$": False, ".*": True}
    return MegaoptContainer.Config(
        param_groups=[
            ParamGroupConfig(
                pattern=pattern,
                optimizer_name="FusedMuon",
                optimizer_kwargs={**own, "use_muon": use_muon, "adjust_lr_fn": "match_rms_adamw"},
            )
            for pattern, use_muon in patterns.items()
        ],
        optimizer_factory_kwargs_by_name={"FusedMuon": {"dtype": torch.float32}},
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


def train(folder: Path, config: MegaoptContainer.Config) -> tuple[nn.Module, MegaoptContainer]:
    """Goes on from the last checkpoint in the folder, if there is one, up to step STEPS."""
    model, progress = build_model(), Progress()
    optimizers = config.build(model_parts=[model])
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


def main(options: Sequence[str] | None = None) -> tuple[nn.Module, MegaoptContainer]:
    """Trains with these options instead of the command line's."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="for checkpoints")
    parser.add_argument("--muon", action="store_true", help="Muon for matrices")
    arguments = parser.parse_args(options)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        return train(arguments.folder, muon_config() if arguments.muon else optimizer_config())
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
