"""Adam and AdamW under contract ieee: docs/numbers.md lists these operations by number.

One division and one square root an element: bias corrections enter as multiplications by
reciprocals that the host rounds once.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from megaopt.kernels.optional_triton import cuda_capability_geq, helper, tl
from megaopt.kernels.rules.adam_numbers import (
    AMSGRAD_MOMENTS,
    BETA1,
    BETA2,
    BIAS_CORRECTION,
    EPS,
    MOMENTS,
    WEIGHT_DECAY,
    hyper,
)
from megaopt.kernels.rules.base import Rule, power, round_row
from megaopt.kernels.rules.loading import number

Scalars = tuple[float, ...]
Moments = tuple[torch.Tensor, ...]


def scalars(group: Mapping[str, Any]) -> Scalars:
    """One row of fp32 numbers for a parameter group, computed in fp64 and rounded once."""
    return round_row(numbers(group))


def numbers(group: Mapping[str, Any]) -> Scalars:
    """The same row in fp64; both corrections, reciprocals, are 1 without bias correction.

    group: lr (in units of the parameter), betas, eps, weight_decay (per unit of lr),
    bias_correction, and step, the number of this update, counted from 1.
    """
    beta1, beta2 = map(float, group["betas"])
    corrections = [1.0, 1.0]
    if group["bias_correction"]:
        # reciprocals of 1 - beta**step, fp64
        corrections = [1.0 / (1.0 - power(beta, group["step"])) for beta in (beta1, beta2)]
    # in the order in which `updated` unpacks them
    row = (beta1, 1.0 - beta1, beta2, 1.0 - beta2, *corrections)
    return (*row, float(group["eps"]), float(group["weight_decay"]), float(group["lr"]))


@helper
def power_on_device(base, exponent):
    """megaopt.kernels.rules.base.power: the bits above the highest multiply 1 by itself."""
    result = tl.full((), 1.0, tl.float64)
    # from bit 30 down, as the step is an int32
    for place in range(31):
        result = result * result
        result = tl.where((exponent >> (30 - place)) & 1 != 0, result * base, result)
    return result


@helper
def correction(beta, step, bias_correction):
    one = tl.full((), 1.0, tl.float64)
    return tl.where(bias_correction != 0, one / (one - power_on_device(beta, step)), one)


@helper
def prepare(hyper_ptr, lr, step):
    # fp64 throughout, each number rounded to fp32 once
    one = tl.full((), 1.0, tl.float64)
    beta1, beta2 = number(hyper_ptr, BETA1), number(hyper_ptr, BETA2)
    bias_correction = number(hyper_ptr, BIAS_CORRECTION)
    return (
        beta1.to(tl.float32),
        (one - beta1).to(tl.float32),
        beta2.to(tl.float32),
        (one - beta2).to(tl.float32),
        correction(beta1, step, bias_correction).to(tl.float32),
        correction(beta2, step, bias_correction).to(tl.float32),
        number(hyper_ptr, EPS).to(tl.float32),
        number(hyper_ptr, WEIGHT_DECAY).to(tl.float32),
        lr,
    )


@helper
def canonical(value):
    # a NaN's sign and payload depend on the processor; the choice is made on integers, where the
    # compiler cannot reason that one NaN is as good as another
    bits = tl.where(value == value, value.to(tl.int32, bitcast=True), 0x7FC00000)
    return bits.to(tl.float32, bitcast=True)


# n / (sqrt(x) + eps), each operation rounded to nearest, eight elements at a time:
# A correctly rounded root and division are short sequences of fused multiply-adds, but for operands
# whose quotient, or a remainder, leaves the normal numbers. The compiler asks that of each
# operation of each element, and branches. Here one branch asks it of eight elements, which takes 11
# instructions an element less of 100: what moments of 8 bits in blocks need (chunks/table.py).

TOGETHER: tl.constexpr = tl.constexpr(8)
# Operands: results $0 to $7, n $8 to $15, x $16 to $23, eps $24 (and in 7 more).
# The sequences are CUDA's own. They are right where no step leaves the normal numbers: for
# x >= 2**-100 (the remainder of the root is a multiple of 2**-148), for eps <= 2**62, so that
# 2**-50 <= sqrt(x) + eps < 2**65, and for |n| >= 2**-60, so that the quotient is at least 2**-125
# and its remainder a multiple of 2**-107. Beyond, an x or n that is infinite or NaN, a negative x
# and a quotient that overflows make the sum of the quotients' magnitudes infinite or NaN.
_SHORT = """
    rsqrt.approx.ftz.f32 r, $X;
    mul.rn.f32 y, $X, r;
    mul.rn.f32 r, r, 0f3F000000;
    neg.f32 t, y;
    fma.rn.f32 t, t, y, $X;
    fma.rn.f32 y, t, r, y;
    add.rn.f32 y, y, $24;
    rcp.approx.ftz.f32 r, y;
    neg.f32 y, y;
    fma.rn.f32 t, y, r, 0f3F800000;
    fma.rn.f32 r, r, t, r;
    mul.rn.f32 q, $N, r;
    fma.rn.f32 t, y, q, $N;
    fma.rn.f32 q, r, t, q;
    fma.rn.f32 t, y, q, $N;
    fma.rn.f32 $Q, r, t, q;
    abs.f32 t, $N;
    min.f32 least, least, t;
    min.u32 least_x, least_x, $X;
    abs.f32 t, $Q;
    add.f32 sum, sum, t;
