"""Groups whose lr and step are on the device, and what a CUDA graph may capture."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from megaopt.batches import Batches
from megaopt.checks import COUNT, NOT_NEGATIVE, is_dense, number, shown
from megaopt.kernels.step.table import is_capturing
from megaopt.memory import check_writable

DTYPES = {"lr": torch.float32, "step": torch.int32}
SHAPES = {"lr": (), "step": (1,)}
RANGES = {"lr": NOT_NEGATIVE, "step": COUNT}


def on_device(group: Mapping[str, Any], device: torch.device, where: str) -> dict[str, Any]:
    """A group's lr and step as tensors on the device, without those that are so already.

    Also where inference mode is on: later steps and schedules write them. The group
    stays as it is. Raises ValueError for numbers out of range.
    """
    made = {}
    for name, dtype in DTYPES.items():
        if not _fits(group[name], name, device) or group[name].is_inference():
            value = number(f"{where}: {name}", group[name], RANGES[name])
            with torch.inference_mode(False):
                made[name] = torch.full(SHAPES[name], value, dtype=dtype, device=device)
    return made


def check_device_numbers(group: Mapping[str, Any], device: torch.device, where: str) -> None:
    """Raises ValueError unless lr and step are what `on_device` makes, and step can be written."""
    for name, dtype in DTYPES.items():
        if not _fits(group[name], name, device):
            raise ValueError(
                f"{where}: {name} must be a {dtype} tensor of shape {SHAPES[name]} on {device} "
                f"with capturable=True, got {shown(group[name])}; to change it, use "
                f"group[{name!r}].fill_(...)"
            )
    check_writable(group["step"], f"{where}: step")


def _fits(value: Any, name: str, device: torch.device) -> bool:
    return (
        is_dense(value)
        and value.dtype == DTYPES[name]
        and value.numel() == 1
        and value.device == device
    )


def check_capture(
    device: torch.device, capturable: bool, backend: Callable[[torch.device], str]
) -> None:
    """Raises RuntimeError where a CUDA graph captures a step that reads numbers of the host.

    Args:
        device: the optimizer's.
        capturable: whether numbers are on the device.
        backend: names that of a device.
    """
    if not is_capturing(device):
        return
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
    if any(batch.staged for batch in last.batches):
        raise RuntimeError(
            "a CUDA graph is being captured, and a parameter, gradient or state is not contiguous: "
            "only contiguous ones are allowed in a capture"
        )
    for batch in last.batches:
        reason = batch.why_not_captured()
        if reason is not None:
            raise RuntimeError(f"a CUDA graph is being captured, and {reason}")
