"""Lightning: bf16 weights, fp32 masters, a checkpoint to go on from.

python docs/how-to/lightning_trainer.py --folder out [--muon] [--resume out/epoch=0.ckpt]
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader

from megaopt import FusedAdam, FusedMuon

EPOCHS, BATCHES, BATCH, WARMUP = 2, 3, 8, 4


class Model(LightningModule):
    """Gives its input back; how badly it does is its loss."""

    def __init__(self, muon: bool = False) -> None:
        super().__init__()
        self.muon = muon
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        """The loss of a batch of shape (BATCH, 16)."""
        loss = nn.functional.mse_loss(self.layers(batch), batch)
        print(f"step {self.global_step + 1} loss {loss.item():.6f}")
        return loss

    def configure_optimizers(self) -> dict[str, Any]:
        """FusedAdam or FusedMuon with fp32 masters of the bf16 weights, and a warmup."""
        options = {"lr": 1e-2, "weight_decay": 0.1, "dtype": torch.float32}
        optimizer: torch.optim.Optimizer
        if self.muon:
            self.layers[2].weight.use_muon = False  # AdamW steps the output layer, and biases
            options["adjust_lr_fn"] = "match_rms_adamw"
            optimizer = FusedMuon(self.parameters(), **options)
        else:
            optimizer = FusedAdam(self.parameters(), **options)
        warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.25, 1.0, WARMUP)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": warmup, "interval": "step"},
        }


def batches() -> DataLoader[torch.Tensor]:
    """BATCHES of shape (BATCH, 16), the same in every epoch."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(BATCHES * BATCH, 16, generator=generator)
    return DataLoader(rows, batch_size=BATCH)


def build_trainer(folder: Path) -> Trainer:
    """Weights in bf16, a checkpoint after every epoch."""
    return Trainer(
        precision="bf16-true",
        max_epochs=EPOCHS,
        gradient_clip_val=1.0,
        accelerator="cpu",
        callbacks=[ModelCheckpoint(folder, "{epoch}", save_top_k=-1)],
        logger=False,
        enable_progress_bar=False,
    )


def main(options: Sequence[str] | None = None) -> Model:
    """Trains with these options instead of the command line's."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="for checkpoints")
    parser.add_argument("--resume", help="the checkpoint to go on from")
    parser.add_argument("--muon", action="store_true", help="Muon for matrices")
    arguments = parser.parse_args(options)
    model = Model(arguments.muon)
    trainer = build_trainer(arguments.folder)
    trainer.fit(model, batches(), ckpt_path=arguments.resume)
    return model


if __name__ == "__main__":
    main()