"""
_LONG = """
    sqrt.rn.f32 y, $X;
    add.rn.f32 y, y, $24;
    div.rn.f32 $Q, $N, y;
"""


def _eight(lines: str) -> str:
    # operand numbers of each of the eight: quotient, numerator, square
    numbers = range(8)
    places = [{"$Q": f"${i}", "$N": f"${i + 8}", "$X": f"${i + 16}"} for i in numbers]
    return "".join(
        lines.replace("$Q", at["$Q"]).replace("$N", at["$N"]).replace("$X", at["$X"])
        for at in places
    )


QUOTIENTS: tl.constexpr = tl.constexpr(
    "{ .reg .f32 r, y, t, q, sum, least; .reg .u32 least_x; .reg .pred is_short;\n"
    "mov.f32 sum, 0f00000000; mov.f32 least, 0f7F800000; mov.u32 least_x, 0xFFFFFFFF;\n"
    + _eight(_SHORT)
    + """
    setp.lt.f32 is_short, sum, 0f7F800000;
    setp.ge.and.f32 is_short, least, 0f21800000, is_short;  // 2**-60
    setp.ge.and.u32 is_short, least_x, 0x0D800000, is_short;  // 2**-100
    setp.le.and.f32 is_short, $24, 0f5E800000, is_short;  // 2**62
    @is_short bra DONE;
