"""Stand-ins for TransformerEngine's fp8 tensors: the attributes that an optimizer meets.

As read in TransformerEngine 2.20 and seen on a GPU: shapes, padding and sharing of scales, names.
"""

import types

import torch

from megaopt.float8 import Float8Weight
from megaopt.kernels.quantizers.scale import reciprocal_reference

PAD = 77
"""What lies between scales, in padding that is nobody's."""


class _Wrapper(torch.Tensor):
    """No memory of its own, as TransformerEngine's."""

    @staticmethod
    def __new__(cls, shape, dtype):
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, requires_grad=True)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise AssertionError(f"{func} on the codes of another library")

    def __tensor_flatten__(self):
        raise AssertionError("only looked for")

    @staticmethod
    def __tensor_unflatten__(*args):
        raise AssertionError("only looked for")

    def __repr__(self):
        return type(self).__name__


def _named(name, base):
    made = type(name, (base,), {})
    made.__module__ = "transformer_engine.pytorch.fake"
    return made


class _Tensor(_Wrapper):
    def _reset_caches(self):
        self._transpose_invalid = True

    def update_usage(self, rowwise_usage=None, columnwise_usage=None):
        assert rowwise_usage
        if columnwise_usage is False:
            self._columnwise_data = self._columnwise_scale_inv = None


Float8Tensor = _named("Float8Tensor", _Tensor)
Float8BlockwiseQTensor = _named("Float8BlockwiseQTensor", _Tensor)
MXFP8Tensor = _named("MXFP8Tensor", _Tensor)
NVFP4Tensor = _named("NVFP4Tensor", _Tensor)


def quantizer(name, **attributes):
    """A quantizer of TransformerEngine's by name."""
    return type(name, (), {})() if not attributes else _with(type(name, (), {})(), attributes)


def _with(made, attributes):
    vars(made).update(attributes)
    return made


def fake(weight: Float8Weight, columnwise=True):
    """TransformerEngine's tensor of the same codes and scales."""
    recipe = weight.recipe
    cls = {"delayed": Float8Tensor, "current": Float8Tensor, "mxfp8": MXFP8Tensor}.get(
        recipe.scaling, Float8BlockwiseQTensor
    )
    made = cls(weight.shape, weight.dtype)
    made._fp8_dtype = types.SimpleNamespace(name="kFloat8E4M3")
    codes = weight.data8.view(torch.uint8).clone()
    options = {
        "force_pow_2_scales": bool(recipe.power_of_two_scales),
        "amax_epsilon": recipe.amax_epsilon,
    }
    if recipe.block is None:
        made._data, made._transpose = codes, codes.flatten(1).t().contiguous()
        made._transpose_invalid = False
        made._scale_inv = weight.scale_inv.clone()
        if recipe.scaling == "delayed":
            # a scale of no dimension, an amax of one, as fp8_model_init makes them
            scale = weight.scale.clone().view(())
            made._quantizer = quantizer("Float8Quantizer", scale=scale, amax=torch.zeros(1))
            made._scale_inv = reciprocal_reference(scale).view(1)
        else:
            made._quantizer = quantizer(
                "Float8CurrentScalingQuantizer", with_amax_reduction=False, **options
            )
        return made
    made._rowwise_data = codes
    made._is_2D_scaled = recipe.scaling == "block_128x128"
    made._columnwise_data = made._columnwise_scale_inv = None
    if recipe.scaling == "mxfp8":
        made._quantizer = quantizer("MXFP8Quantizer", with_2d_quantization=False)
        made._with_gemm_swizzled_scales = False
        made._rowwise_scale_inv = padded(weight.scale_inv, 128, 4)
        if columnwise:
            made._columnwise_data = torch.full_like(codes, PAD)
            blocks = torch.zeros(-(-weight.shape[0] // 32), weight.shape[1], dtype=torch.uint8)
            made._columnwise_scale_inv = padded(blocks, 4, 128)
    else:
        made._quantizer = quantizer("Float8BlockQuantizer", **options)
        made._rowwise_scale_inv = padded(weight.scale_inv, 1, 4)
        if columnwise:
            made._columnwise_data = codes.t().contiguous()
            made._columnwise_scale_inv = padded(weight.scale_inv.t().contiguous(), 1, 4)
    return made


def padded(scales, rows, columns):
    """Scales in a larger buffer, a multiple of rows and columns."""
    size = [-(-n // pad) * pad for n, pad in zip(scales.shape, (rows, columns), strict=True)]
    buffer = torch.full(size, PAD, dtype=scales.dtype)
    buffer[: scales.shape[0], : scales.shape[1]] = scales
    return buffer
