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

    def values_of(tile: Any) -> torch.Tensor:
        """The numbers of an interpreted tile, in its dtype."""
        values = torch.from_numpy(numpy.ascontiguousarray(tile.handle.data))
        return values.view(TYPES[tile.dtype])

    def chained(left: Any, right: Any, total: Any) -> Any:
        """fp32 total + left @ right, docs/numbers.md's "Products"; tiles of bf16, fp16 or fp32."""
        left_values, right_values, sums = (
            values_of(left),
            values_of(right),
            values_of(total).clone(),
        )
        # what lies behind a matrix is zeros, which change no bit but beside infinities and NaN
        m, n = _end(left_values, 1, right_values), _end(right_values, 0, left_values)
        k = max(_end(left_values, 0), _end(right_values, 1))
        sums[:m, :n] = product_reference(left_values[:m, :k], right_values[:k, :n], sums[:m, :n])
        return tl.tensor(TensorHandle(sums.numpy(), tl.float32), total.type)

    def _end(matrix: torch.Tensor, dim: int, factor: torch.Tensor | None = None) -> int:
        """Returns the number of rows (dim 1) or columns (dim 0) up to the last that is not zeros.

        It counts all of them where the matrix is multiplied by a `factor` that is not finite.
        """
        if factor is not None and not bool(factor.isfinite().all()):
            return matrix.shape[1 - dim]
        places = (matrix != 0).any(dim).nonzero()
        return int(places[-1]) + 1 if len(places) else 0

else:

    @helper
    def chained(left, right, total):  # type: ignore[no-untyped-def]
        """fp32 total + left @ right, docs/numbers.md's "Products"; tiles of bf16, fp16 or fp32."""
        if left.dtype == tl.float32:
            total = tl.dot(left, right, total, input_precision="tf32")
        else:
            total = tl.dot(left, right, total, input_precision="ieee")
        return total
