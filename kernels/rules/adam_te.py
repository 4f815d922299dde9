"""Adam and AdamW under contract te: TransformerEngine's instructions, on an NVIDIA GPU.

TransformerEngine builds its kernel with fast math; these are the operations that its shipped
library runs on sm_90: flush to zero, approximate reciprocal and root (rcp.approx.ftz,
sqrt.approx.ftz), and fused multiply-adds. Only an NVIDIA GPU gives those approximations, so that
there is no twin.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy
import torch

from megaopt.kernels.optional_triton import helper, libdevice, tl
from megaopt.kernels.rules.adam_numbers import (
    BETA1,
    BETA2,
    BIAS_CORRECTION,
    EPS,
    MOMENTS,
    WEIGHT_DECAY,
    hyper,
)
from megaopt.kernels.rules.base import Rule, round_row
from megaopt.kernels.rules.loading import number


def scalars(group: Mapping[str, Any]) -> tuple[float, ...]:
    """One row of fp32 numbers for a parameter group, as TransformerEngine's host code rounds them.

    1 - beta in fp32; the bias corrections 1 - beta**step, of the fp32 beta, by the C library's pow
    in fp64.
    """
    betas = [numpy.float32(beta) for beta in group["betas"]]
    corrections = [1.0, 1.0]
    if group["bias_correction"]:
        # Python's ** of floats is the C library's pow
        corrections = [1.0 - float(beta) ** group["step"] for beta in betas]
    # a difference of fp32 numbers, rounded to fp32
    one_minus = [float(numpy.float32(1) - beta) for beta in betas]
    row = (*map(float, betas), *one_minus, *corrections)
    row += (float(group["eps"]), float(group["weight_decay"]), float(group["lr"]))
    return round_row(row)


# Outputs param $0, exp_avg $1, exp_avg_sq $2; inputs param $3, exp_avg $4, exp_avg_sq $5, grad $6,
# beta1 $7, beta2 $8, 1 - beta1 $9, 1 - beta2 $10, corrections $11 $12, eps $13, decay $14, lr $15
DECLARATIONS = "{ .reg .f32 grad, product, update, reciprocal, denominator;\n"
PLAIN_GRAD = "mov.f32 grad, $6;\n"
GRAD_WITH_DECAY = "fma.rn.ftz.f32 grad, $3, $14, $6;\n"
DIRECTION = """
    mul.rn.ftz.f32 product, grad, $9;
    fma.rn.ftz.f32 $1, $4, $7, product;
    mul.rn.ftz.f32 product, grad, $10;
    mul.rn.ftz.f32 product, product, grad;
    fma.rn.ftz.f32 $2, $5, $8, product;
    rcp.approx.ftz.f32 reciprocal, $11;
    mul.rn.ftz.f32 update, $1, reciprocal;
    rcp.approx.ftz.f32 reciprocal, $12;
    mul.rn.ftz.f32 denominator, $2, reciprocal;
    sqrt.approx.ftz.f32 denominator, denominator;
    add.rn.ftz.f32 denominator, denominator, $13;
    rcp.approx.ftz.f32 denominator, denominator;
    mul.rn.ftz.f32 update, update, denominator;
"""
DECAY = "fma.rn.ftz.f32 update, $3, $14, update;\n"
PARAM = "neg.ftz.f32 update, update;\nfma.rn.ftz.f32 $0, update, $15, $3; }"
# the capturable kernels, in which lr comes from memory, round the product
PARAM_CAPTURABLE = "mul.rn.ftz.f32 update, update, $15;\nsub.rn.ftz.f32 $0, $3, update; }"

WITH_DECAY = DECLARATIONS + PLAIN_GRAD + DIRECTION + DECAY
WITH_L2 = DECLARATIONS + GRAD_WITH_DECAY + DIRECTION


@helper
def unscale(grad, grad_scale, inverse):
    return tl.inline_asm_elementwise(
        "mul.rn.ftz.f32 $0, $1, $2;", "=f,f,f", [grad, inverse], tl.float32, True, 1
    )


@helper
def correction(beta, step, bias_correction):
    """1 - beta**step of the fp32 beta, in fp64 by the CUDA library's pow, as TransformerEngine."""
    one = tl.full((), 1.0, tl.float64)
    factor = one - libdevice.pow(beta.to(tl.float64), step.to(tl.float64))
    return tl.where(bias_correction != 0, factor, one).to(tl.float32)


@helper
def prepare(hyper_ptr, lr, step):
    # fp32 first: differences and powers are of the rounded betas
    beta1 = number(hyper_ptr, BETA1).to(tl.float32)
    beta2 = number(hyper_ptr, BETA2).to(tl.float32)
    bias_correction = number(hyper_ptr, BIAS_CORRECTION)
    return (
        beta1,
        beta2,
        1.0 - beta1,
        1.0 - beta2,
        correction(beta1, step, bias_correction),
        correction(beta2, step, bias_correction),
        number(hyper_ptr, EPS).to(tl.float32),
        number(hyper_ptr, WEIGHT_DECAY).to(tl.float32),
        lr,
    )


def no_twin(*_: Any) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Raises NotImplementedError: only an NVIDIA GPU gives these bits."""
    raise NotImplementedError("contract 'te' has no twin: its approximations are an NVIDIA GPU's")


def update_of(assembly: str) -> Any:
    """The update by these instructions."""
    ASSEMBLY = tl.constexpr(assembly)

    @helper
    def update(param, moments, grad, scalars):  # noqa: ANN202
        # three outputs an element; scalars are broadcast to the block
        param, exp_avg, exp_avg_sq = tl.inline_asm_elementwise(
            ASSEMBLY,
            "=&f,=&f,=&f,f,f,f,f,f,f,f,f,f,f,f,f,f",
            (param,) + moments + (grad,) + scalars,  # noqa: RUF005 Triton takes no * there
            dtype=(tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
        return param, (exp_avg, exp_avg_sq)

    return update


def rule(name: str, assembly: str, **more: Any) -> Rule:
    """TransformerEngine's two kernels for one update: with lr on the host, and on the device."""
    arguments = (scalars, 9, hyper, prepare, update_of(assembly + PARAM), no_twin, unscale)
    plain = Rule(name, "te", MOMENTS, *arguments, **more)
    # with lr on the device the last product is rounded before the difference
    capturable = dataclasses.replace(plain, update=update_of(assembly + PARAM_CAPTURABLE))
    return dataclasses.replace(plain, capturable=capturable)


ADAMW_TE, ADAM_TE = rule("adamw", WITH_DECAY), rule("adam", WITH_L2, moments_use_param=True)
