"""Plain tensors in the place of MXFP8 parameters, which need TransformerEngine and a GPU."""

import contextlib
from unittest import mock

import megatron_gpt
import torch
from megatron_gpt import megatron

from megaopt.integration.megatron import checks, choices, float8

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


def train(case, steps=3):
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
