"""Makes results of a product's sums: alpha times, plus beta times another matrix, rounded once.

What is added to a diagonal, and a factor of each product, come before the rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_float
from typing import Any, NamedTuple

import torch

from megaopt.kernels.optional_triton import INTERPRETED, helper, tl
from megaopt.kernels.products.reference import NAN, products_reference

# All NaNs are one, the one that NVIDIA's GPUs make: operations on fp32 numbers 0x7FFFFFFF, and
# roundings of it 0x7FFF.
OUTS = {
    torch.float32: (torch.int32, NAN),
    torch.bfloat16: (torch.int16, 0x7FFF),
    torch.float16: (torch.int16, 0x7FFF),
}
"""The dtypes of results: integers of the same width, and the bits of a NaN."""


AT_ONCE = 2**16
"""Numbers of each matrix of small products that the twin makes together: they stay in caches."""


class Factors(NamedTuple):
    """The matrices of one product."""

    left: torch.Tensor
    right: torch.Tensor
    added: torch.Tensor | None
    out: torch.Tensor
    scale: torch.Tensor | None = None
    """fp32 of one element, on the matrices' device."""


class ProductCoefficients(NamedTuple):
    """The numbers that all products of a launch share, each rounded to fp32."""

    alpha: float = 1.0
    beta: float = 1.0
    diagonal: float = 0.0


def rounded_reference(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """fp32 numbers rounded to nearest, ties to even, to bf16 or fp16, or as they are; one NaN."""
    integers, nan = OUTS[dtype]
    bits = value.to(dtype).view(integers)
    return torch.where(value.isnan(), nan, bits).view(dtype)


def finished_reference(
    total: torch.Tensor,
    alpha: float,
    dtype: torch.dtype,
    added: torch.Tensor | None = None,
    beta: float = 1.0,
    diagonal: float = 0.0,
    scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns scale (alpha total + beta added + diagonal I), of one matrix or a stack of them.

    Each operation is rounded to fp32, as the numbers are, and the result to the dtype.
    """
    value = total * c_float(alpha).value
    if added is not None:
        value = value + added.float() * c_float(beta).value
    if diagonal:
        value.diagonal(dim1=-2, dim2=-1).add_(c_float(diagonal).value)
    if scale is not None:
        value = value * scale
    return rounded_reference(value, dtype)


def products_with_epilogue(
    products: Sequence[Factors], numbers: ProductCoefficients, mirrored: bool
) -> None:
    """The twin of kernel.products_kernel: products of one shape are made together, if small."""
    # products of one shape are made as one stack, which grows until it is large enough
    alike: dict[Any, list[Factors]] = {}
    full: list[list[Factors]] = []
    for product in products:
        shapes = product.left.shape, product.right.shape
        few = alike.setdefault(shapes, [])
        few.append(product)
        most = max(product.left.numel(), product.right.numel(), product.out.numel())
        if len(few) * most > AT_ONCE:
            full.append(alike.pop(shapes))
    for few in (*full, *alike.values()):
        # [products, m, k], and so on; all have the same optional matrices, and one is not copied
        stacks: dict[str, Any] = dict.fromkeys(Factors._fields)
        for name in ("left", "right", "added", "scale"):
            matrices = [getattr(product, name) for product in few]
            if matrices[0] is not None:
                stacks[name] = matrices[0][None] if len(few) == 1 else torch.stack(matrices)
        # fp32 [products, m, n]
        total = products_reference(stacks["left"], stacks["right"])
        (alpha, beta, diagonal), scale = numbers, stacks["scale"]
        factors = None if scale is None else scale[:, None, None]
        arguments = (alpha, few[0].out.dtype, stacks["added"], beta, diagonal, factors)
        results = finished_reference(total, *arguments)
        # the numbers below the diagonal stand above it, too
        if mirrored:
            is_below = torch.ones_like(results, dtype=torch.bool).tril()
            results = torch.where(is_below, results, results.mT)
        torch._foreach_copy_([product.out for product in few], list(results.unbind()))


if INTERPRETED:
    from triton.runtime.interpreter import TensorHandle

    from megaopt.kernels.products.chain import TYPES, values_of

    def widened(value: Any) -> Any:
        """The value in fp32: the interpreter's own cast from bf16 makes zeros of subnormals."""
        values = values_of(value).float()
        kind = tl.block_type(tl.float32, value.shape)
        return tl.tensor(TensorHandle(values.numpy(), tl.float32), kind)

    def rounded(value: Any, ELEMENT: tl.constexpr) -> Any:
        """The value, rounded as a GPU does: the interpreter's own cast to bf16 truncates."""
        element = ELEMENT.value if isinstance(ELEMENT, tl.constexpr) else ELEMENT
        values = rounded_reference(torch.from_numpy(value.handle.data), TYPES[element])
        data = (values.view(torch.uint16) if element == tl.bfloat16 else values).numpy()
        return tl.tensor(TensorHandle(data, element), tl.block_type(element, value.shape))

else:

    @helper
    def widened(value):
        return value.to(tl.float32)

    @helper
    def rounded(value, ELEMENT: tl.constexpr):
        return value.to(ELEMENT)


@helper
def finished(total, alpha, added, beta, diagonal, is_diagonal, scale, ELEMENT: tl.constexpr):
    """`finished_reference` in Triton; is_diagonal: a mask, None where nothing is added there."""
    # fp32; each operation is rounded by itself, as nothing is fused
    value = total * alpha
    if added is not None:
        value = value + widened(added) * beta
    if is_diagonal is not None:
        value = tl.where(is_diagonal, value + diagonal, value)
    if scale is not None:
        value = value * scale
    return rounded(value, ELEMENT)
