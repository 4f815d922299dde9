"""The optimizer of a variant: Megatron's own with one inner Adam or another, or ours in it."""

from __future__ import annotations

from dataclasses import fields
from importlib import import_module
from typing import Any

import torch

from megaopt.galore import GaLoreAdamW
from megaopt.lab.regression.megatron.config import MegaoptVariant, MegatronRun, MegatronVariant
from megaopt.lab.regression.megatron.emerging import make_muon
from megaopt.lab.regression.megatron.model import megatron, weights_dtype
from megaopt.lab.regression.unfused import UnfusedAdam
from megaopt.params.view import EMBEDDING

LAYER_WISE = "use_layer_wise_distributed_optimizer"
# Megatron calls its fp8 moments uint8; the others are megaopt's own names
STATE_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8": torch.uint8,
}


def optimizer_config(run: MegatronRun, variant: MegatronVariant, **more: Any) -> Any:
    """Megatron's OptimizerConfig for a variant, with more of its fields."""
    if variant.cuda_graph:
        more["optimizer_cuda_graph"] = True
    adam, dtype, kind = run.optimizer, weights_dtype(run), megatron("optimizer").OptimizerConfig
    name: str = run.megatron.optimizer
    if name == "muon":
        more["muon_tp_mode"] = run.megatron.muon_tp_mode
    if variant.layout == "owners":  # release 0.16 has another name
        if LAYER_WISE in {field.name for field in fields(kind)}:
            more[LAYER_WISE] = True
        else:
            name = "dist_muon"
    return kind(
        optimizer=name,
        lr=adam.learning_rate,
        weight_decay=adam.weight_decay,
        adam_beta1=adam.beta1,
        adam_beta2=adam.beta2,
        adam_eps=adam.eps,
        decoupled_weight_decay=adam.adam_w_mode,
        bf16=dtype is torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=variant.layout == "shards",
        clip_grad=run.megatron.clip_grad,
        fp8_recipe=run.megatron.fp8_recipe,
        **more,
    )


def put_inside(adam: Any, is_torchs: bool = False) -> None:
    """Has this process's Megatron take an Adam.

    Megatron takes the first that is installed of TransformerEngine's, apex's and torch's, when it
    is imported, and notes it in these names; it reads them in later calls too, so they stay.
    """
    builder, distributed = megatron("optimizer"), megatron("optimizer.distrib_optimizer")
    builder.Adam = distributed.Adam = adam
    builder.USING_PYTORCH_OPTIMIZER = is_torchs
    # of these: how the step count is kept
    distributed.HAVE_APEX_OR_TE = distributed.USING_TE_OPTIMIZER = not is_torchs
    distributed.USING_APEX_OPTIMIZER = False


def our_optimizer(run: MegatronRun, variant: MegaoptVariant, chunk: Any) -> Any:
    """Makes megaopt.integration.megatron's optimizer, imported by name: nobody else needs it.

    Of whole weights with GaLore it is Megatron's own, in which GaLoreAdamW steps the masters.
    """
    galore = None if run.galore is None else run.galore.model_dump()
    if galore is None or variant.layout != "whole":
        offload: dict[str, Any] = {}
        if variant.cpu_offload:
            offload = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0}
        return import_module("megaopt.integration.megatron").get_megatron_optimizer(
            optimizer_config(run, variant, **offload),
            [chunk],
            mode=variant.mode,
            contract=variant.contract,
            backend=variant.backend,
            exp_avg_dtype=STATE_DTYPES.get(variant.exp_avg_dtype, variant.exp_avg_dtype),
            exp_avg_sq_dtype=STATE_DTYPES.get(variant.exp_avg_sq_dtype, variant.exp_avg_sq_dtype),
            store_param_remainders=variant.store_param_remainders,
            round_scaled_grads=variant.round_scaled_grads,
            galore=galore,
        )
    options = galore

    def adam(params: Any, adam_w_mode: bool, **kwargs: Any) -> GaLoreAdamW:
        for group in params:  # masters will be in their place: flat ones might be parts of matrices
            if all(param.dim() == 1 for param in group["params"]):
                group["rank"] = None
        return GaLoreAdamW(params, backend=variant.backend, **kwargs, **options)

    put_inside(adam)
    config = optimizer_config(run, variant)
    optimizer = megatron("optimizer").get_megatron_optimizer(config, [chunk])
    plug = import_module("megaopt.integration.megatron.distributed")
    for buffers in (chunk.buffers, chunk.expert_parallel_buffers):
        for param, number in plug.numbers_of(buffers).items():
            # Megatron tells its masters neither
            master = getattr(param, "main_param", param)
            master.megaopt_number = number
            setattr(master, EMBEDDING, getattr(param, EMBEDDING, None))
    return optimizer


def build_optimizer(run: MegatronRun, variant: MegatronVariant, chunk: Any) -> Any:
    """Megatron's optimizer object for a wrapped model.

    Raises:
        ImportError: its Adam is TransformerEngine's, which is not installed.
    """
    if isinstance(variant, MegaoptVariant):
        optimizer = our_optimizer(run, variant, chunk)
    else:  # Megatron's own, with the Adam that the config names
        adam: Any = UnfusedAdam
        if variant.inner == "transformer_engine":
            adam = import_module("transformer_engine.pytorch.optimizers").FusedAdam
        elif variant.inner == "torch":
            adam = torch.optim.AdamW
        put_inside(adam, variant.inner == "torch")
        options = {
            "use_precision_aware_optimizer": variant.mode == "precision_aware",
            "store_param_remainders": variant.store_param_remainders,
        }
        config = optimizer_config(run, variant, **options)
        if run.megatron.optimizer == "muon":
            optimizer = make_muon(config, chunk, variant.layout == "owners")
        else:
            optimizer = megatron("optimizer").get_megatron_optimizer(config, [chunk])
    if variant.cuda_graph:  # as Megatron's training loop does it
        optimizer.step = megatron("optimizer.optimizer_cuda_graph").OptimizerCudaGraphWrapper(
            optimizer.step
        )
    return optimizer


def leaves(optimizer: Any) -> list[Any]:
    """The optimizers of a chain, or of chains within it, that step weights; or the one."""
    chain = getattr(optimizer, "chained_optimizers", None)
    return [optimizer] if chain is None else [leaf for member in chain for leaf in leaves(member)]
