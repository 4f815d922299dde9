"""A plugin for axolotl: FusedAdam in its trainer. In the config: plugins: [axolotl_plugin.Megaopt].

axolotl.md explains it.
"""

from typing import Any

import torch
from axolotl.integrations.base import BasePlugin

from megaopt import FusedAdam


class Megaopt(BasePlugin):
    """Sets the optimizer of the trainer that axolotl has made."""

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        """Before the first step the trainer makes this class, with its own groups."""
        options = {"lr": cfg.learning_rate, "betas": (0.9, 0.95), "dtype": torch.float32}
        trainer.optimizer_cls_and_kwargs = (FusedAdam, options)
