"""One step of a product's chain: tensor cores, or their twin under the interpreter."""

from __future__ import annotations

from typing import Any

import numpy
import torch

from megaopt.kernels.optional_triton import INTERPRETED, helper, tl
from megaopt.kernels.products.reference import product_reference

if INTERPRETED:
    from triton.runtime.interpreter import TensorHandle

    TYPES = {tl.bfloat16: torch.bfloat16, tl.float16: torch.float16, tl.float32: torch.float32}

    def _values(tile: Any) -> torch.Tensor:
        own = torch.from_numpy(numpy.ascontiguousarray(tile.handle.data))
        return own.view(TYPES[tile.dtype])

    def chained(left: Any, right: Any, total: Any) -> Any:
        """fp32 total + left @ right, docs/numbers.md's "Products"; tiles of bf16, fp16 or fp32."""
        found = product_reference(_values(left), _values(right), _values(total))
        return tl.tensor(TensorHandle(found.numpy(), tl.float32), total.type)

else:

    @helper
    def chained(left, right, total):  # type: ignore[no-untyped-def]
        """fp32 total + left @ right, docs/numbers.md's "Products"; tiles of bf16, fp16 or fp32."""
        if left.dtype == tl.float32:
            total = tl.dot(left, right, total, input_precision="tf32")
        else:
            total = tl.dot(left, right, total, input_precision="ieee")
        return total
