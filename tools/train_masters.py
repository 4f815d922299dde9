"""Trains one GPT with every kind of master, on real text: what rounding costs in the loss.

    python tools/train_masters.py run SEED_0.json --seed 0     # on a GPU, one file a seed
    python tools/train_masters.py join RECORD.json PICTURE.png SEED_0.json ...

tools/trained_gpt.py says what model and text these are.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from trained_gpt import Kind, main

from megaopt import FusedAdam

DRAWN = {"exp_avg_dtype": "bfloat16_stochastic", "exp_avg_sq_dtype": "bfloat16_stochastic"}
BF16 = {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16}
NONE = {"master_weights": False}
ROUNDED = {**NONE, "weight_rounding": "stochastic"}


def master(name: torch.dtype | str) -> dict[str, Any]:
    """The options of masters in this format."""
    return {"master_weights": True, "master_weight_dtype": name}


def ours(options: dict[str, Any], groups: list[dict[str, Any]], seed: int) -> FusedAdam:
    """FusedAdam as all runs have it."""
    return FusedAdam(groups, betas=(0.9, 0.99), seed=seed, **options)


OPTIONS: dict[str, dict[str, Any]] = {
    "fp32": master(torch.float32),
    "remainder16": {"master_weights": True, "store_param_remainders": True},
    "remainder8": master("remainder8"),
    "remainder8_stochastic": master("remainder8_stochastic"),
    "kahan": master("kahan"),
    "kahan_stochastic": master("kahan_stochastic"),
    "none, stochastic": ROUNDED,
    "none, stochastic, bf16 moments stochastic": {**ROUNDED, **DRAWN},
    "fp32, bf16 moments nearest": {**master(torch.float32), **BF16},
    "none, nearest": NONE,
}
KINDS: dict[str, Kind] = {name: partial(ours, options) for name, options in OPTIONS.items()}

if __name__ == "__main__":
    main(__doc__, KINDS)
