"""MXFP8 parameters, gathered as bf16 through the gradients' memory; stand-ins for them."""

import contextlib
from unittest import mock

import megatron_gpt
import pytest
import torch
from how_to import needs
from megatron_gpt import HAS_KEYS, Case, megatron, train

from megaopt.integration.megatron import checks, choices, float8

# Plain tensors in the place of MXFP8 parameters, which need TransformerEngine and a GPU.

MODULES = (
    "distributed.param_and_grad_buffer",
    "distributed.distributed_data_parallel",
    "optimizer.distrib_optimizer",
)


def is_stand_in(param):
    return getattr(param, "is_stand_in", False)


def cast(param, values):
    """What Megatron casts a gathered weight by; here to four bits of mantissa."""
    coarse = (values.contiguous().view(torch.int16) & -8).view(torch.bfloat16)
    param.data.copy_(coarse.view(param.shape))


@contextlib.contextmanager
def stand_ins():
    """Within it Megatron, and the plug-in, take marked parameters for MXFP8 ones."""
    from megaopt.integration.megatron import distributed

    with contextlib.ExitStack() as stack:
        for module in (*map(megatron, MODULES), checks, choices, float8, distributed):
            for name in ("is_float8tensor", "is_mxfp8tensor", "is_fp8", "is_mxfp8"):
                if hasattr(module, name):
                    stack.enter_context(mock.patch.object(module, name, is_stand_in))
        buffers = megatron(MODULES[0])
        if hasattr(buffers, "copy_tensor_to_quantized_param"):
            stack.enter_context(mock.patch.object(buffers, "copy_tensor_to_quantized_param", cast))
        yield


def train_stand_ins(case, steps=3):
    with stand_ins():
        return megatron_gpt.train(case, steps)


def second_passes(case):
    """Main shards; how many are copied after each launch; how many gradients weights overwrite."""
    copied = []
    with stand_ins():
        trainer = megatron_gpt.Trainer(case)
        (optimizer,) = trainer.optimizer.chained_optimizers
        copy = torch._foreach_copy_

        def counted(places, mains):
            copied.append(len(mains))
            copy(places, mains)

        with mock.patch.object(torch, "_foreach_copy_", counted):
            trainer.train(2)
        mains = optimizer._outside
        return len(mains), copied, sum(optimizer.shards[m] is not mains[m] for m in mains)


def save_and_load(case, folder):
    """A run that is saved after two steps, one that goes on from there, gradients after a load."""
    kind = "dp_reshardable"
    with stand_ins():
        saved = megatron_gpt.train_and_save(case, folder, kind)
        trainer = megatron_gpt.Trainer(case)
        trainer.load(folder, kind, 2)
        grads = [buffer.grad_data.abs().max().item() for buffer in trainer.chunk.buffers]
        return saved, megatron_gpt.load_and_train(case, folder, kind), grads


pytestmark = [
    needs("megatron"),
    pytest.mark.skipif(not HAS_KEYS, reason="release 0.16 gathers MXFP8 in another way"),
]

SETTINGS = {
    "overlap": {},
    "overlap, 16 bits": {"fp32_grads": False},
    "late": {"gathers_late": False},
    "late, 16 bits": {"gathers_late": False, "fp32_grads": False},
}
PLACES = [(name, 2) for name in SETTINGS]
PLACES += [pytest.param(*each, marks=pytest.mark.slow) for each in (("overlap", 1), ("late", 3))]


@pytest.mark.parametrize(("name", "world"), PLACES)
def test_every_bit_is_megatrons(pools, once, name, world):
    settings = {"mxfp8": True, "clip_grad": 0.2, **SETTINGS[name]}
    expected = once(world, train_stand_ins, Case(**settings))
    found = pools(world)(train_stand_ins, Case(plug="main_shards", **settings))
    assert found == expected
    assert len({step[0] for step in found[0]["steps"]}) == 3


@pytest.mark.parametrize("name", ["overlap, 16 bits", "late", "late, 16 bits"])
def test_bf16_weights_in_place_of_bf16_gradients_need_no_second_pass(pools, name):
    """With overlap Megatron copies before the next forward pass."""
    case = Case(plug="main_shards", mxfp8=True, **SETTINGS[name])
    for mains, copied, in_place in pools(2)(second_passes, case):
        assert in_place == (mains if name == "late, 16 bits" else 0)
        assert copied == ([] if name == "late, 16 bits" else [mains, mains])
        assert mains > 1


def test_precision_aware_leaves_masters_to_megatron(pools):
    own, other = (
        pools(2)(train_stand_ins, Case(plug=mode, mxfp8=True))
        for mode in ("main_shards", "precision_aware")
    )
    assert own == other
    assert own[0]["steps"] != pools(2)(train, Case(plug="main_shards"))[0]["steps"]


@pytest.mark.parametrize("name", ["overlap", "late, 16 bits"])
def test_resuming_equals_going_straight_on(pools, tmp_path, name):
    case = Case(plug="main_shards", mxfp8=True, **SETTINGS[name])
    straight = pools(2)(train_stand_ins, case, 4)
    found = pools(2)(save_and_load, case, tmp_path / "a")
    for (saved, back, grads), whole in zip(found, straight, strict=True):
        assert not any(grads)
        assert back["loaded"] == saved
        assert back["steps"] == whole["steps"][2:]
        assert back["states"] == whole["states"]
