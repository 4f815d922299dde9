"""Megatron's optimizers recorded, with the same whole gradients in every layout."""

import functools
import zlib

import torch
from megatron_gpt import Case, Trainer, megatron

from megaopt import Recorder

SIZES = {"hidden": 32, "inner": 64, "heads": 4, "overlap": False, "clip_grad": 0.0}


def whole_name(trainer, name):
    """A parameter's name with its layer's number over all stages."""
    parts = name.split(".")
    if "layers" in parts:
        place = parts.index("layers") + 1
        layer = trainer.chunk.module.get_submodule(".".join(parts[: place + 1]))
        parts[place] = str(layer.layer_number - 1)
    return ".".join(parts)


def part(param, whole_of):
    """This rank's part of a whole tensor that a function makes from its shape."""
    states = megatron("parallel_state")
    shape, dim = list(param.shape), getattr(param, "partition_dim", None)
    world, rank = states.get_tensor_model_parallel_world_size(), 0
    if dim is None or dim < 0 or world == 1:
        return whole_of(shape)
    rank = states.get_tensor_model_parallel_rank()
    shape[dim] *= world
    return whole_of(shape).chunk(world, dim)[rank]


def values(name, step, shape):
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {step}".encode()))
    return torch.randn(shape, generator=generator)


def trained(out, settings):
    """Records steps with forwards and backwards of Megatron's own schedule."""
    trainer = Trainer(Case(**{**SIZES, "clip_grad": 1.0, **settings}))
    with Recorder(trainer.chunks, trainer.optimizer, out):
        for _ in range(2):
            trainer.step()


def recorded(out, settings, steps=3):
    """Trains weights and gradients that are made from their names."""
    trainer = Trainer(Case(**{**SIZES, **settings}))
    params = {whole_name(trainer, n): p for n, p in trainer.chunk.module.named_parameters()}

    def drawn(step):
        return [part(p, functools.partial(values, name, step)) for name, p in params.items()]

    with torch.no_grad():
        for param, value in zip(params.values(), drawn("weight"), strict=True):
            param.copy_(value)
        trainer.optimizer.reload_model_params()
        with Recorder(trainer.chunks, trainer.optimizer, out, keep=[2]):
            for step in range(steps):
                trainer.step_given(drawn(step))
