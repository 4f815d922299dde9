"""A Megatron-Core GPT: the model, its data-parallel wrapper, and a forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import torch

from megaopt.lab.regression.megatron.config import MegatronRun, MegatronVariant
from megaopt.lab.training.text import batches_of, load_corpus

FEED_FORWARD_FACTOR = 4


def megatron(name: str) -> Any:
    """A module of Megatron-Core, by its path within the package."""
    return import_module(f"megatron.core.{name}" if name else "megatron.core")


def weights_dtype(run: MegatronRun) -> torch.dtype:
    """Returns the dtype that the model computes in, fp8 apart."""
    return torch.bfloat16 if run.megatron.precision == "bf16" else torch.float32


def transformer_config(run: MegatronRun, device: torch.device) -> Any:
    """Megatron's TransformerConfig: nothing random, nothing fused that TransformerEngine brings."""
    megatron_config, dtype = run.megatron, weights_dtype(run)
    experts = {
        "num_moe_experts": megatron_config.experts,
        "expert_model_parallel_size": megatron_config.expert_parallel,
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "allgather",
        "add_bias_linear": False,
    }
    fp8 = {
        "fp8": "hybrid",
        "fp8_recipe": megatron_config.fp8_recipe,
        "fp8_param": megatron_config.fp8_param_gather,
    }
    return megatron("transformer").TransformerConfig(
        num_layers=run.model.layers,
        hidden_size=run.model.width,
        num_attention_heads=run.model.heads,
        ffn_hidden_size=FEED_FORWARD_FACTOR * run.model.width,
        tensor_model_parallel_size=megatron_config.tensor_parallel,
        pipeline_model_parallel_size=megatron_config.pipeline_parallel,
        bf16=dtype is torch.bfloat16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        # drawn on the GPU where there is one: minutes less for a large model
        use_cpu_initialization=device.type == "cpu",
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        # where TransformerEngine is installed and apex is not, the other norm asks for apex
        normalization="RMSNorm",
        attention_backend=megatron("transformer.enums").AttnBackend.unfused,
        **(experts if megatron_config.experts is not None else {}),
        **(fp8 if megatron_config.fp8_recipe is not None else {}),
    )


def build_gpt(run: MegatronRun, variant: MegatronVariant, config: Any, device: torch.device) -> Any:
    """Megatron's GPTModel with the seed's weights, in the run's dtype, on the device.

    Its DistributedDataParallel is around it, for the variant's layout.
    """
    specs, stages = megatron("models.gpt.gpt_layer_specs"), megatron("parallel_state")
    with_engine = run.megatron.fp8_recipe is not None
    if with_engine:
        spec = specs.get_gpt_layer_with_transformer_engine_spec()
    else:
        experts = config.num_moe_experts
        spec = specs.get_gpt_layer_local_spec(experts, normalization=config.normalization)
    model = megatron("models.gpt.gpt_model").GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=run.model.vocabulary_size,
        max_sequence_length=run.model.context,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=True,
        pre_process=stages.is_pipeline_first_stage(),
        post_process=stages.is_pipeline_last_stage(),
    )
    if not with_engine:
        # TransformerEngine's layers are so already, and a cast would quantize anew
        model = model.to(device).to(weights_dtype(run))
    distributed, shards = megatron("distributed"), variant.layout == "shards"
    gathers = variant.overlap_param_gather
    gathers = run.megatron.overlap_param_gather if gathers is None else gathers
    reduces = run.overlaps_grad_reduce(variant)
    settings = distributed.DistributedDataParallelConfig(
        use_distributed_optimizer=shards,
        grad_reduce_in_fp32=run.reduces_in_fp32(variant),
        overlap_grad_reduce=reduces,
        # never without the other, nor where ranks have whole weights
        overlap_param_gather=gathers and shards and reduces,
        bucket_size=run.megatron.bucket_size,
        average_in_collective=False,
        fp8_param_gather=run.megatron.fp8_param_gather,
    )
    return distributed.DistributedDataParallel(config, settings, model)


class ForwardStep:
    """A forward pass as Megatron's schedules call it, on a micro batch of this rank's share.

    Args:
        run: the config.
        device: where to train.
    """

    def __init__(self, run: MegatronRun, device: torch.device) -> None:
        groups, context = megatron("parallel_state"), run.model.context
        self.batches, self.device = batches_of(run, load_corpus()), device
        self.micro_batch_size = run.megatron.micro_batch_size
        share = run.batch_size // groups.get_data_parallel_world_size()
        first = groups.get_data_parallel_rank() * share
        self.rows = slice(first, first + share)
        self.micro_batches = share // self.micro_batch_size
        """Forward passes of this rank in a step."""
        shape = (1, 1, context, context)
        self.mask = torch.triu(torch.ones(shape, dtype=torch.bool, device=device), 1)
        places = torch.arange(context, device=device)
        self.places = places.unsqueeze(0).expand(self.micro_batch_size, context)

    def data(self, step: int) -> Iterator[tuple[torch.Tensor, ...]]:
        """Inputs and targets of each micro batch of a step; steps count from 1."""
        inputs, targets = (tensor[self.rows].to(self.device) for tensor in self.batches.at(step))
        size = self.micro_batch_size
        return zip(torch.split(inputs, size), torch.split(targets, size), strict=True)

    def __call__(self, data: Any, model: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
        """The losses of the next micro batch, and what takes their mean."""
        inputs, targets = next(data)
        return model(inputs, self.places, self.mask, labels=targets), self._mean

    @staticmethod
    def _mean(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        mean = losses.float().mean()
        return mean, {"loss": mean.detach().clone()}
