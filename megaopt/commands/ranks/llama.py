"""A Hugging Face Llama of 0.43e9 parameters, sharded layer by layer, and its iterations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from megaopt.commands.ranks.subjects import ENTRIES

CLIP = 1.0
"""The norm to which gradients are clipped."""


@dataclass(frozen=True)
class Size:
    """The sizes of the model, and of a rank's batch."""

    layers: int = 12
    width: int = 1536
    vocabulary: int = 32000
    tokens: int = 512
    batch: int = 2


USUAL = Size()


def is_installed() -> bool:
    """Returns whether transformers is installed."""
    return find_spec("transformers") is not None


def model_of(size: Size, device: torch.device, mesh: DeviceMesh | None) -> Any:
    """A new model in bf16, of the same weights on all ranks; whole without a mesh."""
    from transformers import LlamaConfig, LlamaForCausalLM

    heads: dict[str, Any] = {
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "hidden_size": size.width,
    }
    options: dict[str, Any] = {"vocab_size": size.vocabulary, "num_hidden_layers": size.layers}
    options |= {"intermediate_size": 3 * size.width, "max_position_embeddings": size.tokens}
    options |= {"attn_implementation": "eager", "use_cache": False}
    config = LlamaConfig(**heads, **options)
    torch.manual_seed(0)
    with device:
        model: Any = LlamaForCausalLM(config).bfloat16()
    if mesh is not None:
        for layer in (*model.model.layers, model):
            fully_shard(layer, mesh=mesh)
    return model


def optimizer_of(name: str, model: nn.Module) -> Any:
    """The optimizer; Muon has the layers' matrices, AdamW all else."""
    if name != "muon":
        return ENTRIES[name].subject.optimizer(list(model.parameters()))
    named = dict(model.named_parameters())
    names = {key for key, param in named.items() if param.ndim == 2 and ".layers." in key}
    hidden = [param for key, param in named.items() if key in names]
    rest = [param for key, param in named.items() if key not in names]
    groups: Any = [{"params": hidden}, {"params": rest, "use_muon": False}]
    return ENTRIES[name].subject.optimizer(groups)


def parts_of(
    name: str, size: Size, device: torch.device, mesh: DeviceMesh | None, rank: int
) -> tuple[Callable[[], None], Callable[[], None]]:
    """The two parts of an iteration: forward and backward pass; the step with clipping."""
    model = model_of(size, device, mesh)
    optimizer = optimizer_of(name, model)
    chance = torch.Generator().manual_seed(rank)
    tokens = torch.randint(size.vocabulary, (size.batch, size.tokens), generator=chance).to(device)

    def passes() -> None:
        optimizer.zero_grad(set_to_none=True)
        model(input_ids=tokens, labels=tokens).loss.backward()

    def step() -> None:
        if ENTRIES[name].subject.is_ours:
            optimizer.step(clip_norm=CLIP)
        else:
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()

    return passes, step
