"""Adam and AdamW under contract torch: the bits of torch.optim's fused kernels on an NVIDIA GPU.

fp32, correctly rounded divisions and root, with the multiply-adds contracted as nvcc contracts them
in torch's kernel. torch computes the bias corrections on the device with CUDA's powf, which no CPU
repeats in every bit, nor the powf of Triton's library (another at step 1): they are asked of torch.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy
import torch

from megaopt.kernels.optional_triton import helper, tl
from megaopt.kernels.rules.base import Rule, round_to_fp32
from megaopt.kernels.rules.loading import load_nine

# Powers are computed so many at a time: one wait for the GPU in 4,096 steps.
POWERS = 4096


@functools.lru_cache(maxsize=16)
def powers(beta: float, block: int) -> numpy.ndarray[Any, numpy.dtype[numpy.float32]]:
    """fp32 beta**step for POWERS steps from block * POWERS on, by torch's pow on the GPU.

    Without a GPU by torch's pow on the CPU, whose last bit may differ: for tests of the twin.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    steps = torch.arange(block * POWERS, (block + 1) * POWERS, device=device).float()
    base = torch.tensor(beta, dtype=torch.float32, device=device)
    found: numpy.ndarray[Any, numpy.dtype[numpy.float32]] = torch.pow(base, steps).cpu().numpy()
    return found


def scalars(group: Mapping[str, Any]) -> tuple[float, ...]:
    """One row of fp32 numbers for a parameter group, each operation rounded to fp32.

    Args:
        group: as for megaopt.kernels.rules.adam_ieee.scalars.

    Returns:
        beta1, beta2, 1 - beta1, 1 - beta2, lr / (1 - beta1**step), sqrt(1 - beta2**step), eps,
        weight_decay, lr * weight_decay; without bias correction the powers are 0.
    """
    one = numpy.float32(1)
    betas = [numpy.float32(beta) for beta in group["betas"]]
    lr, decay = numpy.float32(float(group["lr"])), numpy.float32(float(group["weight_decay"]))
    block, place = divmod(group["step"], POWERS)
    corrections = [one, one]
    if group["bias_correction"]:
        corrections = [one - powers(float(beta), block)[place] for beta in betas]
    with numpy.errstate(all="ignore"):
        row = (*betas, one - betas[0], one - betas[1])
        row += (lr / corrections[0], numpy.sqrt(corrections[1]), float(group["eps"]))
        row += (decay, lr * decay)
    return tuple(round_to_fp32(float(value)) for value in row)


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
    """The scalars as fp32 tensors on the device of `like`, where a product takes them exactly."""
    return [torch.tensor(value, dtype=torch.float32, device=like.device) for value in scalars]


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
    if scalars[8]:
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
    if scalars[7]:
        grad = fused_multiply_add(param, row[7], grad)
    return updated_reference(param, exp_avg, exp_avg_sq, grad, row)


MOMENTS = ("exp_avg", "exp_avg_sq")
ADAMW_TORCH = Rule("adamw", "torch", MOMENTS, scalars, load_nine, adamw, adamw_reference)
ADAM_TORCH = Rule("adam", "torch", MOMENTS, scalars, load_nine, adam, adam_reference)
