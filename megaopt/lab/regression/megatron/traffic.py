"""Bytes that an optimizer step moves for each parameter that a rank owns, by pass.

Counted from the formats, not measured: what each pass reads and writes of the gradient, the weight,
the master and the moments. Collectives, zeroing and scales are left out.
"""

from __future__ import annotations

from megaopt.lab.regression.megatron.config import MegaoptVariant, MegatronRun, StockVariant

FP32, BF16 = 4, 2
STATE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""An element's; of all others 1."""

TORCH_ADAMW = 80
"""torch's AdamW for many tensors, eight passes: decay 8, lerp 12, mul 8, addcmul 12, sqrt 8, div 8,
add 8, addcdiv 16 (read and written, fp32)."""


def bytes_per_parameter(
    run: MegatronRun, variant: StockVariant | MegaoptVariant, fused_clip: bool
) -> dict[str, int] | None:
    """Bytes by pass; None for the unfused Adam, of some thirty passes, and beside Muon or GaLore.

    Args:
        run: the config.
        variant: one of it.
        fused_clip: whether TransformerEngine or apex scales Megatron's gradients.
    """
    if run.rule != "adam" or getattr(variant, "inner", "") == "unfused":
        return None
    config, clips = run.megatron, run.clips
    is_fp32, quantizes = config.precision == "fp32", config.fp8_param_gather
    grad = FP32 if run.reduces_in_fp32(variant) else BF16
    # master, moments and weight in one pass: an fp32 weight is its master, and with remainders the
    # weight, which is the other half of the master, is read too
    moments, weight = 2 * FP32, BF16
    if isinstance(variant, MegaoptVariant):
        names = (variant.exp_avg_dtype, variant.exp_avg_sq_dtype)
        moments = sum(STATE_BYTES.get(name, 1) for name in names)
        weight = 0 if is_fp32 else 1 if quantizes else BF16
    state = 2 * (FP32 + moments) + weight
    if variant.store_param_remainders:
        state = 2 * (BF16 + moments + weight)

    if isinstance(variant, MegaoptVariant):
        # ours: the norm, and one that clips, steps and writes the weight; the scale of fp8 weights
        # is known after the step alone, when the ranks have put their amaxes together
        late = {"master to fp8": FP32} if quantizes and config.fp8_recipe != "delayed" else {}
        return {"norm": grad, "Adam": grad + state, **late}
    if variant.mode == "precision_aware":
        # the inner optimizer reads the gradient as it is, and writes the weight
        return {"norm": grad, **({"clip": 2 * grad} if clips else {}), "Adam": grad + state}
    passes = {"gradient to fp32": BF16 + FP32} if grad == BF16 else {}
    passes["norm"] = FP32
    if clips:
        # without TransformerEngine or apex Megatron scales into a new tensor and copies that back
        passes["clip"] = (2 if fused_clip else 4) * FP32
    passes["Adam"] = TORCH_ADAMW if variant.inner == "torch" else FP32 + 2 * (3 * FP32)
    # from masters to weights after the step
    if not is_fp32 and not quantizes:
        passes["master to weight"] = FP32 + BF16
    elif not is_fp32:
        # TransformerEngine rounds to bf16 first, and reads that for the amax unless it is delayed
        passes["master to bf16"] = FP32 + BF16
        if config.fp8_recipe != "delayed":
            passes["amax"] = BF16
        passes["bf16 to fp8"] = BF16 + 1
    return passes
