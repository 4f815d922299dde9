"""Where tensors lie. They do move: zero_grad, offload, Megatron's swap of parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megaopt.kernels.step.batch import Buffers

# One call for all tensors, in CUDA builds of torch (CUDA graph trees check their inputs with it).
# Private, so the loop stands in where it is gone.
_EQUAL_AT = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", None)


def addresses(tensors: Sequence[torch.Tensor]) -> list[int]:
    """The address of each tensor's first element, 0 for an empty tensor."""
    return list(map(torch.Tensor.data_ptr, tensors))


def unchanged(tensors: Sequence[torch.Tensor], known: list[int]) -> bool:
    """Whether the tensors, as many as were known, still lie at the known addresses."""
    if _EQUAL_AT is not None:
        return bool(_EQUAL_AT(list(tensors), known, list(range(len(known)))))
    return addresses(tensors) == known


class AddressBook:
    """The addresses of a combination's buffers, as last seen."""

    def __init__(self) -> None:
        self.known: dict[str, list[int]] = {}

    def moved(self, buffers: Buffers) -> list[str]:
        """The slots with a tensor that is not where it was at the last call; notes where it is."""
        moved = [
            slot
            for slot, tensors in buffers.items()
            if slot not in self.known or not unchanged(tensors, self.known[slot])
        ]
        for slot in moved:
            self.known[slot] = addresses(buffers[slot])
        return moved
