"""Makes and checks groups' lr and step as tensors on the device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from megaopt.options.checks import COUNT, NOT_NEGATIVE, is_dense, number, shown
from megaopt.state.memory import check_writable

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
