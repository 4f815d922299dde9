"""The gate before every measurement: a step that is not the reference's has no speed."""

from collections.abc import Sequence

import torch
from torch import Tensor

from megaopt.bench.cases import Mode
from megaopt.bench.instance import Instance, build, state_tensors

__all__ = ["compare", "first_difference"]

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def first_difference(
    mode: Mode, sizes: Sequence[int], device: torch.device, steps: int = 4
) -> str | None:
    """Step the Triton kernel and the reference side by side and compare every bit after each step.

    Args:
        mode: The formats.
        sizes: Elements of each tensor.
        device: Where both run.
        steps: How many steps, each with new gradients.

    Returns:
        None where weights and all states agree in every bit, else where they first differ.
    """
    triton = build(mode, sizes, device, "triton")
    reference = build(mode, sizes, device, "reference")
    for step in range(1, steps + 1):
        for instance in (triton, reference):
            instance.draw_gradients()
            instance.optimizer.step()
        if found := compare(triton, reference):
            return f"step {step}, {found}"
    return None


def compare(triton: Instance, reference: Instance) -> str | None:
    """Return the first difference between two instances of one case, None where there is none."""
    pairs = zip(triton.parameters, reference.parameters, strict=True)
    for index, (parameter, other) in enumerate(pairs):
        ours, theirs = state_tensors(triton, parameter), state_tensors(reference, other)
        if ours.keys() != theirs.keys():
            return f"tensor {index}: states {sorted(ours)} against {sorted(theirs)}"
        for name, values in ours.items():
            if found := _compare_tensors(values, theirs[name]):
                return f"tensor {index}, {name}{found}"
    return None


def _compare_tensors(ours: Tensor, theirs: Tensor) -> str | None:
    if ours.dtype != theirs.dtype or ours.shape != theirs.shape:
        return f": {ours.dtype} {tuple(ours.shape)} against {theirs.dtype} {tuple(theirs.shape)}"
    one, other = _bits(ours), _bits(theirs)
    if torch.equal(one, other):
        return None
    at = int((one != other).nonzero()[0])
    return f"[{at}]: triton {_hexadecimal(one[at])}, reference {_hexadecimal(other[at])}"


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(INTEGERS[tensor.element_size()]).flatten()


def _hexadecimal(value: Tensor) -> str:
    width = 8 * value.element_size()
    return f"0x{int(value) % 2**width:0{width // 4}x}"
