"""The baseline: what people write today, Adam in plain torch operations on fp32 masters.

It follows the contract `ieee` operation by operation and shares no code with the kernels. Three
habits would cost it that contract and are avoided: torch's fp32 square root on the CPU (not
correctly rounded), its combined operations (lerp, addcmul, addcdiv and add with alpha may round
differently), and dividing by a Python number (on the GPU a multiplication by the reciprocal).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from megaopt.lab.config import OptimizerConfig, UnfusedVariant
from megaopt.lab.regression.fake_quantize import FakeQuantizedLinear
from megaopt.lab.regression.weights import OptimizerWeights, ParameterPiece, group_pieces


def power(base: float, exponent: int) -> float:
    """base**exponent in fp64 by repeated squaring from the exponent's most significant bit."""
    result = 1.0
    for bit in f"{exponent:b}":
        result *= result
        if bit == "1":
            result *= base
    return result


def square_root(x: torch.Tensor) -> torch.Tensor:
    """The correctly rounded fp32 root: fp64 has bits enough that rounding twice does no harm."""
    return x.double().sqrt().float()


def round_nearest_even(master: torch.Tensor) -> torch.Tensor:
    """An fp32 tensor rounded to bf16, ties to even: torch's own cast."""
    return master.to(torch.bfloat16)


def round_nearest_away(master: torch.Tensor) -> torch.Tensor:
    """An fp32 tensor rounded to bf16, ties away from zero."""
    upper = (master.view(torch.int32) + 0x8000) >> 16
    away = upper.to(torch.int16).view(torch.bfloat16)
    # adding to the bits of a NaN could wrap it round to a zero
    return torch.where(master.isfinite(), away, master.to(torch.bfloat16))


ROUNDINGS = {"nearest_even": round_nearest_even, "nearest_away": round_nearest_away}


def adam_update(
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    group: Mapping[str, Any],
) -> None:
    """One step of Adam in the contract's order; all tensors fp32, updated in place but for grad.

    group: torch's names for the hyper-parameters, with adam_w_mode, bias_correction, and step from
    1. torch rounds each number to fp32 once, where it meets an fp32 tensor.
    """
    (beta1, beta2), step, decay = group["betas"], group["step"], group["weight_decay"]
    correct = group["bias_correction"]
    first, second = (1 / (1 - power(b, step)) if correct else 1.0 for b in (beta1, beta2))
    if not group["adam_w_mode"]:
        grad = grad + param * decay
    exp_avg.copy_(exp_avg * beta1 + grad * (1 - beta1))
    exp_avg_sq.copy_(exp_avg_sq * beta2 + (grad * grad) * (1 - beta2))
    update = (exp_avg * first) / (square_root(exp_avg_sq * second) + group["eps"])
    if group["adam_w_mode"]:
        update = update + param * decay
    param.copy_(param - update * group["lr"])


class UnfusedAdam(torch.optim.Optimizer):
    """Adam of fp32 tensors in plain torch operations, which Megatron can take as its inner one.

    Args:
        params: param groups of fp32 tensors.
        lr: learning rate.
        weight_decay: decoupled with adam_w_mode, else added to the gradient.
        betas: decays of the moments.
        eps: added to the denominator outside the root.
        adam_w_mode: AdamW.
        bias_correction: whether moments are divided by 1 - beta**step.
        capturable: accepted, as Megatron passes it, if false.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        bias_correction: bool = True,
        capturable: bool = False,
    ) -> None:
        if capturable:
            raise ValueError("capturable must be False, as plain torch operations wait, got True")
        defaults = {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps}
        defaults |= {"adam_w_mode": adam_w_mode, "bias_correction": bias_correction}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Updates parameters and moments; a closure is not called."""
        for group in self.param_groups:
            if group["params"]:
                # Megatron wants one count for all groups that have parameters
                group["step"] = group.get("step", 0) + 1
            for param in (param for param in group["params"] if param.grad is not None):
                state = self.state[param]
                if not state:
                    state |= {name: torch.zeros_like(param) for name in ("exp_avg", "exp_avg_sq")}
                adam_update(param, param.grad, state["exp_avg"], state["exp_avg_sq"], group)


class UnfusedWeights(OptimizerWeights):
    """Owns a model's weights the unfused way; an fp32 weight is its own master.

    Of weights that are cast to fp8 at every use it records what they are cast to.
    """

    def __init__(self, model: nn.Module, config: OptimizerConfig, variant: UnfusedVariant) -> None:
        pieces = [
            ParameterPiece(name, p, p if p.dtype == torch.float32 else p.detach().float())
            for name, p in model.named_parameters()
        ]
        optimizer = UnfusedAdam(
            group_pieces(pieces, config),
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            adam_w_mode=config.adam_w_mode,
            bias_correction=config.bias_correction,
        )
        super().__init__(pieces, optimizer)
        self.round = ROUNDINGS[variant.rounding]
        self.quantizers = {
            f"{name}.weight": layer.quantizer
            for name, layer in model.named_modules()
            if isinstance(layer, FakeQuantizedLinear)
        }

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """Updates masters and moments, casts the masters, then moves delayed scales."""
        super().step(learning_rate)
        for piece in self.pieces:
            if piece.tensor is not piece.source:
                piece.source.copy_(self.round(piece.tensor))
            if piece.name in self.quantizers:
                self.quantizers[piece.name].after_step(piece.source)

    def weights_of(self, piece: ParameterPiece) -> dict[str, torch.Tensor]:
        """The weight, or codes and scales."""
        if piece.name not in self.quantizers:
            return super().weights_of(piece)
        return self.quantizers[piece.name].tensors(piece.source.detach())

    def state_of(self, piece: ParameterPiece) -> dict[str, torch.Tensor]:
        """Master and moments."""
        state: dict[str, torch.Tensor] = self.optimizer.state[piece.tensor]
        return state if piece.tensor is piece.source else {"master": piece.tensor, **state}

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's own, and the masters, which it does not save."""
        masters = {piece.name: piece.tensor for piece in self.pieces}
        return {"optimizer": super().state_dict(), "kept": masters}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copies the state in, bit for bit."""
        super().load_state_dict(state_dict["optimizer"])
        for piece in self.pieces:
            piece.tensor.copy_(state_dict["kept"][piece.name])
