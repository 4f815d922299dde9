"""Trains one GPT with moments of 8 and 4 bits, and with other libraries': what they cost in loss.

    python tools/train_moments.py run SEED_0.json --seed 0     # on a GPU, one file a seed
    python tools/train_moments.py join RECORD.json PICTURE.png SEED_0.json ...

tools/trained_gpt.py says what model and text these are. Kinds are named by masters and moments;
remainder16 has fp32's masters and moments, and differs from it by noise alone. Other libraries are
trained where they are installed.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

import torch
from train_masters import ROUNDED, master, ours
from trained_gpt import Kind, main

from megaopt.commands.bench.peers import PEERS

EIGHT = {"exp_avg_dtype": "block_e4m3", "exp_avg_sq_dtype": "block_e5m3"}
FOUR = {"exp_avg_dtype": "block32_e3m0", "exp_avg_sq_dtype": "block32_e4m0"}
OPTIONS: dict[str, dict[str, Any]] = {
    "fp32": master(torch.float32),
    "remainder16": master("remainder16"),
    "fp32, 8-bit moments": {**master(torch.float32), **EIGHT},
    "none, 8-bit moments": {**ROUNDED, **EIGHT},
    "none, 4-bit moments": {**ROUNDED, **FOUR},
    "24-bit, 8-bit moments": {**master("remainder8_stochastic"), **EIGHT},
}
LIBRARIES = ("flashoptim-8bit", "torchao-8bit", "bitsandbytes-8bit", "torchao-4bit")
"""By the names that `megaopt bench` has for them; as there, torchao rounds weights stochastically,
flashoptim has 8 more bits a weight, and bitsandbytes rounds weights to nearest."""


def peer(name: str, groups: list[dict[str, Any]], seed: int) -> Any:
    """Another library's optimizer; its random bits, if any, are torch's."""
    found = PEERS[name]
    make = getattr(import_module(found.module), found.kind)
    return make(groups, lr=1e-3, betas=(0.9, 0.99), **found.options)


INSTALLED = [name for name in LIBRARIES if PEERS[name].why_not() is None]
KINDS: dict[str, Kind] = {
    **{name: partial(ours, options) for name, options in OPTIONS.items()},
    **{name: partial(peer, name) for name in INSTALLED},
}


def versions() -> dict[str, str]:
    """Of the libraries beside ours."""
    return {PEERS[name].package: PEERS[name].version() for name in INSTALLED}


if __name__ == "__main__":
    main(__doc__, KINDS, versions)
