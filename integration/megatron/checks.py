"""Checks of Megatron's settings and parameters: a plugged-in optimizer does not go with all."""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from typing import Any

import torch

from megaopt.float8.foreign import foreign_weight
from megaopt.integration.megatron.float8 import is_fp8, is_mxfp8
from megaopt.kernels.refusals import refuse
from megaopt.options.checks import errors_of

REQUIRED = {
    "optimizer": (
        "adam",
        "lion and sgd may be where megaopt's get_megatron_optimizer is called in the place of "
        "Megatron's",
    ),
    "use_distributed_optimizer": (True, "megaopt steps the distributed optimizer's shards"),
}
"""Fields of Megatron's OptimizerConfig: what is allowed, and why."""

CHUNK = "DistributedDataParallel of Megatron's"
STATE_KEYS = "optimizer_state_keys"
"""The attribute of which releases after 0.16 ask for the names of moments."""


def check_arguments(config: Any, model_chunks: Any) -> None:
    """Raises ValueError for what is not Megatron's own, before Megatron asks it for a field."""
    config_class = importlib.import_module("megatron.core.optimizer").OptimizerConfig
    if not isinstance(config, config_class):
        refuse("config", "an OptimizerConfig of Megatron's", config)
    if not isinstance(model_chunks, (list, tuple)) or not model_chunks:
        refuse("model_chunks", f"a list of at least one {CHUNK}", model_chunks)
    for place, chunk in enumerate(model_chunks):
        if not hasattr(chunk, "ddp_config"):
            refuse(f"model_chunks[{place}]", f"a {CHUNK}", chunk)


def check_release(config: Any, original_config: Any) -> None:
    """Raises ValueError for what releases up to 0.16 do not have."""
    base = importlib.import_module("megatron.core.optimizer.distrib_optimizer")
    if hasattr(base.DistributedOptimizer, STATE_KEYS):
        return
    if original_config is not None:
        raise ValueError(
            "config.optimizer must be 'adam' with megatron-core 0.16, whose checkpoints have "
            f"Adam's moments alone, got {original_config.optimizer!r}"
        )
    if config.reuse_grad_buf_for_mxfp8_param_ag:
        raise ValueError(
            "config.reuse_grad_buf_for_mxfp8_param_ag must be False with megatron-core 0.16, which "
            "gathers all weights through it, also those that are not MXFP8, got True"
        )


def check_fields(config: Any, fields: Sequence[tuple[str, object, str]], condition: str) -> None:
    """Raises ValueError for a field that has another value than the one it must have.

    fields: names, the value of each, and why, where there is more to say.
    """
    for name, allowed, reason in fields:
        value = getattr(config, name, allowed)
        if value != allowed:
            because = f": {reason}" if reason else ""
            raise ValueError(
                f"config.{name} must be {allowed!r} with {condition}, got {value!r}{because}"
            )


WITH_MATRICES = [
    ("use_precision_aware_optimizer", False, ""),
    ("optimizer_cpu_offload", False, ""),
    ("optimizer_cuda_graph", False, ""),
]
"""Fields beside a rule for whole matrices, as `check_fields` has them."""
IN_SHARDS = (
    "decoupled_weight_decay",
    True,
    "AdamW steps the other parameters of the distributed optimizer's shards",
)
"""One more where matrices are in shards."""


def check_matrices(chunk: Any, rule: str) -> None:
    """Raises ValueError where DDP's settings, or parameters, do not go with a rule for matrices."""
    # matrices have to be whole, in one instance of the optimizer
    ddp = chunk.ddp_config
    if ddp.use_megatron_fsdp:
        refuse("use_megatron_fsdp", f"False with {rule}, which needs whole matrices", True)
    instances = ddp.num_distributed_optimizer_instances
    if instances != 1:
        refuse("num_distributed_optimizer_instances", f"1 with {rule}", instances)
    # one tensor for several experts is a stack of matrices
    for path, module in chunk.named_modules():
        names = [name for name, param in module.named_parameters(recurse=False) if param.dim() == 2]
        experts = getattr(module, "num_local_experts", 1)
        if names and experts > 1:  # GroupedMLP of releases up to 0.16
            raise ValueError(
                f"parameter '{path}.{names[0]}' must be one matrix with {rule}, got {experts} "
                "experts' in one; moe_grouped_gemm=False, and TransformerEngine's grouped layers, "
                "have a weight for each"
            )
    for name, param in chunk.named_parameters():
        check_parameter(name, param, False)
        if is_fp8(param):
            refuse(
                f"parameter {name!r}", f"of fp32 or 16 bits with {rule}", type(param.data).__name__
            )


def check_graph(config: Any, model_chunks: Sequence[Any]) -> None:
    """Raises ValueError where the host reads what a captured step computes."""
    # numbers of the config that the host reads within the step
    unread = "the host reads it within the step, which a CUDA graph cannot"
    fields = [
        ("fp16", False, f"{unread}: whether gradients overflowed"),
        ("loss_scale", None, f"{unread}: whether gradients overflowed"),
        ("log_num_zeros_in_grad", False, unread),
        ("grad_norm_skip_threshold", math.inf, unread),
    ]
    check_fields(config, fields, "optimizer_cuda_graph=True")
    # without this function Megatron reads the norm on the host
    norms = importlib.import_module("megatron.core.optimizer.clip_grads")  # only where it is used
    if getattr(norms, "multi_tensor_scale_tensor_impl", None) is None:
        raise ValueError(
            "config.optimizer_cuda_graph must be False without TransformerEngine, or with "
            "megatron-core 0.16, as Megatron then reads the gradients' norm on the host, got True"
        )
    for chunk in model_chunks:
        for name, param in chunk.named_parameters():
            if is_fp8(param) and not is_mxfp8(param):
                raise ValueError(
                    f"parameter {name!r} must be MXFP8, or no fp8, with optimizer_cuda_graph=True, "
                    f"got a {type(param.data).__name__}, whose scale the ranks find after the step"
                )


def check_parameter(name: str, param: torch.Tensor, takes_mxfp8: bool) -> None:
    """Raises ValueError for a parameter of a model that cannot be stepped."""
    with errors_of(f"parameter {name!r}"):
        weight = foreign_weight(param)
    kind = type(param.data)
    if weight is not None and is_mxfp8(param) and not takes_mxfp8:
        raise ValueError(
            f"parameter {name!r} must have delayed, current or 128x128 scaling, if any, without "
            "config.reuse_grad_buf_for_mxfp8_param_ag=True, got a "
            f"{kind.__name__} ({weight.recipe.scaling})"
        )
    if weight is None and kind is not torch.Tensor:
        raise ValueError(
            f"parameter {name!r} must be fp32, bf16, fp16, or an fp8 tensor of "
            f"TransformerEngine's, got a {kind.__name__}"
        )
