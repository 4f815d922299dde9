"""Codes are decoded and encoded in pieces, those in blocks in pieces of whole blocks.

What lies between takes some 26 bytes an element, for a whole parameter more than its state. Of
states in host memory each piece goes to the card and back: on the host itself one thread took 30 s
to decode 8-bit moments and remainders of 1.1e9 elements.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from megaopt.kernels.formats import Format
from megaopt.kernels.step.reference import decoded, store_blocks

PIECE = 1 << 20
"""Elements that are decoded or encoded at a time; a multiple of all blocks."""


def _pieces(numel: int, first: int, block: int) -> Iterator[tuple[slice, slice]]:
    """Yields elements and their scales; each piece goes from one block's beginning to another's."""
    # lead: elements of the first block that lie before this part; count: blocks of a piece
    lead, count = first % block, PIECE // block
    for number in range(0, -(-(numel + lead) // block), count):
        begin, end = number * block - lead, (number + count) * block - lead
        yield slice(max(begin, 0), min(end, numel)), slice(number, number + count)


def decoded_blocks(
    form: Format, code: torch.Tensor, scale: torch.Tensor, shape: tuple[int, ...], first: int
) -> torch.Tensor:
    """The fp32 values of codes in blocks, of this shape; as megaopt.kernels.step's `decoded`."""
    # values: fp32, flat; codes: several elements a byte where packed; scales: one a block
    values = torch.empty(shape, dtype=torch.float32, device=code.device)
    flat, codes, scales = values.view(-1), code.reshape(-1), scale.reshape(-1)
    for elements, blocks in _pieces(flat.numel(), first, form.block):
        # on the scales' device: codes may be in host memory
        stored = codes[elements.start // form.packed : elements.stop // form.packed].to(
            scale.device
        )
        flat[elements] = decoded(form, stored, scales[blocks], first + elements.start)
    return values


def encode_blocks(
    code: torch.Tensor, scale: torch.Tensor, value: torch.Tensor, form: Format, first: int
) -> None:
    """Encodes fp32 values into contiguous codes and scales; as megaopt.kernels.step's."""
    flat, codes, scales = value.reshape(-1), code.view(-1), scale.view(-1)
    for elements, blocks in _pieces(flat.numel(), first, form.block):
        stored = codes[elements.start // form.packed : elements.stop // form.packed]
        # new codes on the scales' device, then copied to where the codes are
        new, piece = torch.empty_like(stored, device=scale.device), flat[elements].to(scale.device)
        # moments without a sign have no code for -0
        piece = piece + 0.0 if form.unsigned else piece
        store_blocks(new, scales[blocks], piece, form, first + elements.start)
        stored.copy_(new)


def decoded_joined(form: Format, weight: torch.Tensor, code: torch.Tensor) -> torch.Tensor:
    """The fp32 masters of weights and what is stored beside them, all of one shape."""
    values = torch.empty(code.shape, dtype=torch.float32, device=code.device)
    flat, weights, codes = values.view(-1), weight.reshape(-1), code.reshape(-1)
    # no blocks: pieces of PIECE elements
    for elements, _ in _pieces(flat.numel(), 0, 1):
        flat[elements] = form.decode_reference(weights[elements], codes[elements].to(weight.device))
    return values


def encode_joined(
    code: torch.Tensor, value: torch.Tensor, form: Format, weight: torch.Tensor
) -> torch.Tensor:
    """Stores in `code` what a weight does not hold of fp32 masters; returns the new weight.

    The new weight has the masters' shape; the old one stays as it is.
    """
    new = torch.empty(value.shape, dtype=weight.dtype, device=weight.device)
    flat, weights, codes = value.reshape(-1), new.view(-1), code.view(-1)
    for elements, _ in _pieces(flat.numel(), 0, 1):
        weights[elements], codes[elements] = form.encode_by_hand(flat[elements].to(weight.device))
    return new
