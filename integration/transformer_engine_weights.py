"""TransformerEngine's fp8 tensors as weights of megaopt's optimizers.

Importing this module is enough: afterwards every optimizer of megaopt steps Float8Tensor (delayed
and current scaling), Float8BlockwiseQTensor (128 x 128) and MXFP8Tensor parameters, and parts of
them (megaopt.float8.shard.Float8Shard). The step writes codes and scales where TransformerEngine
has them, amaxes of delayed scaling where it looks for them (its own update of the scales follows in
the forward pass), and transposes and columnwise copies made of the old codes are marked stale or
dropped, as quantize_master_weights does; MXFP8's columnwise data are written, too.

Read in TransformerEngine 2.20 (pytorch/tensor). It is not imported: a tensor is known by its class.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any

import torch

from megaopt.float8.foreign import ADAPTERS, ForeignWeight
from megaopt.kernels.float8 import Float8Recipe
from megaopt.kernels.rules.base import round_to_fp32

DELAYED = ("scale", "amax")
"""The names of what a quantizer has with delayed scaling."""
BY_ROWS = attrgetter("_rowwise_data", "_rowwise_scale_inv")
BOTH_WAYS = attrgetter(
    "_rowwise_data", "_rowwise_scale_inv", "_columnwise_data", "_columnwise_scale_inv"
)


def transformer_engine_weight(tensor: torch.Tensor) -> ForeignWeight | None:
    """The step's view of one of TransformerEngine's fp8 tensors; None for any other tensor.

    Raises:
        ValueError: the tensor is of a kind that the step does not write; the message says which.
    """
    for cls in type(tensor).__mro__:
        make = KINDS.get(cls.__name__)
        if make is not None and cls.__module__.partition(".")[0] == "transformer_engine":
            return make(tensor)
    return None


def _refuse(tensor: Any, allowed: str, value: object) -> ValueError:
    return ValueError(f"{type(tensor).__name__} must have {allowed}, got {value}")


def _codes(tensor: Any, name: str) -> torch.Tensor:
    data = getattr(tensor, name)
    if data is None:
        raise _refuse(tensor, "codes row by row, columnwise ones beside them", f"{name}=None")
    if not data.is_contiguous():
        raise _refuse(tensor, f"a contiguous {name}", f"strides {data.stride()}")
    if tensor._fp8_dtype.name != "kFloat8E4M3":
        raise _refuse(tensor, "codes of kFloat8E4M3, as in all its recipes", tensor._fp8_dtype.name)
    codes: torch.Tensor = data.view(torch.float8_e4m3fn)
    return codes


def _initial(tensor: Any) -> Any:
    """A function for the values that fp8_model_init(preserve_high_precision_init_val=True) kept."""
    return getattr(tensor, "get_high_precision_init_val", lambda: None)


def _forget_initial(tensor: Any) -> None:
    if hasattr(tensor, "clear_high_precision_init_val"):
        tensor.clear_high_precision_init_val()


def _per_tensor(tensor: Any) -> ForeignWeight:
    quantizer, kind = tensor._quantizer, type(tensor._quantizer).__name__
    scale = amax = None
    if kind == "Float8Quantizer":
        recipe = Float8Recipe("delayed")
        scale, amax = quantizer.scale.view(1), quantizer.amax.view(1)
    elif kind == "Float8CurrentScalingQuantizer":
        if quantizer.with_amax_reduction or getattr(tensor, "amax_reduction_group", None):
            raise _refuse(tensor, "no reduction of amaxes, as Float8Shard has a group", "one")
        recipe = Float8Recipe(
            "current",
            power_of_two_scales=quantizer.force_pow_2_scales,
            amax_epsilon=round_to_fp32(quantizer.amax_epsilon),
        )
    else:
        raise _refuse(tensor, "delayed or current scaling", f"quantizer {kind}")

    def changed() -> None:
        tensor._reset_caches()  # the transpose
        _forget_initial(tensor)

    def made_of() -> tuple[torch.Tensor | None, ...]:
        source = tensor._quantizer
        return tensor._data, tensor._scale_inv, *(getattr(source, name, None) for name in DELAYED)

    scale_inv, codes = tensor._scale_inv.view(1), _codes(tensor, "_data")
    return ForeignWeight(
        tensor, recipe, codes, scale_inv, changed, made_of, _initial(tensor), scale, amax
    )


def _blocks(tensor: Any) -> ForeignWeight:
    if not tensor._is_2D_scaled or tensor.dim() != 2:
        description = f"{tensor.dim()} dimensions, blocks 1x128"
        raise _refuse(tensor, "two dimensions, and blocks 128x128", description)
    quantizer = tensor._quantizer
    recipe = Float8Recipe(
        "block_128x128",
        power_of_two_scales=quantizer.force_pow_2_scales,
        amax_epsilon=round_to_fp32(quantizer.amax_epsilon),
    )
    codes = _codes(tensor, "_rowwise_data")

    def changed() -> None:
        tensor.update_usage(rowwise_usage=True, columnwise_usage=False)
        _forget_initial(tensor)

    scale_inv = _unpadded(tensor._rowwise_scale_inv, recipe, tensor.shape)
    made_of = partial(BY_ROWS, tensor)
    return ForeignWeight(tensor, recipe, codes, scale_inv, changed, made_of, _initial(tensor))


def _mxfp8(tensor: Any) -> ForeignWeight:
    if tensor._with_gemm_swizzled_scales or tensor.dim() != 2:
        raise _refuse(
            tensor,
            "two dimensions, and scales in rows",
            f"{tensor.dim()} dimensions, swizzled={tensor._with_gemm_swizzled_scales}",
        )
    if getattr(tensor._quantizer, "with_2d_quantization", False):
        raise _refuse(tensor, "with_2d_quantization=False", "blocks of 32 x 32")
    recipe = Float8Recipe("mxfp8")
    codes = _codes(tensor, "_rowwise_data")
    columnwise = None
    if tensor._columnwise_data is not None:
        rows, columns = tensor.shape
        scale_inv = tensor._columnwise_scale_inv[: -(-rows // 32), :columns]
        columnwise = (_codes(tensor, "_columnwise_data"), scale_inv)
    return ForeignWeight(
        tensor,
        recipe,
        codes,
        _unpadded(tensor._rowwise_scale_inv, recipe, tensor.shape),
        lambda: _forget_initial(tensor),
        partial(BOTH_WAYS, tensor),
        _initial(tensor),
        columnwise=columnwise,
    )


def _unpadded(scale_inv: torch.Tensor, recipe: Float8Recipe, shape: torch.Size) -> torch.Tensor:
    """TransformerEngine pads scales for the matrix product: the part that belongs to blocks."""
    rows, columns = recipe.scale_shape(shape)
    return scale_inv[:rows, :columns]


KINDS: dict[str, Callable[[Any], ForeignWeight]] = {
    "Float8Tensor": _per_tensor,
    "Float8BlockwiseQTensor": _blocks,
    "MXFP8Tensor": _mxfp8,
}
"""The maker of the view for each of TransformerEngine's classes."""

if transformer_engine_weight not in ADAPTERS:
    ADAPTERS.append(transformer_engine_weight)
