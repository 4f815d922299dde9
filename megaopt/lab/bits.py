"""Bit patterns in which every NaN is the same."""

from __future__ import annotations

import math

import torch

from megaopt.kernels.digest.codes import codes_of


def alike_codes(tensor: torch.Tensor) -> torch.Tensor:
    """The bit patterns as integers of the same width, of every NaN that of torch.nan."""
    codes = codes_of(tensor)
    if not tensor.is_floating_point():
        return codes
    nan = codes_of(torch.tensor(math.nan).to(tensor.dtype))
    return codes.masked_fill(tensor.detach().isnan(), int(nan.item()))
