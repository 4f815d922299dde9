"""Adam and AdamW under contract torch: the bits of torch.optim's fused kernels on an NVIDIA GPU.

fp32, correctly rounded divisions and root, with the multiply-adds contracted as nvcc contracts them
in torch's kernel. The bias corrections are computed on the device in fp32: CUDA's powf, which no
CPU repeats in every bit; the kernel takes it from CUDA's library of device functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy
import torch

from megaopt.kernels.optional_triton import MISSING, helper, tl
from megaopt.kernels.rules.base import Rule, round_to_fp32

if MISSING is None:
    from triton.language.extra.cuda import libdevice
else:
    libdevice: Any = None  # type: ignore[no-redef]


def scalars(group: Mapping[str, Any]) -> tuple[float, ...]:
    """One row of fp32 numbers for a parameter group.

    Args:
        group: as for megaopt.kernels.rules.adam_ieee.scalars.

    Returns:
        beta1, beta2, 1 - beta1, 1 - beta2 (in fp32), lr, eps, weight_decay, lr * weight_decay (in
        fp32), step, and 1 with bias correction or 0 without.
    """
    beta1, beta2 = (numpy.float32(beta) for beta in group["betas"])
    lr, decay = numpy.float32(float(group["lr"])), numpy.float32(float(group["weight_decay"]))
    row = (beta1, beta2, numpy.float32(1) - beta1, numpy.float32(1) - beta2, lr)
    row += (float(group["eps"]), decay, lr * decay)
    row += (float(group["step"]), float(bool(group["bias_correction"])))
    return tuple(round_to_fp32(float(value)) for value in row)


@helper
def load(row_ptr):
    beta1 = tl.load(row_ptr)
    beta2 = tl.load(row_ptr + 1)
    lr = tl.load(row_ptr + 4)
    step = tl.load(row_ptr + 8)
    corrected = tl.load(row_ptr + 9) != 0
    correction1 = tl.where(corrected, 1.0 - libdevice.pow(beta1, step), 1.0)
    correction2 = tl.where(corrected, 1.0 - libdevice.pow(beta2, step), 1.0)
    return (
        beta1,
        beta2,
        tl.load(row_ptr + 2),
        tl.load(row_ptr + 3),
        tl.math.div_rn(lr, correction1),
        tl.math.sqrt_rn(correction2),
        tl.load(row_ptr + 5),
        tl.load(row_ptr + 6),
        tl.load(row_ptr + 7),
    )


@helper
def updated(param, exp_avg, exp_avg_sq, grad, scalars):
    beta1, beta2, one_minus_beta1, one_minus_beta2, step_size, correction2, eps, _, _ = scalars
    exp_avg = tl.fma(beta1 + tl.zeros_like(grad), exp_avg, one_minus_beta1 * grad)
    square = one_minus_beta2 * (grad * grad)
    exp_avg_sq = tl.fma(beta2 + tl.zeros_like(grad), exp_avg_sq, square)
    root = tl.math.div_rn(tl.math.sqrt_rn(exp_avg_sq), correction2 + tl.zeros_like(grad))
    param = param - tl.math.div_rn(step_size * exp_avg, root + eps)
    return param, exp_avg, exp_avg_sq


@helper
def adamw(param, exp_avg, exp_avg_sq, grad, scalars):
    decay = scalars[8] + tl.zeros_like(param)
    # without decay torch leaves the product out, and with it the NaN of 0 * infinity
    param = tl.where(decay == 0, param, tl.fma(-decay, param, param))
    return updated(param, exp_avg, exp_avg_sq, grad, scalars)


@helper
def adam(param, exp_avg, exp_avg_sq, grad, scalars):
    decay = scalars[7] + tl.zeros_like(param)
    grad = tl.where(decay == 0, grad, tl.fma(param, decay, grad))
    return updated(param, exp_avg, exp_avg_sq, grad, scalars)


def fused_multiply_add(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """Rounds a * b + c to fp32 once.

    The product is exact in fp64 (48 bits). The sum is rounded to odd there: if it is inexact, its
    last bit is set, so that the rounding to fp32, 29 bits shorter, cannot meet a false tie
    (Boldo & Melquiond 2008).
    """
    product, addend = a.double() * b.double(), c.double()
    total = product + addend
    virtual = total - product
    error = (product - (total - virtual)) + (addend - virtual)
    bits = total.view(torch.int64)
    toward_zero = (error != 0) & ((error < 0) == (total > 0))
    bits = torch.where(toward_zero, bits - 1, bits)  # the sum cut off, then the last bit set
    bits = torch.where((error != 0) & error.isfinite(), bits | 1, bits)
    return bits.view(torch.float64).float()


def row_of(scalars: tuple[float, ...], like: torch.Tensor) -> list[torch.Tensor]:
    """The kernel's scalars as fp32 tensors of one element on the device of `like`."""
    values = [torch.tensor(value, device=like.device) for value in scalars]
    beta1, beta2, one_minus1, one_minus2, lr, eps, decay, lr_decay, step, corrected = values
    corrections = [
        1.0 - beta.pow(step) if corrected else 1.0 + 0.0 * beta for beta in (beta1, beta2)
    ]
    root = corrections[1].double().sqrt().float()
    return [beta1, beta2, one_minus1, one_minus2, lr / corrections[0], root, eps, decay, lr_decay]


def updated_reference(
    param: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    grad: torch.Tensor,
    row: list[torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The new param, exp_avg and exp_avg_sq after weight decay, fp32 of one shape."""
    beta1, beta2, one_minus_beta1, one_minus_beta2, step_size, correction2, eps = row[:7]
    exp_avg = fused_multiply_add(beta1, exp_avg, one_minus_beta1 * grad)
    exp_avg_sq = fused_multiply_add(beta2, exp_avg_sq, one_minus_beta2 * (grad * grad))
    root = exp_avg_sq.double().sqrt().float() / correction2
    return param - (step_size * exp_avg) / (root + eps), exp_avg, exp_avg_sq


def adamw_reference(
    param: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    grad: torch.Tensor,
    scalars: tuple[float, ...],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One AdamW update as torch's fused kernel computes it; the arguments stay as they are."""
    row = row_of(scalars, param)
    if scalars[7]:
        param = fused_multiply_add(-row[8], param, param)
    return updated_reference(param, exp_avg, exp_avg_sq, grad, row)


def adam_reference(
    param: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    grad: torch.Tensor,
    scalars: tuple[float, ...],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One Adam update with L2 weight decay as torch's fused kernel computes it."""
    row = row_of(scalars, param)
    if scalars[6]:
        grad = fused_multiply_add(param, row[7], grad)
    return updated_reference(param, exp_avg, exp_avg_sq, grad, row)


MOMENTS = ("exp_avg", "exp_avg_sq")
ADAMW_TORCH = Rule("adamw", "torch", MOMENTS, scalars, load, adamw, adamw_reference)
ADAM_TORCH = Rule("adam", "torch", MOMENTS, scalars, load, adam, adam_reference)
