"""The linear layer with an fp8 weight, and its gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from megaopt.kernels.float8 import RECIPES, dequantize_reference, quantize_reference

INPUT = RECIPES["current"]
"""The recipe for the input of a scaled product: e4m3fn, per tensor, from its own amax."""

_scaled: ContextVar[bool] = ContextVar("megaopt.float8.scaled_matmul", default=False)


@contextmanager
def scaled_matmul(enabled: bool = True) -> Iterator[None]:
    """Within it, linear layers with a scale per tensor quantize their input and multiply in fp8.

    On a GPU of capability 8.9 or newer, with e4m3fn codes, both sizes of the weight multiples of 16
    and bf16 input, by torch._scaled_mm; elsewhere the product of the dequantized two, which
    has other bits. The gradients are those of the dequantized input and weight. Layers with block
    scales multiply as ever.
    """
    token = _scaled.set(enabled)
    try:
        yield
    finally:
        _scaled.reset(token)


def linear(input: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor:
    """torch.nn.functional.linear of a Float8Weight.

    Args:
        input: (..., columns).
        weight: a Float8Weight, (rows, columns).
        bias: (rows,).

    Returns:
        (..., rows): the bits of F.linear(input, values, bias), where values = weight.dequantize()
        needs a gradient, and of its gradients. For an input that is not contiguous F.linear has
        other products, with other bits, where values needs none; these here are the same for a
        frozen weight and under torch.no_grad.
    """
    # autocast does not know this function: operands are cast here, as F.linear's would be
    kind, dtype = input.device.type, weight.dtype
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        input, bias = input.to(dtype), bias if bias is None else bias.to(dtype)
    # block scales have no scaled product here
    scaled = _scaled.get() and weight.recipe.block is None
    result: Tensor = _Linear.apply(input, weight, bias, dtype, scaled)  # type: ignore[no-untyped-call]
    return result


class _Linear(torch.autograd.Function):
    """Keeps codes for the backward pass, one byte a weight, and dequantizes them again there."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Any, bias: Tensor | None, dtype: torch.dtype, scaled: bool
    ) -> Tensor:
        product: Tensor | None = None
        # fp8 product: the input in e4m3fn with one scale, from its own amax
        if scaled:
            quantized = quantize_reference(input, INPUT, input.dtype)
            codes = quantized.codes
            # torch._scaled_mm wants these; elsewhere the product of the dequantized two serves
            multiplies_fp8 = (
                input.is_cuda
                and torch.version.hip is None
                and torch.cuda.get_device_capability(input.device) >= (8, 9)
                and input.dtype == torch.bfloat16
                and input.numel() > 0
                and all(size % 16 == 0 for size in weight.data8.shape)
            )
            # codes [rows, columns] @ data8.t() [columns, weight's rows], one fp32 scale for each
            if multiplies_fp8:
                product = torch._scaled_mm(
                    codes.reshape(-1, codes.shape[-1]),
                    weight.data8.t(),
                    scale_a=quantized.scale_inv.reshape(()),
                    scale_b=weight.scale_inv.reshape(()),
                    bias=bias,
                    out_dtype=input.dtype,
                ).reshape(*input.shape[:-1], weight.shape[0])
            # the backward pass takes the input as it was multiplied
            input = dequantize_reference(quantized.codes, quantized.scale_inv, INPUT, input.dtype)
        # codes are saved: one byte a weight until the backward pass
        ctx.save_for_backward(input, weight)
        ctx.dtype = dtype
        if product is None:
            # torch.matmul makes other products where the weight needs no gradient, as in here
            dense = _dense(weight, dtype).requires_grad_()
            product = torch.nn.functional.linear(input, dense, bias)
        return product

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients as torch has them of F.linear: the same products, in the same order."""
        # rows: [all leading dimensions, out_features], of the input [.., in_features]
        input, weight = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        grad_input = grad_weight = grad_bias = None
        # grad @ weight, with values dequantized again
        if ctx.needs_input_grad[0]:
            flat, dense = input.reshape(-1, input.shape[-1]), _dense(weight, ctx.dtype)
            # torch computes the transposed product for a transposed input: other bits otherwise
            is_transposed = flat.stride() == (1, flat.shape[0])
            product = dense.t().mm(rows.t()).t() if is_transposed else rows.mm(dense)
            grad_input = product.reshape(input.shape)
        # grad.t() @ input, in the weight's dtype
        if ctx.needs_input_grad[1]:
            grad_weight = rows.t().mm(input.reshape(-1, input.shape[-1])).to(weight.dtype)
        if ctx.needs_input_grad[2]:
            # over all rows; F.linear adds the bias to rows only where the input is made of them
            is_in_rows = input.dim() == 2 or input.is_contiguous()
            grad_bias = rows.sum(0) if is_in_rows else grad.sum_to_size(grad.shape[-1])
        return grad_input, grad_weight, grad_bias, None, None


def _dense(weight: Any, dtype: torch.dtype) -> Tensor:
    """The values, plain; hooks on saved tensors may have made them plain already."""
    dense: Tensor = weight.dequantize() if hasattr(weight, "data8") else weight
    return dense.to(dtype)
