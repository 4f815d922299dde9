"""Adam and AdamW under contract torch: the bits of torch.optim's fused kernels on an NVIDIA GPU.

fp32, correctly rounded divisions and root, with the multiply-adds contracted as nvcc contracts them
in torch's kernel. torch computes the bias corrections on the device with CUDA's powf, which no CPU
repeats in every bit, nor the powf of Triton's library (another at step 1): they are asked of torch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import numpy
import torch

from megaopt.kernels.optional_triton import helper, tl
from megaopt.kernels.rules.adam_numbers import (
    AMSGRAD_MOMENTS,
    BETA1,
    BETA2,
    BIAS_CORRECTION,
    EPS,
    MOMENTS,
    TABLE_LENGTHS,
    TABLES,
    WEIGHT_DECAY,
    hyper,
)
from megaopt.kernels.rules.base import Moment, Rule, round_row
from megaopt.kernels.rules.loading import number

Moments = tuple[torch.Tensor, ...]

# Powers are computed so many at a time: one wait for the GPU in 4,096 steps.
POWERS = 4096


@functools.lru_cache(maxsize=16)
def powers(beta: float, block: int) -> numpy.ndarray[Any, numpy.dtype[numpy.float32]]:
    """fp32 beta**step for POWERS steps from block * POWERS on, by torch's pow on the GPU.

    Without a GPU by torch's pow on the CPU, whose last bit may differ: for tests of the twin.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # fp32 [POWERS] by one pow, brought to the host: the only wait in so many steps
    steps = torch.arange(block * POWERS, (block + 1) * POWERS, device=device).float()
    base = torch.tensor(beta, dtype=torch.float32, device=device)
    table: numpy.ndarray[Any, numpy.dtype[numpy.float32]] = torch.pow(base, steps).cpu().numpy()
    return table


def scalars(group: Mapping[str, Any]) -> tuple[float, ...]:
    """One row of fp32 numbers for a parameter group, each operation rounded to fp32.

    Without bias correction the powers are 0.
    """
    one = numpy.float32(1)
    betas = [numpy.float32(beta) for beta in group["betas"]]
    lr, decay = numpy.float32(float(group["lr"])), numpy.float32(float(group["weight_decay"]))
    # the step's block of powers, and its place there
    block, place = divmod(group["step"], POWERS)
    corrections = [one, one]
    if group["bias_correction"]:
        corrections = [one - powers(float(beta), block)[place] for beta in betas]
    # quotient and root may be infinite or NaN, as on the device: no warning
    with numpy.errstate(all="ignore"):
        row = (*betas, lr / corrections[0], numpy.sqrt(corrections[1]))
        row += (float(group["eps"]), decay, lr * decay)
    return round_row(map(float, row))


# A table of powers on the device takes at most this much (beta 1 - 1e-6: 69 MiB).
MOST_POWERS = 2**26


@functools.lru_cache(maxsize=16)
def table_of_powers(beta: float, device: torch.device) -> torch.Tensor:
    """fp32 beta**step by torch's pow, for every step until 1 - beta**step rounds to 1.

    Raises ValueError where beta is so close to 1 that the table would not fit.
    """
    # beyond, beta**step is below 2**-26, a quarter of the last place of 1
    count = 2 if beta == 0 else 2 + math.ceil(-26 * math.log(2) / math.log(beta))
    if count > MOST_POWERS:
        raise ValueError(
            f"beta must be so small that its powers fit a table of {MOST_POWERS} with "
            f"contract='torch' and capturable=True, got {beta!r}, of which {count} powers matter"
        )
    steps = torch.arange(count, device=device).float()
    return torch.pow(torch.tensor(beta, dtype=torch.float32, device=device), steps)


def tables(group: Mapping[str, Any], device: torch.device) -> tuple[torch.Tensor, ...]:
    """The powers of both betas."""
    # one tensor a beta; groups of the same beta share it
    return tuple(table_of_powers(float(beta), device) for beta in group["betas"])


@helper
def one_minus_power(hyper_ptr, INDEX: tl.constexpr, step):
    # the table's address and length stand behind the group's numbers
    powers_ptr = tl.load(hyper_ptr + TABLES + INDEX).to(tl.pointer_type(tl.float32))
    count = tl.load(hyper_ptr + TABLE_LENGTHS + INDEX)
    # beyond the table 1 - beta**step is 1
    power = tl.load(powers_ptr + step, mask=step < count, other=0.0)
    return tl.where(number(hyper_ptr, BIAS_CORRECTION) != 0, 1.0 - power, 1.0)


