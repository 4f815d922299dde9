"""What the ranks of tests/integration/test_megatron.py do beside training."""

import sys
from contextlib import contextmanager
from pathlib import Path

import torch
from fsdp2_ranks import raised_by
from megatron_gpt import (
    Trainer,
    build_model,
    hash_of,
    megatron,
)
from megatron_gpt import optimizer_config as make_config

from megaopt.integration import megatron as ours


@contextmanager
def version(text):
    core = sys.modules["megatron.core"]
    kept, core.__version__ = core.__version__, text
    try:
        yield
    finally:
        core.__version__ = kept


class Quantized(torch.Tensor):
    """Stands for TransformerEngine's fp8 tensors."""


def error_of(case, change):
    """The message with which a setting is refused, and whether the weights are what they were."""
    Trainer(case)
    config = make_config(case)
    _, chunk = build_model(case)
    options = {"mode": case.plug, **case.options}
    weights = [hash_of(param.data) for param in chunk.parameters()]
    kind, name, value = change
    given = {"config": config, "model_chunks": [chunk]}
    installed = megatron("package_info").__version__
    if kind == "config":
        setattr(config, name, value)
    elif kind == "option":
        options[name] = value
    elif kind == "given":
        given[name] = value
    elif kind == "without ddp":
        given["model_chunks"] = [chunk, chunk.module]
    elif kind == "ddp":
        setattr(chunk.ddp_config, name, value)
    elif kind == "aware":
        config.use_precision_aware_optimizer = True
        setattr(config, name, value)
    elif kind == "quantized":
        owner, _, last = name.rpartition(".")
        module = chunk.get_submodule(owner)
        quantized = getattr(module, last).data.as_subclass(Quantized)
        module._parameters[last] = torch.nn.Parameter(quantized)
    else:
        installed = value
    try:
        with version(installed):
            ours.get_megatron_optimizer(**given, **options)
    except (ValueError, RuntimeError) as error:
        after = [hash_of(param.data) for param in chunk.parameters()]
        return f"{type(error).__name__}: {error}", weights == after
    return "no error", True


def save_without_psutil(case, folder, kind, form="dp_reshardable"):
    """The error of a save where Megatron's writer lacks a package, and what is in the folder.

    kind: of the trainer. A load is tried too, which needs no such package.
    """
    trainer = kind(case)
    trainer.train(1)
    writer = megatron("dist_checkpointing.strategies.filesystem_async")
    writer.HAVE_PSUTIL = False
    try:
        trainer.template(form, True)
        error = raised_by(lambda: trainer.save(folder, form))
    finally:
        writer.HAVE_PSUTIL = True
    return error, [each.name for each in Path(folder).iterdir()]
