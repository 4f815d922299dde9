"""Checkpoints in Megatron's own format, of any number of data-parallel ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megaopt.commands.regression.megatron.model import megatron
from megaopt.commands.regression.megatron.optimizer import leaves

# the format whose loads are exact in the supported releases, with several buckets too
METADATA = {"distrib_optim_sharding_type": "dp_reshardable"}


def sharded_state(chunk: Any, optimizer: Any, is_loading: bool) -> dict[str, Any]:
    """The sharded state dict of model and optimizer."""
    model = chunk.module.sharded_state_dict()
    state = optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=METADATA)
    return {"model": model, "optimizer": state}


def save(folder: Path, chunk: Any, optimizer: Any) -> None:
    """Saves in a folder that need not exist; for all ranks to call together."""
    gathers = chunk.ddp_config.overlap_param_gather
    if gathers:
        # the weights of the step just made have not been gathered yet
        chunk.disable_forward_pre_hook(param_sync=True)
    folder.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    megatron("dist_checkpointing").save(sharded_state(chunk, optimizer, False), str(folder))
    if gathers:
        chunk.enable_forward_pre_hook()


def load(folder: Path, chunk: Any, optimizer: Any) -> None:
    """Loads what `save` saved; for all ranks to call together."""
    # TransformerEngine pickles delayed scaling's histories, and loads what is known to be one's own
    os.environ["NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE"] = "1"
    template = sharded_state(chunk, optimizer, True)
    loaded = megatron("dist_checkpointing").load(template, str(folder))
    chunk.module.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])


def cast_masters(chunk: Any, optimizer: Any) -> None:
    """Casts the masters to weights, as after a step; for all ranks to call together.

    Megatron's checkpoints hold fp8 weights as what they stand for. Under delayed scaling, what it
    quantizes again at a load was seen not to be what a run that went on had (docs/numbers.md).
    """
    for leaf in leaves(optimizer):
        leaf._copy_main_params_to_model_params()
    if not chunk.ddp_config.overlap_param_gather:  # else the next forward pass gathers
        chunk.start_param_sync()
