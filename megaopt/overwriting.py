"""Tensors that others hold are written: all of them, or, where anything fails, none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

import torch


def check_writable(tensor: torch.Tensor, where: str) -> None:
    """Raises ValueError for a tensor that cannot be written in place."""
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        raise ValueError(f"{where} must be writable, got a tensor made in inference mode")
    strides = zip(tensor.stride(), tensor.shape, strict=True)
    if any(stride == 0 and size > 1 for stride, size in strides):
        raise ValueError(
            f"{where} must have each element in memory of its own, got strides {tensor.stride()}"
        )


def overwrite(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], commit: Callable[[], object]
) -> None:
    """Copies each second tensor into its first, then commits; an error takes all copies back.

    Each second one becomes the copy of what was there: so no more than one tensor is kept twice.

    Args:
        pairs: of one shape, dtype and device each; the second tensor is nobody else's.
        commit: what goes with the copies; changes everything or, with an error, nothing.
    """
    done: list[tuple[torch.Tensor, torch.Tensor]] = []
    try:
        for tensor, new in pairs:
            old = tensor.detach().clone()
            done.append((tensor, old))
            tensor.copy_(new)
            new.copy_(old)
            done[-1] = (tensor, new)
        commit()
    except BaseException:
        for tensor, old in done:
            with suppress(Exception):  # one that cannot be written is as it was
                tensor.copy_(old)
        raise