"""
    + _eight(_LONG)
    + "DONE:\n}"
)
CONSTRAINTS: tl.constexpr = tl.constexpr(",".join(["=&f"] * 8 + ["f"] * 24))


@helper
def quotient(numerator, square, eps):
    """Numerator / (sqrt(square) + eps), fp32."""
    # a tile of the step, [rows, 8]: each thread has eight
    if cuda_capability_geq(8, 0) and numerator.shape[-1] == TOGETHER:
        # eight elements in one asm statement, with one branch for all
        result = tl.inline_asm_elementwise(
            QUOTIENTS, CONSTRAINTS, [numerator, square, eps], tl.float32, True, 8
        )
    else:
        # two correctly rounded operations, one element at a time
        result = tl.math.div_rn(numerator, tl.math.sqrt_rn(square) + eps)
    return result


@helper
def averages(moments, grad, scalars):
    exp_avg, exp_avg_sq = moments[0], moments[1]
    beta1, one_minus_beta1, beta2, one_minus_beta2, _, _, _, _, _ = scalars
    # a product each and a sum, rounded each; never contracted
    exp_avg = beta1 * exp_avg + one_minus_beta1 * grad
    exp_avg_sq = beta2 * exp_avg_sq + one_minus_beta2 * (grad * grad)
    return exp_avg, exp_avg_sq


@helper
def direction(exp_avg, exp_avg_sq, scalars):
    _, _, _, _, correction1, correction2, eps, _, _ = scalars
    # both averages corrected, then numerator / (root + eps)
    return quotient(exp_avg * correction1, exp_avg_sq * correction2, eps)


@helper
def largest(max_exp_avg_sq, exp_avg_sq):
    """The larger of two; NaN where one is."""
    keeps = (max_exp_avg_sq >= exp_avg_sq) | (max_exp_avg_sq != max_exp_avg_sq)
    return tl.where(keeps, max_exp_avg_sq, exp_avg_sq)


@helper
def updated(param, moments, grad, scalars, DECOUPLED: tl.constexpr, AMSGRAD: tl.constexpr):
    _, _, _, _, _, _, _, weight_decay, lr = scalars
    # L2: the decay goes into both moments
    if not DECOUPLED:
        grad = grad + weight_decay * param
    exp_avg, exp_avg_sq = averages(moments, grad, scalars)
    # what stands in the root, and the new moments
    squares, after = exp_avg_sq, (exp_avg, exp_avg_sq)
    if AMSGRAD:
        squares = largest(moments[2], exp_avg_sq)
        after = (exp_avg, exp_avg_sq, squares)
    # AdamW: the decay joins the direction, and lr multiplies both
    update = direction(exp_avg, squares, scalars)
    if DECOUPLED:
        update = update + weight_decay * param
    return param - lr * update, after


def canonical_reference(value: torch.Tensor) -> torch.Tensor:
    """`value` with every NaN replaced by the pattern 0x7FC00000."""
    return torch.where(value.isnan(), 0x7FC00000, value.view(torch.int32)).view(torch.float32)


def square_root_reference(value: torch.Tensor) -> torch.Tensor:
    """The correctly rounded fp32 root; torch's own is off by a last place for some values on a CPU.

    Rounding the fp64 root again is exact: 53 >= 2 * 24 + 2 (Figueroa, When is double rounding
    innocuous?).
    """
    return value.double().sqrt().float()


def averages_reference(
    moments: Moments, grad: torch.Tensor, scalars: Scalars
) -> tuple[torch.Tensor, torch.Tensor]:
    """The new exp_avg and exp_avg_sq, fp32, of one shape with grad."""
    exp_avg, exp_avg_sq = moments[:2]
    beta1, one_minus_beta1, beta2, one_minus_beta2 = scalars[:4]
    exp_avg = exp_avg * beta1 + grad * one_minus_beta1
    exp_avg_sq = exp_avg_sq * beta2 + (grad * grad) * one_minus_beta2
    return exp_avg, exp_avg_sq


def direction_reference(
    exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, scalars: Scalars
) -> torch.Tensor:
    """Adam's step for lr = 1, without weight decay, fp32."""
    correction1, correction2, eps = scalars[4:7]
    denominator = square_root_reference(exp_avg_sq * correction2) + eps
    return (exp_avg * correction1) / denominator


def updated_reference(
    param: torch.Tensor, moments: Moments, grad: torch.Tensor, scalars: Scalars, decoupled: bool
) -> tuple[torch.Tensor, Moments]:
    """One update of fp32 tensors of one shape; the arguments stay as they are.

    With decoupled weight decay AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101), with L2 decay
    Adam (Kingma & Ba 2015, arXiv:1412.6980). With a third moment AMSGrad (Reddi et al. 2018,
    arXiv:1904.09237): the largest exp_avg_sq so far takes its place in the root.
    """
    weight_decay, lr = scalars[7:]
    grad = grad if decoupled else grad + param * weight_decay
    exp_avg, exp_avg_sq = averages_reference(moments, grad, scalars)
    after: Moments = (exp_avg, exp_avg_sq)
    if len(moments) > len(after):
        after = (*after, torch.maximum(moments[2], exp_avg_sq))  # NaN where one is
    direction = direction_reference(exp_avg, after[-1], scalars)
    direction = direction + param * weight_decay if decoupled else direction
    return param - direction * lr, after


def rule(name: str, decoupled: bool) -> Rule:
    """One kind of Adam."""
    moments = AMSGRAD_MOMENTS if name.endswith("amsgrad") else MOMENTS
    DECOUPLED, AMSGRAD = tl.constexpr(decoupled), tl.constexpr(moments is AMSGRAD_MOMENTS)

    @helper
    def update(param, moments, grad, scalars):  # noqa: ANN202
        return updated(param, moments, grad, scalars, DECOUPLED, AMSGRAD)

    twin = partial(updated_reference, decoupled=decoupled)
    arguments = (scalars, 9, hyper, prepare, update, twin)
    return Rule(name, "ieee", moments, *arguments, moments_use_param=not decoupled)


ADAMW_IEEE, ADAM_IEEE = rule("adamw", True), rule("adam", False)
ADAMW_AMSGRAD_IEEE, ADAM_AMSGRAD_IEEE = rule("adamw_amsgrad", True), rule("adam_amsgrad", False)
