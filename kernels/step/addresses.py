"""Where tensors lie. They do move: zero_grad, offload, Megatron's swap of parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megaopt.kernels.step.batch import Buffers


def addresses(tensors: Sequence[torch.Tensor]) -> list[int]:
    """The address of each tensor's first element, 0 for an empty tensor."""
    return list(map(torch.Tensor.data_ptr, tensors))


class AddressBook:
    """The addresses of a combination's buffers, as last seen."""

    def __init__(self) -> None:
        self.known: dict[str, list[int]] = {}

    def moved(self, buffers: Buffers) -> list[str]:
        """The slots with a tensor that is not where it was at the last call; notes where it is."""
        now = {slot: addresses(tensors) for slot, tensors in buffers.items()}
        moved = [slot for slot, found in now.items() if found != self.known.get(slot)]
        self.known = now
        return moved
