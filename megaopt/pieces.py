"""Codes in blocks are decoded and encoded in pieces of whole blocks.

What lies between takes some 26 bytes an element, for a whole parameter more than its state.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from megaopt.kernels.formats import Format
from megaopt.kernels.step.reference import decoded, store_blocks

PIECE = 1 << 20
"""Elements that are decoded or encoded at a time; a multiple of all blocks."""


def _pieces(numel: int, first: int, block: int) -> Iterator[tuple[slice, slice]]:
    """Which elements, and which scales: each piece from one block's beginning to another's."""
    lead, count = first % block, PIECE // block
    for number in range(0, -(-(numel + lead) // block), count):
        begin, end = number * block - lead, (number + count) * block - lead
        yield slice(max(begin, 0), min(end, numel)), slice(number, number + count)


def decoded_blocks(
    form: Format, code: torch.Tensor, scale: torch.Tensor, shape: tuple[int, ...], first: int
) -> torch.Tensor:
    """The fp32 values of codes in blocks, of this shape; as megaopt.kernels.step's `decoded`."""
    values = torch.empty(shape, dtype=torch.float32, device=code.device)
    flat, codes, scales = values.view(-1), code.reshape(-1), scale.reshape(-1)
    for own, blocks in _pieces(flat.numel(), first, form.block):
        stored = codes[own.start // form.packed : own.stop // form.packed]
        flat[own] = decoded(form, stored, scales[blocks], first + own.start)
    return values


def encode_blocks(
    code: torch.Tensor, scale: torch.Tensor, value: torch.Tensor, form: Format, first: int
) -> None:
    """Encodes fp32 values into contiguous codes and scales; as megaopt.kernels.step's."""
    flat, codes, scales = value.reshape(-1), code.view(-1), scale.view(-1)
    for own, blocks in _pieces(flat.numel(), first, form.block):
        stored = codes[own.start // form.packed : own.stop // form.packed]
        store_blocks(stored, scales[blocks], signless(flat[own], form), form, first + own.start)


def signless(value: torch.Tensor, form: Format) -> torch.Tensor:
    """With 0 in the place of -0, for which moments without a sign have no code."""
    return value + 0.0 if form.unsigned else value
