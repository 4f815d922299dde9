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


def save_and_load(case, folder):
    """A run that is saved after two steps, and one that goes on from there."""
    with stand_ins():
        saved = megatron_gpt.train_and_save(case, folder, "dp_reshardable")
        return saved, megatron_gpt.load_and_train(case, folder, "dp_reshardable")
