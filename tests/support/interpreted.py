"""What launches kernels on tensors that lie on a CPU needs Triton's interpreter."""

import pytest
import torch

interpreted = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the interpreter is off beside a GPU"
)
LAUNCHED = ("hybrid", "grouped", "fused")
"""GaLoreAdamW's kernels that are Triton's."""


def marks_of(options):
    """For a test with these arguments of an optimizer, parameters on the CPU."""
    launches = options.get("kernel") in LAUNCHED or options.get("backend") == "triton"
    return [interpreted] if launches else []
