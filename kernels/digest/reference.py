"""The digest in plain torch: the truth in tests, and what works without Triton."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch.nn.functional import pad

from megaopt.kernels.digest.codes import FINITE, NONFINITE, ROW, codes_of, place_of_codes
from megaopt.kernels.place import Place

WORD = 2**32 - 1
ROW_BITS = ROW.bit_length() - 1
PIECE = {"cpu": 2**16, "cuda": 2**21}
"""Elements that are worked on at a time: what fits into a processor's cache, or fills a GPU."""


def factors_reference(number: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """For each number from 0 to 2**32 - 1, int64, the odd factors of both lanes."""
    mixed = (number + 0x9E3779B9).bitwise_and_(WORD)
    mixed = (mixed ^ mixed >> 16).mul_(0x21F0AAAD).bitwise_and_(WORD)
    mixed = (mixed ^ mixed >> 15).mul_(0x735A2D97).bitwise_and_(WORD)
    mixed ^= mixed >> 15
    second = (mixed * 0x9E3779B1).bitwise_and_(WORD)
    return mixed | 1, (second ^ second >> 16) | 1


@lru_cache(maxsize=8)
def column_factors(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The factors of places within a row, int64 [ROW]."""
    with torch.inference_mode(False):
        return factors_reference(torch.arange(ROW, device=device) + 2**31)


def words_of(codes: torch.Tensor) -> list[torch.Tensor]:
    """The bits as int64 from 0 to 2**32 - 1; of 8 bytes the lower and the upper words."""
    if codes.dtype is torch.int64:
        return [codes & WORD, codes >> 32 & WORD]
    return [codes.long().bitwise_and_(2 ** (8 * codes.element_size()) - 1)]


def lanes_of(
    words: Sequence[torch.Tensor],
    columns: tuple[torch.Tensor, torch.Tensor],
    rows: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """int64 [2], the sums of words [rows, width], and factors of columns and rows."""
    (column0, column1), (row0, row1) = columns, rows
    lane0, lane1 = words[0] * column0, words[0] * column1
    if len(words) == 2:
        lane0 += words[1] * column1
        lane1 += words[1] * (2 * column0)
    return torch.stack([(lane0.sum(1) * row0).sum(), (lane1.sum(1) * row1).sum()])


def lanes_in_rows(codes: torch.Tensor, first: int) -> torch.Tensor:
    """int64 [2], the sums of codes whose places follow each other from `first` on."""
    lead, numel = first % ROW, len(codes)
    count = -(-(lead + numel) // ROW)
    margins = (lead, count * ROW - lead - numel)
    words = [pad(word, margins).view(count, ROW) for word in words_of(codes)]
    row = torch.arange(count, device=codes.device) + first // ROW
    return lanes_of(words, column_factors(codes.device), factors_reference(row))


def lanes_in_runs(codes: torch.Tensor, begin: int, place: Place) -> torch.Tensor:
    """int64 [2], the sums of a tensor's codes from `begin` on, which are in runs."""
    # as many as always follow each other in one row
    width = math.gcd(ROW, place.first, place.run, place.stride)
    index = torch.arange(begin, begin + len(codes), width, device=codes.device)
    run = index.div(place.run, rounding_mode="floor")
    own = index.add_(place.first).add_(run, alpha=place.stride - place.run)
    column = (own & ROW - 1)[:, None] + torch.arange(width, device=codes.device)
    words = [pad(word, (0, -len(word) % width)).view(-1, width) for word in words_of(codes)]
    column0, column1 = (table[column] for table in column_factors(codes.device))
    return lanes_of(words, (column0, column1), factors_reference(own >> ROW_BITS))


def nonfinite_of(codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | int:
    """How many codes of a dtype are infinities and NaNs."""
    mask, pattern = NONFINITE.get(dtype, FINITE)
    return (codes & mask == pattern).sum() if mask else 0


def add_reference(
    places: Sequence[Place], tensors: Sequence[torch.Tensor], out: torch.Tensor
) -> None:
    """Adds the sums of tensors at places, and their counts, to rows of `out`, int64 [n, 3]."""
    for row, tensor, given in zip(out, tensors, places, strict=True):
        codes, place = codes_of(tensor).flatten(), place_of_codes(tensor, given)
        size = PIECE.get(codes.device.type, PIECE["cuda"])
        # the first piece ends where a row does, and so do all but the last
        ends = range(size - place.first % ROW, len(codes) + size, size)
        for end in ends:
            begin = max(end - size, 0)
            piece = codes[begin:end]
            if place.stride:
                row[:2] += lanes_in_runs(piece, begin, place)
            else:
                row[:2] += lanes_in_rows(piece, place.first + begin)
            row[2] += nonfinite_of(piece, tensor.dtype.to_real())
