"""Imports what the CPU's processes need of Megatron-Core, before they are made."""

import contextlib
import warnings
from importlib import import_module

with warnings.catch_warnings(), contextlib.suppress(ImportError):
    # each module warns that TransformerEngine and apex are not there
    warnings.simplefilter("ignore")
    for name in ("models.gpt.gpt_model", "optimizer", "dist_checkpointing"):
        import_module(f"megatron.core.{name}")
