"""What makes Megatron-Core run without CUDA: it names the GPU in some forty places.

It stays for the life of the process: for processes that do nothing else.
"""

import contextlib
import logging
import warnings

import torch
from torch.overrides import TorchFunctionMode


class CudaToCpu(TorchFunctionMode):
    """Makes on the CPU what is asked for on the GPU, and spells dtypes as a GPU's."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.")
        return func(*args, **kwargs)


class NoStream:
    """A CUDA stream's methods, doing nothing."""

    def __getattr__(self, name):
        return lambda *_, **__: None


def pretend_cuda():
    """Lets this process run Megatron-Core on the CPU; its own warnings are not ours to heed."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.synchronize = lambda *_, **__: None
    torch.cuda.current_stream = torch.cuda.default_stream = lambda *_, **__: NoStream()
    from megatron.core.tensor_parallel import random

    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # which release 0.16 forgets without TransformerEngine
    random.CudaRNGStatesTracker.fork = lambda *_, **__: contextlib.nullcontext()
    CudaToCpu().__enter__()
