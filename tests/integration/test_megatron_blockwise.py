"""How far Megatron's own "blockwise" Muon goes from whole matrices: the table of the page."""

import importlib
import importlib.util
import re
from pathlib import Path

import pytest
import torch
from megatron_gpt import HAS_KEYS

from megaopt.lab.regression.megatron.emerging import megatrons_muon

# How far Megatron's own "blockwise" Muon goes from whole matrices.

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


if importlib.util.find_spec("megatron") is None:
    pytest.skip("megatron-core is not installed", allow_module_level=True)


PAGE = Path(__file__).parents[2] / "docs/how-to/megatron.md"
ROW = re.compile(r"^\| (\d+) x (\d+) \| (rows|columns) \| (alike|falling) \|(.*)\|$", re.MULTILINE)


def rows_of_the_page():
    text = PAGE.read_text(encoding="utf-8")
    return [
        (int(rows), int(columns), dim, kind, [float(each) for each in numbers.split("|")])
        for rows, columns, dim, kind, numbers in ROW.findall(text)
    ]


def test_the_page_says_how_far_blockwise_goes(pools):
    """To one of the last digit: processors sum products of 16 bits in other orders."""
    told = rows_of_the_page()
    assert len(told) == 8
    for rows, columns, dim, kind, numbers in told:
        (found,) = pools(1)(measure, rows, columns, 0 if dim == "rows" else 1, kind)
        assert found[0] == 0
        assert all(abs(a - b) < 0.015 for a, b in zip(found, numbers, strict=True)), found
