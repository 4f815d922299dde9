"""How a kernel is run, on a GPU or interpreted."""

from __future__ import annotations

import numpy
import torch


def call(
    function: object, programs: int, arguments: tuple[object, ...], options: dict[str, object]
) -> None:
    """Runs a kernel on the device of its first argument that is a tensor.

    That is a CUDA device, or the CPU under Triton's interpreter. Products and sums are not
    contracted: contracts round every operation.
    """
    first = next(argument for argument in arguments if isinstance(argument, torch.Tensor))
    options = {**options, "enable_fp_fusion": False}
    if first.device.type == "cuda":
        with torch.cuda.device(first.device):
            function[(programs,)](*arguments, **options)  # type: ignore[index]
    else:
        # numpy, which the interpreter computes with, warns of what IEEE 754 defines
        with numpy.errstate(all="ignore"):
            function[(programs,)](*arguments, **options)  # type: ignore[index]
