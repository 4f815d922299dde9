"""What ranks do with DTensors whose moments are in blocks; without a process group, the whole."""

from functools import partial

import fsdp2_ranks as ranks
import torch
from fsdp2_ranks import build, train

SHAPES = [(33, 128), (2, 2048), (1, 4096), (10,), (5, 8, 128), (6, 896)]
"""Rows of whole blocks: uneven on 2 and 3 ranks, the second and third empty on some; the fourth is
a small one, which keeps fp32."""
BLOCKS = {"exp_avg_dtype": "block_e4m3", "exp_avg_sq_dtype": "block_e5m3"}


trained, save, load_and_train, through_full_state = (
    partial(function, shapes=SHAPES)
    for function in (ranks.trained, ranks.save, ranks.load_and_train, ranks.through_full_state)
)


def read_and_set(options):
    """Values of DTensors that are read and set again; whether each is what it was."""
    model, optimizer = build(options, shapes=SHAPES)
    train(model, optimizer, 2)
    same = []
    for param in model.parameters():
        for name in ("exp_avg", "exp_avg_sq"):
            value = optimizer.get_unscaled_state(param, name).clone()
            kept = value.to_local().clone()
            optimizer.set_scaled_state(param, name, value * 0)
            optimizer.set_scaled_state(param, name, value.clone())
            again = optimizer.get_unscaled_state(param, name).to_local()
            same.append(torch.equal(again, kept) and bool((kept != 0).any() or not kept.numel()))
    return same
