"""Tensors that others hold are written: all of them, or, where anything fails, none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

import torch


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
            # old: a copy, kept until the new value is there; then `new` becomes the copy
            old = tensor.detach().clone()
            done.append((tensor, old))
            tensor.copy_(new)
            new.copy_(old)
            done[-1] = (tensor, new)
        commit()
    except BaseException:
        # takes back what was done, the interrupted copy included
        for tensor, old in done:
            with suppress(Exception):  # one that cannot be written is as it was
                tensor.copy_(old)
        raise
