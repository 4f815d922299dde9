"""A small GPT on the text that comes with megaopt, by AdamW, Lion, SGD, GaLore, or with 8 bits.

python examples/train_gpt.py [--optimizer adamw] [--steps 200]
"""

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from megaopt import FusedAdam, FusedLion, FusedSGD, GaLoreAdamW
from megaopt.lab.training.text import load_corpus

WIDTH, CONTEXT, BATCH = 64, 64, 16
NAMES = ("adamw", "lion", "sgd", "galore", "8bit")


class GPT(nn.Module):
    """Reads bytes, predicts the next."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        block = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, "gelu", batch_first=True)
        self.blocks = nn.TransformerEncoder(block, num_layers=2)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of shape (batch, CONTEXT, 256) for int64 tokens of shape (batch, CONTEXT)."""
        x = self.token(tokens) + self.place.weight
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT, x.device, x.dtype)
        return self.head(self.blocks(x, mask, is_causal=True))  # type: ignore[no-any-return]


def build(name: str, model: nn.Module) -> Any:
    """One of megaopt's optimizers, with fp32 masters but for "8bit"."""
    params, masters = list(model.parameters()), {"dtype": torch.float32}
    if name == "lion":
        return FusedLion(params, lr=5e-4, **masters)
    if name == "sgd":
        return FusedSGD(params, lr=0.1, momentum=0.9, **masters)
    if name == "galore":  # matrices are projected to 16 dimensions, others take AdamW's step
        matrices = [param for param in model.blocks.parameters() if param.dim() == 2]
        others = [p for p in params if all(p is not matrix for matrix in matrices)]
        return GaLoreAdamW([{"params": others}, {"params": matrices, "rank": 16}], 3e-3, **masters)
    if name == "8bit":  # no masters: 4.02 bytes a parameter of the large matrices
        moments = {"exp_avg_dtype": "block_e4m3", "exp_avg_sq_dtype": "block_e5m3"}
        rounding = {"master_weights": False, "weight_rounding": "stochastic"}
        return FusedAdam(params, lr=3e-3, **rounding, **moments)
    return FusedAdam(params, lr=3e-3, **masters)


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Trains; the losses in nats for each byte."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--optimizer", choices=NAMES, default="adamw")
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    model = GPT().to("cuda" if torch.cuda.is_available() else "cpu", torch.bfloat16)
    optimizer, text, losses = build(options.optimizer, model), load_corpus().tokens.long(), []
    for step in range(options.steps):
        starts = torch.randint(len(text) - CONTEXT, (BATCH, 1))
        rows = text[starts + torch.arange(CONTEXT + 1)].to(model.head.weight.device)
        logits = model(rows[:, :-1]).float()
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        optimizer.step(clip_norm=1.0)
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 20 == 0 or step + 1 == options.steps:
            print(f"step {step + 1} loss {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    main()
