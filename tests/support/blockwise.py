"""How far Megatron's own "blockwise" Muon goes from whole matrices."""

import importlib

import torch
from megatron_gpt import HAS_KEYS

from megaopt.commands.regression.megatron.emerging import megatrons_muon

RANKS = (1, 2, 4)


def direction(rows, columns, kind):
    """Of normal numbers; falling: times what falls by three decades over the columns."""
    drawn = torch.randn(rows, columns, generator=torch.Generator().manual_seed(1))
    return drawn if kind == "alike" else drawn * torch.logspace(0, -3, columns)


def measure(rows, columns, dim, kind):
    """For each number of ranks the difference's norm, and the update's, over that of "duplicated".

    A part's update needs no other rank, and "duplicated" is that of the matrix on one.
    """
    whole = direction(rows, columns, kind)
    name = "emerging_optimizers" if HAS_KEYS else "muon"
    with megatrons_muon():
        own = importlib.import_module(f"megatron.core.optimizer.{name}")
        muon = own.TensorParallelMuon([torch.nn.Parameter(whole)])
        expected = muon.orthogonalize(whole, whole)
        found = []
        for ranks in RANKS:
            parts = [muon.orthogonalize(part, part) for part in whole.chunk(ranks, dim)]
            update = torch.cat(parts, dim)
            found.append(((update - expected).norm() / expected.norm()).item())
            found.append((update.norm() / expected.norm()).item())
    return found