@helper
def prepare(hyper_ptr, lr, step):
    beta1 = number(hyper_ptr, BETA1).to(tl.float32)
    beta2 = number(hyper_ptr, BETA2).to(tl.float32)
    decay = number(hyper_ptr, WEIGHT_DECAY).to(tl.float32)
    return (
        beta1,
        beta2,
        tl.math.div_rn(lr, one_minus_power(hyper_ptr, 0, step)),
        tl.math.sqrt_rn(one_minus_power(hyper_ptr, 1, step)),
        number(hyper_ptr, EPS).to(tl.float32),
        decay,
        lr * decay,
    )


@helper
def unscale(grad, grad_scale, inverse):
    return tl.math.div_rn(grad, grad_scale + tl.zeros_like(grad))


def unscale_reference(
    grad: torch.Tensor, grad_scale: torch.Tensor, inverse: torch.Tensor
) -> torch.Tensor:
    """The gradient divided by the scale, as torch's fused kernels do it, fp32."""
    return grad / grad_scale


@helper
def averaged(average, beta, value):
    """The average with a new value, beta * average + (1 - beta) * value in torch's operations.

    Of an infinite value the inner one makes NaN, of a negative zero a positive one.
    """
    beta = beta + tl.zeros_like(value)
    # Triton's -beta is 0 - beta: of a beta of 0 it has the other sign, and so has a zero gradient
    return tl.fma(beta, average, tl.fma(beta * -1.0, value, value))


@helper
def updated(param, moments, grad, scalars, AMSGRAD: tl.constexpr):
    _, _, step_size, correction2, eps, _, _ = scalars
    # fp32 averages, each by two fused multiply-adds
    exp_avg = averaged(moments[0], scalars[0], grad)
    exp_avg_sq = averaged(moments[1], scalars[1], grad * grad)
    squares, after = exp_avg_sq, (exp_avg, exp_avg_sq)
    if AMSGRAD:
        # std::max: the first where neither is larger, and where the second is NaN
        squares = tl.where(moments[2] < exp_avg_sq, exp_avg_sq, moments[2])
        after = (exp_avg, exp_avg_sq, squares)
    # the square root's correction is a division, as torch's
    root = tl.math.div_rn(tl.math.sqrt_rn(squares), correction2 + tl.zeros_like(param))
    return param - tl.math.div_rn(step_size * exp_avg, root + eps), after


@helper
def decayed_param(param, scalars):
    decay = scalars[6] + tl.zeros_like(param)
    # without decay torch leaves the product out, and with it the NaN of 0 * infinity
    return tl.where(decay == 0, param, tl.fma(-decay, param, param))


@helper
def decayed_grad(param, grad, scalars, is_rounded):
    decay = scalars[5] + tl.zeros_like(param)
    # nvcc contracts this for some elements (megaopt.kernels.rules.lanes)
    decayed = tl.where(is_rounded, grad + param * decay, tl.fma(param, decay, grad))
    return tl.where(decay == 0, grad, decayed)


@helper
def adamw(param, moments, grad, scalars):
    return updated(decayed_param(param, scalars), moments, grad, scalars, False)


@helper
def adam(param, moments, grad, scalars, is_rounded):
    grad = decayed_grad(param, grad, scalars, is_rounded)
    return updated(param, moments, grad, scalars, False)


@helper
def adamw_amsgrad(param, moments, grad, scalars):
    return updated(decayed_param(param, scalars), moments, grad, scalars, True)


@helper
def adam_amsgrad(param, moments, grad, scalars):
    # contracted for every element, unlike Adam's (megaopt.kernels.rules.lanes)
    grad = decayed_grad(param, grad, scalars, tl.zeros_like(param) != 0)
    return updated(param, moments, grad, scalars, True)


