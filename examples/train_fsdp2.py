"""FSDP2 on any number of ranks: bf16 weights, fp32 masters, clipping over all ranks.

torchrun --nproc-per-node 2 examples/train_fsdp2.py [--steps 20]
"""

import argparse
import os
from collections.abc import Sequence

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from megaopt import FusedAdam
from megaopt.lab.training.text import load_corpus

WIDTH, LAYERS, BATCH = 64, 3, 256


class Block(nn.Module):
    """A residual block of two matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(rows, WIDTH) to the same shape."""
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))  # type: ignore[no-any-return]


def build(device: torch.device) -> tuple[nn.Module, FusedAdam]:
    """A model that predicts the byte behind a byte, sharded, and its optimizer."""
    torch.manual_seed(0)  # the same first weights on all ranks
    blocks = [Block() for _ in range(LAYERS)]
    model = nn.Sequential(nn.Embedding(256, WIDTH), *blocks, nn.Linear(WIDTH, 256)).to(device)
    for block in blocks:
        fully_shard(block)
    fully_shard(model)
    masters = [param.detach().clone() for param in model.parameters()]  # fp32, this rank's shards
    model.bfloat16()
    return model, FusedAdam(model.parameters(), lr=3e-3, weight_decay=0.1, master_weights=masters)


def train(steps: int, device: torch.device) -> list[float]:
    """The mean losses over all ranks, each of which has bytes of its own."""
    model, optimizer = build(device)
    text, losses = load_corpus().tokens.long(), []
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        places = torch.randint(len(text) - 1, (BATCH,), generator=generator)
        inputs, targets = text[places].to(device), text[places + 1].to(device)
        loss = nn.functional.cross_entropy(model(inputs).float(), targets)
        loss.backward()
        optimizer.step(clip_norm=1.0)  # by the norm over all ranks
        optimizer.zero_grad()
        dist.all_reduce(loss.detach())
        losses.append(loss.item() / dist.get_world_size())
    return losses


def main(arguments: Sequence[str] | None = None) -> None:
    """A rank of torchrun."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    dist.init_process_group("nccl" if on_gpu else "gloo")
    losses = train(parser.parse_args(arguments).steps, device)
    if dist.get_rank() == 0:
        print(f"loss {losses[0]:.3f} at step 1, {losses[-1]:.3f} at step {len(losses)}")
    dist.barrier()  # gloo aborts a process that exits while others still wait
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
