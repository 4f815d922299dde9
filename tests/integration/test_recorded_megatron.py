"""Recordings of Megatron's optimizers have the same rows in every layout."""

import functools
import zlib

import pytest
import torch
from how_to import needs
from megatron_gpt import Case, Trainer, megatron
from recorded import kept, rows

from megaopt import Recorder
from megaopt.recording.files import Recording

# Megatron's optimizers recorded, with the same whole gradients in every layout.

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


pytestmark = needs("megatron")

LAYOUTS = {
    "data parallel": (2, {}),
    "three ranks": (3, {}),
    "tensor parallel": (2, {"tensor_parallel": 2}),
    "pipeline": (2, {"pipeline": 2}),
}
OF_FOUR = {
    "tensor parallel, four": (4, {"tensor_parallel": 4}),
    "tensor and data parallel": (4, {"tensor_parallel": 2}),
    "tensor parallel and pipeline": (4, {"tensor_parallel": 2, "pipeline": 2}),
}


QUICK = {
    None: ["data parallel", "tensor parallel"],
    "main_shards": ["three ranks", "pipeline"],
    "precision_aware": ["data parallel", "pipeline"],
}
"""Each layout and each way to plug in, where not all pairs are."""


def layouts_of(plug):
    """Those of one way; all are slow but the quick ones without a plug."""
    quick = {name: LAYOUTS[name] for name in QUICK[plug]}
    others = {name: LAYOUTS[name] for name in LAYOUTS if name not in quick}
    yield pytest.param(plug, quick, id=f"{plug}", marks=[pytest.mark.slow] if plug else [])
    for name, own in (("others", others), ("four", OF_FOUR)):
        yield pytest.param(plug, own, id=f"{plug}-{name}", marks=pytest.mark.slow)


@pytest.mark.parametrize(("plug", "layouts"), [each for p in QUICK for each in layouts_of(p)])
def test_layouts(pools, tmp_path, plug, layouts):
    pools(1)(recorded, tmp_path / "one", {"plug": plug})
    expected = rows(tmp_path / "one")
    assert {each for _, each in expected[1]} >= {"grad", "master", "weight", "exp_avg"}
    assert {each for _, each in kept(tmp_path / "one", 2)} >= {"grad", "old master", "exp_avg"}
    for name, (world, settings) in layouts.items():
        pools(world)(recorded, tmp_path / name, {"plug": plug, **settings})
        assert rows(tmp_path / name) == expected, name
        assert kept(tmp_path / name, 2) == kept(tmp_path / "one", 2), name


@pytest.mark.parametrize(("world", "settings"), [(1, {}), (2, {"pipeline": 2})])
def test_losses_and_norms_of_its_models_are_heard(pools, tmp_path, world, settings):
    pools(world)(trained, tmp_path / "a", settings)
    lines = [sources[0] for sources in Recording(tmp_path / "a").scalars(2)]
    assert all(line["grad_norm"] for line in lines)
    assert [bool(line["losses"]) for line in lines] == [False, True][-world:]
