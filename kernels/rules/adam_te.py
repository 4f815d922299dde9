"""Adam and AdamW under contract te: TransformerEngine's instructions, on an NVIDIA GPU.

TransformerEngine builds its kernel with fast math; these are the operations that its shipped
library runs on sm_90, apex's too: flush to zero, approximate reciprocal and root (rcp.approx.ftz,
sqrt.approx.ftz), and fused multiply-adds. Only an NVIDIA GPU gives those approximations, so that
there is no twin.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy
import torch

from megaopt.kernels.optional_triton import helper, tl
from megaopt.kernels.rules.base import Rule, round_to_fp32
from megaopt.kernels.rules.loading import load_nine


def scalars(group: Mapping[str, Any]) -> tuple[float, ...]:
    """One row of fp32 numbers for a parameter group, as TransformerEngine's host code rounds them.

    Args:
        group: as for megaopt.kernels.rules.adam_ieee.scalars.

    Returns:
        beta1, beta2, 1 - beta1, 1 - beta2 (in fp32), the bias corrections 1 - beta**step (of the
        fp32 beta, by the C library's pow, in fp64), eps, weight_decay, lr.
    """
    betas = [numpy.float32(beta) for beta in group["betas"]]
    corrections = [1.0, 1.0]
    if group["bias_correction"]:
        corrections = [1.0 - float(beta) ** group["step"] for beta in betas]
    one_minus = [float(numpy.float32(1) - beta) for beta in betas]
    row = (*map(float, betas), *one_minus, *corrections)
    row += (float(group["eps"]), float(group["weight_decay"]), float(group["lr"]))
    return tuple(round_to_fp32(value) for value in row)


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

ADAMW: tl.constexpr = tl.constexpr(DECLARATIONS + PLAIN_GRAD + DIRECTION + DECAY + PARAM)
ADAM: tl.constexpr = tl.constexpr(DECLARATIONS + GRAD_WITH_DECAY + DIRECTION + PARAM)


@helper
def instructions(param, exp_avg, exp_avg_sq, grad, scalars, ASSEMBLY: tl.constexpr):
    return tl.inline_asm_elementwise(
        ASSEMBLY,
        "=&f,=&f,=&f,f,f,f,f,f,f,f,f,f,f,f,f,f",
        [
            param,
            exp_avg,
            exp_avg_sq,
            grad,
            scalars[0],
            scalars[1],
            scalars[2],
            scalars[3],
            scalars[4],
            scalars[5],
            scalars[6],
            scalars[7],
            scalars[8],
        ],
        dtype=(tl.float32, tl.float32, tl.float32),
        is_pure=True,
        pack=1,
    )


@helper
def adamw(param, exp_avg, exp_avg_sq, grad, scalars):
    return instructions(param, exp_avg, exp_avg_sq, grad, scalars, ADAMW)


@helper
def adam(param, exp_avg, exp_avg_sq, grad, scalars):
    return instructions(param, exp_avg, exp_avg_sq, grad, scalars, ADAM)


def no_twin(*_: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Raises NotImplementedError: only an NVIDIA GPU gives these bits."""
    raise NotImplementedError("contract 'te' has no twin: its approximations are an NVIDIA GPU's")


MOMENTS = ("exp_avg", "exp_avg_sq")
ADAMW_TE = Rule("adamw", "te", MOMENTS, scalars, load_nine, prepare, adamw, no_twin)
ADAM_TE = Rule("adam", "te", MOMENTS, scalars, load_nine, prepare, adam, no_twin, moments_use_param=True)
