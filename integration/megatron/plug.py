"""What stands for which name of Megatron's while an optimizer is made."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

from megatron.core import optimizer as factory
from megatron.core.optimizer import distrib_optimizer

from megaopt.integration.megatron.adam import Shards
from megaopt.integration.megatron.chained import Chained
from megaopt.integration.megatron.choices import Choices
from megaopt.integration.megatron.distributed import MainShards, PrecisionAware

MEGATRONS = "megatrons_own"
"""The attribute of our function that is Megatron's, in whose place it stands."""


def owner_of(choices: Choices) -> type:
    """The distributed optimizer of a mode."""
    return PrecisionAware if choices.mode == "precision_aware" else MainShards


def replacements(choices: Choices) -> list[tuple[Any, str, Any]]:
    """Modules, names in them, and what these are to be while Megatron makes an optimizer."""
    make = factory._get_megatron_optimizer_based_on_param_groups
    make = getattr(make, MEGATRONS, make)  # within another's block: its choices would win

    def checked(config: Any, model_chunks: list[Any], *args: Any, **kwargs: Any) -> Any:
        own = replace(choices.for_model(model_chunks), offloads=config.optimizer_cpu_offload)
        own.check_config(config, model_chunks)
        if own.offloads:  # Megatron itself would make an optimizer a device
            config = copy.copy(config)
            config.optimizer_cpu_offload = False
        factory.Adam = own.make_adam
        factory.DistributedOptimizer = owner_of(own)
        return make(config, model_chunks, *args, **kwargs)

    setattr(checked, MEGATRONS, make)
    return [
        (factory, "_get_megatron_optimizer_based_on_param_groups", checked),
        (factory, "Adam", choices.make_adam),
        # otherwise it takes torch's AdamW, whatever Adam is
        (factory, "USING_PYTORCH_OPTIMIZER", False),
        (factory, "DistributedOptimizer", owner_of(choices)),
        (factory, "ChainedOptimizer", Chained),
        # release 0.16 looks whether it is given an instance of this
        (distrib_optimizer, "Adam", Shards),
    ]
