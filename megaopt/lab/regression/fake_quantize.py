"""fp8 without fp8 weights, as people write it: bf16 weights, cast to fp8 and back at every use.

Plain torch that shares no code with `megaopt.float8`: what fp8 weights are compared with. Codes are
e4m3fn. NaNs and infinities, which a run that diverges has, become what docs/numbers.md says.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

CODE = torch.float8_e4m3fn
CODE_MAX = 448.0
HISTORY = 1024
BLOCKS = {"block_128x128": (128, 128), "mxfp8": (1, 32)}
NAN_CODE = 0x7F
EXPONENT_BIAS = 127


def magnitudes(values: torch.Tensor) -> torch.Tensor:
    """The magnitudes of values as fp32; 0 for a NaN, which moves no scale."""
    return values.float().abs().masked_fill(values.isnan(), 0.0)


def divide(amax: torch.Tensor, otherwise: torch.Tensor | float = 1.0) -> torch.Tensor:
    """CODE_MAX / amax, rounded once; `otherwise` where amax is 0 or infinite."""
    # a tensor above the line: a Python number would become a product with a reciprocal
    quotient = torch.full_like(amax, CODE_MAX) / amax
    largest = torch.finfo(torch.float32).max
    return torch.where((amax == 0) | amax.isinf(), otherwise, quotient.clamp(max=largest))


def encode(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The codes of fp32 values times scale, saturating; of every NaN the same."""
    codes = (values * scale).clamp(-CODE_MAX, CODE_MAX).to(CODE)
    return codes.view(torch.uint8).masked_fill(values.isnan(), NAN_CODE).view(CODE)


def decode(codes: torch.Tensor, scale_inv: torch.Tensor) -> torch.Tensor:
    """The bf16 values that codes stand for."""
    return (codes.float() * scale_inv).to(torch.bfloat16)