def fused_multiply_add(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """Rounds a * b + c to fp32 once.

    The product is exact in fp64 (48 bits). The sum is rounded to odd there: if it is inexact, its
    last bit is set, so that the rounding to fp32, 29 bits shorter, cannot meet a false tie
    (Boldo & Melquiond 2008).
    """
    # fp64; `total` is their sum, `error` what its rounding left (Knuth's two-sum)
    product, addend = a.double() * b.double(), c.double()
    total = product + addend
    virtual = total - product
    error = (product - (total - virtual)) + (addend - virtual)
    # where the sum was rounded away from zero, one pattern back: cut off
    bits = total.view(torch.int64)
    toward_zero = (error != 0) & ((error < 0) == (total > 0))
    bits = torch.where(toward_zero, bits - 1, bits)  # the sum cut off, then the last bit set
    bits = torch.where((error != 0) & error.isfinite(), bits | 1, bits)
    return bits.view(torch.float64).float()


def row_of(scalars: tuple[float, ...], like: torch.Tensor) -> list[torch.Tensor]:
    """The scalars as fp32 tensors on the device of `like`, where a product takes them exactly."""
    return [torch.tensor(value, dtype=torch.float32, device=like.device) for value in scalars]


def averaged_reference(
    average: torch.Tensor, beta: torch.Tensor, value: torch.Tensor
) -> torch.Tensor:
    """The average with a new value, fp32, in torch's two fused multiply-adds."""
    return fused_multiply_add(beta, average, fused_multiply_add(-beta, value, value))


def updated_reference(
    param: torch.Tensor, moments: Moments, grad: torch.Tensor, row: list[torch.Tensor]
) -> tuple[torch.Tensor, Moments]:
    """The new param and moments, after weight decay, fp32 of one shape.

    A third moment is the largest exp_avg_sq so far, and takes its place in the root.
    """
    beta1, beta2, step_size, correction2, eps = row[:5]
    exp_avg = averaged_reference(moments[0], beta1, grad)
    exp_avg_sq = averaged_reference(moments[1], beta2, grad * grad)
    after: Moments = (exp_avg, exp_avg_sq)
    if len(moments) > len(after):
        after = (*after, torch.where(moments[2] < exp_avg_sq, exp_avg_sq, moments[2]))
    root = after[-1].double().sqrt().float() / correction2
    return param - (step_size * exp_avg) / (root + eps), after


def adamw_reference(
    param: torch.Tensor, moments: Moments, grad: torch.Tensor, scalars: tuple[float, ...]
) -> tuple[torch.Tensor, Moments]:
    """One AdamW update as torch's fused kernel computes it; the arguments stay as they are."""
    row = row_of(scalars, param)
    if scalars[6]:
        param = fused_multiply_add(-row[6], param, param)
    return updated_reference(param, moments, grad, row)


def adam_reference(
    param: torch.Tensor,
    moments: Moments,
    grad: torch.Tensor,
    scalars: tuple[float, ...],
    is_rounded: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Moments]:
    """One Adam update with L2 weight decay as torch's fused kernel computes it.

    is_rounded: bool, for which elements the decay is rounded before it is added; None: for none,
    as with AMSGrad.
    """
    row = row_of(scalars, param)
    if scalars[5]:
        # both ways for all elements, then the one of each lane
        contracted = fused_multiply_add(param, row[5], grad)
        is_rounded = torch.zeros_like(param).bool() if is_rounded is None else is_rounded
        grad = torch.where(is_rounded, grad + param * row[5], contracted)
    return updated_reference(param, moments, grad, row)


def rule(name: str, moments: tuple[Moment, ...], update: Any, reference: Any, **more: Any) -> Rule:
    """Torch's kernel for one update."""
    row = (scalars, 7, hyper, prepare)
    unscaling = {"unscale": unscale, "unscale_reference": unscale_reference}
    more = {**more, **unscaling, "tables": tables}
    return Rule(name, "torch", moments, *row, update, reference, **more)


L2 = {"moments_use_param": True}
ADAMW_TORCH = rule("adamw", MOMENTS, adamw, adamw_reference)
ADAM_TORCH = rule("adam", MOMENTS, adam, adam_reference, lanes=True, **L2)
ADAMW_AMSGRAD_TORCH = rule("adamw_amsgrad", AMSGRAD_MOMENTS, adamw_amsgrad, adamw_reference)
ADAM_AMSGRAD_TORCH = rule("adam_amsgrad", AMSGRAD_MOMENTS, adam_amsgrad, adam_reference, **L2)
