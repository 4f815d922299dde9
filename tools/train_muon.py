"""Trains GPTs by Muon: torch's, ours with momentum of 32 and of 8 bits, ours in fp16; and by AdamW.

    python tools/train_muon.py run SEED_0.json --seed 0 --model 30M    # on a GPU, one file a seed
    python tools/train_muon.py join RECORD.json PICTURE.png SEED_0.json ...    # of one model

tools/trained_gpt.py says what text this is. All weights are fp32, as torch.optim.Muon has no
masters. Muon steps the blocks' matrices, by AdamW's learning rate and decay ("match_rms_adamw");
FusedAdam steps embeddings and norms of all kinds.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import trained_gpt
from trained_gpt import Kind, main

from megaopt import FusedAdam, FusedMuon
from megaopt.commands.config import ModelConfig

SIZES: dict[str, int] = {"heads": 8, "context": 512, "vocabulary_size": 256}
MODELS = {
    "30M": ModelConfig(layers=9, width=512, **SIZES),
    "60M": ModelConfig(layers=12, width=640, **SIZES),
}
BETAS = (0.9, 0.99)
EMBEDDINGS = 2
"""The first matrices of a model."""
MUON: dict[str, Any] = {"adjust_lr_fn": "match_rms_adamw"}

Groups = list[dict[str, Any]]


def parted(groups: Groups) -> tuple[Groups, Groups]:
    """Groups of the blocks' matrices, and of all others."""
    matrices, norms = groups
    params = matrices["params"]
    others = [{**matrices, "params": params[:EMBEDDINGS]}, norms]
    return [{**matrices, "params": params[EMBEDDINGS:]}], others


def ours(options: dict[str, Any], groups: Groups, seed: int) -> FusedMuon:
    """FusedMuon with these options."""
    own, others = parted(groups)
    all_groups = [*own, *({**each, "use_muon": False} for each in others)]
    return FusedMuon(all_groups, betas=BETAS, seed=seed, **MUON, **options)


class Theirs:
    """torch.optim.Muon, and FusedAdam for the rest."""

    def __init__(self, groups: Groups, seed: int) -> None:
        own, others = parted(groups)
        (matrices,) = own
        self._both = (
            torch.optim.Muon(matrices["params"], weight_decay=matrices["weight_decay"], **MUON),
            FusedAdam(others, betas=BETAS, seed=seed),
        )

    @property
    def param_groups(self) -> Groups:
        """Of both."""
        return [group for each in self._both for group in each.param_groups]

    def step(self) -> None:
        """A step of both."""
        for each in self._both:
            each.step()

    def zero_grad(self) -> None:
        """Of both."""
        for each in self._both:
            each.zero_grad()


def adamw(groups: Groups, seed: int) -> FusedAdam:
    """AdamW of all."""
    return FusedAdam(groups, betas=BETAS, seed=seed)


KINDS: dict[str, Kind] = {
    "torch.optim.Muon": Theirs,
    "ours": partial(ours, {}),
    "ours, 8-bit momentum": partial(ours, {"momentum_buffer_dtype": "block_int8"}),
    "ours, fp16 by shape": partial(ours, {"precision": "fp16"}),
    "AdamW": adamw,
}

if __name__ == "__main__":
    trained_gpt.ALL_FP32, trained_gpt.BAND = True, "torch.optim.Muon"
    trained_gpt.STEPS, trained_gpt.BATCH = 1000, 8
    main(__doc__, KINDS, models=MODELS)
