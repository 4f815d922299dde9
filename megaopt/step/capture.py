"""Refuses what a CUDA graph would capture and cannot repeat."""

from __future__ import annotations

from collections.abc import Callable

import torch

from megaopt.kernels.chunks.table import is_capturing
from megaopt.step.batch import Batches


def can_capture(device: torch.device) -> bool:
    """Whether a graph may capture steps on a device."""
    return device.type == "cuda"


def check_capture(
    device: torch.device, capturable: bool, backend: Callable[[torch.device], str]
) -> bool:
    """Whether a CUDA graph captures; RuntimeError for a step that reads numbers of the host.

    Args:
        device: the optimizer's.
        capturable: whether numbers are on the device.
        backend: names that of a device.
    """
    if not is_capturing(device):
        return False
    name = backend(device)
    if name != "triton":
        raise RuntimeError(
            f"a CUDA graph is being captured, and backend={name!r} computes on the host: only "
            "backend='triton' can be captured"
        )
    if not capturable:
        raise RuntimeError(
            "a CUDA graph is being captured, and capturable=False: the graph would repeat this "
            "step's lr and step for ever; pass capturable=True"
        )
    return True


def check_captured_batches(device: torch.device, last: Batches | None, fit: bool) -> None:
    """Raises RuntimeError for what a step can do only outside a graph.

    Args:
        device: the optimizer's.
        last: the batches of the last step.
        fit: whether this step has the same.
    """
    if not is_capturing(device):
        return
    if last is None or not fit:
        raise RuntimeError(
            "a CUDA graph is being captured, and the parameters, gradients or states are not those "
            "of the last step (other dtypes, sizes or parameters with gradients, or no step yet): "
            "take one step like this one before the capture; only the gradients' addresses may "
            "differ"
        )
    if any(batch.source.staged for batch in last.batches):
        raise RuntimeError(
            "a CUDA graph is being captured, and a parameter, gradient or state is not contiguous: "
            "only contiguous ones are allowed in a capture"
        )
    for batch in last.batches:
        reason = batch.why_not_captured()
        if reason is not None:
            raise RuntimeError(f"a CUDA graph is being captured, and {reason}")
