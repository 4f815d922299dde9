"""Makes Megatron-Core run without CUDA: it names the GPU in some forty places.

Tensors that it wants on "cuda" are made on the CPU, dtypes are spelled as those of CUDA tensors
(Megatron tells weights by "torch.cuda.BFloat16Tensor"), streams do nothing, and the random states
of the GPU are not kept. Nothing of this is needed where there is a GPU. It stays for the life of
the process: to be called in one that trains and ends.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from importlib import import_module
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

ENGINES_PRODUCT = "te_general_gemm"
"""The name in Megatron's modules of TransformerEngine's matrix product."""


class NoStream:
    """A CUDA stream's methods, doing nothing: on the CPU everything is in order already."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


class CudaToCpu(TorchFunctionMode):
    """Makes on the CPU what is asked for on the GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls func with the device "cuda" replaced."""
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.")
        return func(*args, **kwargs)


def pretend_cuda() -> None:
    """Lets this process run Megatron-Core on the CPU."""
    cuda: Any = torch.cuda
    cuda.current_device = lambda: "cpu"
    cuda.synchronize = lambda *_, **__: None
    cuda.current_stream = cuda.default_stream = lambda *_, **__: NoStream()
    # model_parallel_cuda_manual_seed keeps the states of a generator, which is the CPU's
    random: Any = import_module("megatron.core.tensor_parallel.random")
    cuda.manual_seed = torch.manual_seed
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    distributed, gather_alike = cast(Any, dist), dist.all_gather

    def all_gather(
        parts: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, **options: Any
    ) -> Any:
        # of several sizes, as Megatron's layer-wise optimizer gathers weights: NCCL can, gloo not
        most = max(part.numel() for part in parts)
        if all(part.numel() == most for part in parts):
            return gather_alike(parts, tensor, group, **options)
        padded = [part.new_zeros(most) for part in parts]
        gather_alike(padded, torch.nn.functional.pad(tensor, (0, most - tensor.numel())), group)
        for part, wide in zip(parts, padded, strict=True):
            part.copy_(wide[: part.numel()])
        return None

    distributed.all_gather = all_gather
    experts: Any = import_module("megatron.core.transformer.moe.moe_utils")
    if not hasattr(experts, ENGINES_PRODUCT):  # release 0.16 forgets it without TransformerEngine
        setattr(experts, ENGINES_PRODUCT, None)
    random.CudaRNGStatesTracker.fork = lambda *_, **__: contextlib.nullcontext()
    mode: Any = CudaToCpu()
    mode.__enter__()