def quantize_tensor(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scale_inv, fp32 of shape (1,), of bf16 values with one scale from their amax."""
    scale = divide(magnitudes(values).max().reshape(1))
    return encode(values.float(), scale), torch.ones_like(scale) / scale


def power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """2**exponent, fp32, exact, of int32 exponents from -149 to 127."""
    return ((exponent.long() + 1023) << 52).view(torch.float64).float()


def spread(scales: torch.Tensor, block: tuple[int, int], shape: torch.Size) -> torch.Tensor:
    """Returns each element's scale."""
    whole = scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return whole[: shape[0], : shape[1]]


class FakeQuantizer(nn.Module):
    """The cast of one bf16 weight to fp8: by blocks, or by the amax of the whole weight.

    Args:
        weight: bf16, a matrix.
        recipe: its name.
    """

    def __init__(self, weight: torch.Tensor, recipe: str) -> None:
        super().__init__()
        self.recipe = recipe

    def tensors(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns what an fp8 weight would keep: codes, scale_inv, with delayed scaling more."""
        codes, scale_inv = self.quantize(weight)
        return {"codes": codes, "scale_inv": scale_inv}

    def quantize(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The codes and scale_inv of a weight now; for mxfp8 the latter as E8M0, uint8."""
        if self.recipe == "current":
            return quantize_tensor(weight)
        block = BLOCKS[self.recipe]
        # the largest magnitude of each block; blocks at the edges may be smaller
        sizes = zip(weight.shape, block, strict=True)
        rows, columns = (-size % length for size, length in sizes)
        padded = functional.pad(magnitudes(weight), (0, columns, 0, rows))
        by_rows = padded.view(-1, block[0], padded.shape[1]).amax(1)
        amax = by_rows.view(len(by_rows), -1, block[1]).amax(2)
        if self.recipe == "mxfp8":
            # an inverse is amax / CODE_MAX rounded up to a power of two, as E8M0
            inverse = torch.tensor(1 / CODE_MAX, dtype=torch.float32, device=amax.device)
            mantissa, exponent = torch.frexp(amax * inverse)
            up = torch.where(mantissa == 0.5, exponent - 1, exponent)
            up = torch.where(amax == 0, -EXPONENT_BIAS, up)
            up = torch.where(amax.isinf(), EXPONENT_BIAS, up)
            scale, scale_inv = power_of_two(-up), (up + EXPONENT_BIAS).to(torch.uint8)
        else:
            # CODE_MAX / amax rounded down to a power of two, of a mantissa from a half to one
            _, exponent = torch.frexp(divide(amax))
            scale, scale_inv = power_of_two(exponent - 1), power_of_two(1 - exponent)
        return encode(weight.float(), spread(scale, block, weight.shape)), scale_inv

    def dequantize(self, weight: torch.Tensor) -> torch.Tensor:
        """The weight, cast to fp8 and back: bf16."""
        codes, scale_inv = self.quantize(weight)
        if self.recipe == "mxfp8":
            scale_inv = power_of_two(scale_inv.int() - EXPONENT_BIAS)
        if self.recipe in BLOCKS:
            scale_inv = spread(scale_inv, BLOCKS[self.recipe], weight.shape)
        return decode(codes, scale_inv)

    def after_step(self, weight: torch.Tensor) -> None:
        """Takes notice of the weight's new values."""


class DelayedFakeQuantizer(FakeQuantizer):
    """Delayed scaling: the scale comes from the amaxes of earlier steps, and is one step late."""

    def __init__(self, weight: torch.Tensor, recipe: str) -> None:
        super().__init__(weight, recipe)
        amax = magnitudes(weight).max().reshape(1)
        self.history = nn.Buffer(torch.zeros(HISTORY, device=weight.device))
        self.history[0] = amax[0]
        self.next_scale = nn.Buffer(divide(amax))
        self.scale = nn.Buffer(self.next_scale.clone())

    def quantize(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Casts by the scale that there was when the weight got its values."""
        return encode(weight.float(), self.scale), torch.ones_like(self.scale) / self.scale

    def after_step(self, weight: torch.Tensor) -> None:
        """Notes the amax; the next scale is from the largest so far.

        The history has a place for the amax since the last call first, then oldest to newest.
        """
        self.scale.copy_(self.next_scale)
        self.history[0] = torch.maximum(self.history[0], magnitudes(weight).max())
        self.next_scale.copy_(divide(self.history.max().reshape(1), self.next_scale))
        latest, empty = self.history[:1], torch.zeros_like(self.history[:1])
        self.history.copy_(torch.cat([empty, self.history[2:], latest]))

    def tensors(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """Codes, scale_inv, the next scale and the history."""
        later = {"scale": self.next_scale, "amax_history": self.history}
        return super().tensors(weight) | later


class _StraightThrough(torch.autograd.Function):
    """The weight cast to fp8 and back, whose gradient is the weight's."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, quantizer: FakeQuantizer) -> torch.Tensor:
        return quantizer.dequantize(weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class _ScaledProduct(torch.autograd.Function):
    """Input and weight quantized, their product in fp8; the gradients are of the quantized two."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, quantizer: FakeQuantizer
    ) -> torch.Tensor:
        codes, scale_inv = quantize_tensor(x)
        weight_codes, weight_scale_inv = quantizer.quantize(weight)
        rounded, dense = decode(codes, scale_inv), decode(weight_codes, weight_scale_inv)
        ctx.save_for_backward(rounded, dense)
        if not x.is_cuda:
            return functional.linear(rounded, dense)
        product: torch.Tensor = torch._scaled_mm(
            codes.flatten(0, -2),
            weight_codes.t(),
            scale_a=scale_inv.reshape(()),
            scale_b=weight_scale_inv.reshape(()),
            out_dtype=x.dtype,
        )
        return product.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        rounded, dense = ctx.saved_tensors
        rows = grad.flatten(0, -2)
        grad_input = rows.mm(dense).view(rounded.shape)
        return grad_input, rows.t().mm(rounded.flatten(0, -2)), None


class FakeQuantizedLinear(nn.Module):
    """A linear layer without bias whose weight goes through fp8.

    Args:
        weight: bf16, (outputs, inputs); stays the parameter it is.
        recipe: its name.
        scaled_matmul: whether, with a scale per tensor, the input is quantized too.
    """

    def __init__(self, weight: nn.Parameter, recipe: str, scaled_matmul: bool) -> None:
        super().__init__()
        self.weight = weight
        kind = DelayedFakeQuantizer if recipe == "delayed" else FakeQuantizer
        self.quantizer = kind(weight.detach(), recipe)
        self.scaled_matmul = scaled_matmul and recipe not in BLOCKS

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps bf16 (..., inputs) to (..., outputs)."""
        product: torch.Tensor
        if self.scaled_matmul:
            product = _ScaledProduct.apply(x, self.weight, self.quantizer)  # type: ignore[no-untyped-call]
            return product
        weight = _StraightThrough.apply(self.weight, self.quantizer)  # type: ignore[no-untyped-call]
        return functional.linear(x, weight)
