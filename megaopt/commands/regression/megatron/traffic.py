"""Bytes that an optimizer step moves for each parameter that a rank owns, by pass.

Counted from the formats, not measured: what each pass reads and writes of the gradient, the weight,
the master and the moments. Collectives, zeroing and scales are left out.
"""

from __future__ import annotations

from megaopt.commands.regression.megatron.config import MegaoptVariant, MegatronRun, StockVariant

FP32, BF16 = 4, 2
STATE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""An element's; of all others 1."""

TORCH_ADAMW = 80
"""torch's AdamW for many tensors, eight passes: decay 8, lerp 12, mul 8, addcmul 12, sqrt 8, div 8,
add 8, addcdiv 16 (read and written, fp32)."""


def grad_bytes(run: MegatronRun, variant: StockVariant | MegaoptVariant) -> int:
    """Bytes of a gradient's element."""
    return FP32 if run.reduces_in_fp32(variant) else BF16


def state_traffic(variant: StockVariant | MegaoptVariant, moments: int, weight: int = BF16) -> int:
    """Bytes of master, moments (so many in all) and weight, in one pass."""
    if variant.store_param_remainders:
        # the weight is the other half of the master: read, too
        return 2 * (BF16 + moments + weight)
    return 2 * (FP32 + moments) + weight


def cast_passes(run: MegatronRun) -> dict[str, int]:
    """Megatron's passes from masters to weights after the step."""
    if run.megatron.precision == "fp32":
        return {}
    if not run.megatron.fp8_param_gather:
        return {"master to weight": FP32 + BF16}
    # TransformerEngine rounds to bf16 first, and reads that for the amax unless it is delayed
    amax = {} if run.megatron.fp8_recipe == "delayed" else {"amax": BF16}
    return {"master to bf16": FP32 + BF16, **amax, "bf16 to fp8": BF16 + 1}


def stock_passes(run: MegatronRun, variant: StockVariant, fused_clip: bool) -> dict[str, int]:
    """Passes of Megatron's own step."""
    grad = grad_bytes(run, variant)
    clips = run.megatron.clip_grad > 0
    if variant.mode == "precision_aware":
        # the inner optimizer reads the gradient as it is, and writes the weight
        clip = {"clip": 2 * grad} if clips else {}
        return {"norm": grad, **clip, "Adam": grad + state_traffic(variant, 2 * FP32)}
    cast = {"gradient to fp32": BF16 + FP32} if grad == BF16 else {}
    # without TransformerEngine or apex Megatron scales into a new tensor and copies that back
    clip = {"clip": (2 if fused_clip else 4) * FP32} if clips else {}
    adam = TORCH_ADAMW if variant.inner == "torch" else FP32 + 2 * (3 * FP32)
    return {**cast, "norm": FP32, **clip, "Adam": adam, **cast_passes(run)}


def our_passes(run: MegatronRun, variant: MegaoptVariant) -> dict[str, int]:
    """Passes of ours: the norm, and one that clips, steps and writes the weight."""
    grad = grad_bytes(run, variant)
    names = (variant.exp_avg_dtype, variant.exp_avg_sq_dtype)
    moments = sum(STATE_BYTES.get(name, 1) for name in names)
    weight = 1 if run.megatron.fp8_param_gather else BF16
    if run.megatron.precision == "fp32":
        weight = 0  # it is the master
    passes = {"norm": grad, "Adam": grad + state_traffic(variant, moments, weight)}
    if run.megatron.fp8_param_gather and run.megatron.fp8_recipe != "delayed":
        # the scale is known after the step alone, when the ranks have put their amaxes together
        passes["master to fp8"] = FP32
    return passes


def bytes_per_parameter(
    run: MegatronRun, variant: StockVariant | MegaoptVariant, fused_clip: bool
) -> dict[str, int] | None:
    """Bytes by pass; None for the unfused Adam, of some thirty passes, and beside Muon or GaLore.

    Args:
        run: the config.
        variant: one of it.
        fused_clip: whether TransformerEngine or apex scales Megatron's gradients.
    """
    if run.rule != "adam":
        return None
    if isinstance(variant, MegaoptVariant):
        return our_passes(run, variant)
    return None if variant.inner == "unfused" else stock_passes(run, variant, fused_clip)
