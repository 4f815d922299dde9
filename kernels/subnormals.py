"""A test of whether the CPU computes with subnormal numbers."""

from __future__ import annotations

import torch

SMALLEST = torch.full((1,), 2.0**-149, dtype=torch.float32, device="cpu")


def check_subnormals() -> None:
    """Raises RuntimeError where this thread makes zeros of subnormal numbers on the CPU."""
    if int((SMALLEST + SMALLEST).view(torch.int32)) != 2:
        raise RuntimeError(
            "subnormal numbers must count on the CPU, and this thread makes zeros of "
            "them: call torch.set_flush_denormal(False)"
        )
