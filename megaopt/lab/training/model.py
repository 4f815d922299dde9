"""A small, readable GPT: bf16 matrices, fp32 norm weights, the same bits at every run."""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from megaopt.lab.config import ModelConfig

MATRIX_DTYPE = torch.bfloat16
INITIAL_STANDARD_DEVIATION = 0.02


class Norm(nn.Module):
    """Layer norm without bias, computed in fp32 with an fp32 weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, dtype=torch.float32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalizes the last dimension of a bf16 tensor of shape (..., width)."""
        return functional.layer_norm(x.float(), self.weight.shape, self.weight).to(x.dtype)


def _linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False, dtype=MATRIX_DTYPE)


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.query = _linear(config.width, config.width)
        self.key = _linear(config.width, config.width)
        self.value = _linear(config.width, config.width)
        self.projection = _linear(config.width, config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps bf16 (batch, context, width) to the same shape."""
        # each [batch, heads, context, width / heads]
        query, key, value = (
            linear(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )
        # one backend, named: the choice must not depend on what else is on the device, and the
        # backward pass of flash attention is deterministic where torch is told to be so
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            y = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return cast("torch.Tensor", self.projection(y.transpose(1, 2).reshape(x.shape)))


class FeedForward(nn.Module):
    """Two matrices with a GELU between them."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.expand = _linear(config.width, 4 * config.width)
        self.projection = _linear(4 * config.width, config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps bf16 (batch, context, width) to the same shape."""
        return cast("torch.Tensor", self.projection(functional.gelu(self.expand(x))))


class TransformerBlock(nn.Module):
    """A transformer block, norms first."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = Norm(config.width)
        self.attention = Attention(config)
        self.feed_forward_norm = Norm(config.width)
        self.feed_forward = FeedForward(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps bf16 (batch, context, width) to the same shape."""
        x = x + self.attention(self.attention_norm(x))
        x = x + self.feed_forward(self.feed_forward_norm(x))
        return x


class GPT(nn.Module):
    """A byte-level GPT whose output matrix is its token embedding."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(
            config.vocabulary_size, config.width, dtype=MATRIX_DTYPE
        )
        self.position_embedding = nn.Embedding(config.context, config.width, dtype=MATRIX_DTYPE)
        self.blocks = nn.ModuleList(TransformerBlock(config) for _ in range(config.layers))
        self.norm = Norm(config.width)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The mean cross-entropy in nats: fp32, 0-dim.

        Args:
            inputs: int64 of shape (batch, context).
            targets: the bytes that follow, of the same shape.
        """
        positions = torch.arange(inputs.shape[1], device=inputs.device)
        x = self.token_embedding(inputs) + self.position_embedding(positions)
        for block in self.blocks:
            x = block(x)
        logits = functional.linear(self.norm(x), self.token_embedding.weight)
        return functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def build_model(config: ModelConfig, seed: int, device: torch.device) -> GPT:
    """A GPT with the weights of a seed: drawn on the CPU, so the same bits on every device."""
    model = GPT(config)
    generator = torch.Generator().manual_seed(seed)
    # the residual stream sums 2 * layers projections: scaled so that its variance stays near one
    projection = INITIAL_STANDARD_DEVIATION / math.sqrt(2 * config.layers)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim < 2:
                continue
            deviation = projection if "projection" in name else INITIAL_STANDARD_DEVIATION
            values = torch.randn(parameter.shape, generator=generator) * deviation
            parameter.copy_(values)
    return model.to(device)
