"""Trains one GPT with fp8 weights, with fp32 masters and without: what that costs in loss.

    python tools/train_float8.py run SEED_0.json --seed 0     # on a GPU, one file a seed
    python tools/train_float8.py join RECORD.json PICTURE.png SEED_0.json ...

tools/trained_gpt.py says what model and text these are. In fp8 are the weights of linear layers;
embeddings stay bf16, norms fp32. Kinds are named by weights, what is kept of them, and moments.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from train_masters import ROUNDED, master, ours
from train_moments import EIGHT
from trained_gpt import Kind, main

from megaopt import FusedAdam, to_float8


@dataclass(frozen=True)
class Training:
    """One kind: the recipe of linear layers' weights, None for bf16, and FusedAdam's options."""

    options: dict[str, Any]
    recipe: str | None = None

    def prepare(self, model: torch.nn.Module) -> None:
        """Makes the weights of linear layers fp8, before there is an optimizer."""
        if self.recipe is not None:
            to_float8(model, self.recipe)

    def __call__(self, groups: list[dict[str, Any]], seed: int) -> FusedAdam:
        """The optimizer."""
        return ours(self.options, groups, seed)


PAIRS = master("remainder8_stochastic")
KINDS: dict[str, Kind] = {
    "bf16, fp32 masters": Training(master(torch.float32)),
    "bf16 stochastic, 8-bit moments": Training({**ROUNDED, **EIGHT}),
    "fp8 current, fp32 masters": Training(master(torch.float32), "current"),
    "fp8 current to nearest, no masters": Training({"master_weights": False}, "current"),
    "fp8 current stochastic, 8-bit moments": Training({**ROUNDED, **EIGHT}, "current"),
    "fp8 current remainder8, 8-bit moments": Training({**PAIRS, **EIGHT}, "current"),
    "fp8 mxfp8 stochastic, 8-bit moments": Training({**ROUNDED, **EIGHT}, "mxfp8"),
    "fp8 mxfp8 remainder8, 8-bit moments": Training({**PAIRS, **EIGHT}, "mxfp8"),
    "fp8 delayed stochastic, 8-bit moments": Training({**ROUNDED, **EIGHT}, "delayed"),
    "fp8 delayed remainder8, 8-bit moments": Training({**PAIRS, **EIGHT}, "delayed"),
}

if __name__ == "__main__":
    main(__doc__, KINDS)
