"""The baseline: what people write today, Adam in plain torch operations on fp32 masters.

It follows the contract `ieee` operation by operation and shares no code with the kernels. Three
habits would cost it that contract and are avoided: torch's fp32 square root on the CPU (not
correctly rounded), its combined operations (lerp, addcmul, addcdiv and add with alpha may round
differently), and dividing by a Python number (on the GPU a multiplication by the reciprocal).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from megaopt.commands.config import OptimizerConfig, UnfusedVariant
from megaopt.commands.regression.parts import Part, part


def weight_decay_of(parameter: torch.Tensor, config: OptimizerConfig) -> float:
    """The decay of one parameter: matrices decay, norm weights do not."""
    return config.weight_decay if parameter.ndim >= 2 else 0.0


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Scalars:
    """The numbers of one step; torch rounds each to fp32 once, where it meets an fp32 tensor."""

    learning_rate: float
    weight_decay: float
    beta1: float
    beta2: float
    one_minus_beta1: float
    one_minus_beta2: float
    eps: float
    reciprocal1: float
    reciprocal2: float
    adam_w_mode: bool


def scalars_of(
    config: OptimizerConfig, step: int, learning_rate: float, weight_decay: float
) -> Scalars:
    """Computes in fp64 what a step needs; steps count from 1."""
    correct = config.bias_correction
    return Scalars(
        learning_rate=learning_rate,
        weight_decay=weight_decay,
        beta1=config.beta1,
        beta2=config.beta2,
        one_minus_beta1=1 - config.beta1,
        one_minus_beta2=1 - config.beta2,
        eps=config.eps,
        reciprocal1=1 / (1 - power(config.beta1, step)) if correct else 1.0,
        reciprocal2=1 / (1 - power(config.beta2, step)) if correct else 1.0,
        adam_w_mode=config.adam_w_mode,
    )


def adam_update(
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    scalars: Scalars,
) -> None:
    """One step of Adam in the contract's order; all tensors fp32, updated in place but for grad."""
    s = scalars
    if not s.adam_w_mode:
        grad = grad + param * s.weight_decay
    exp_avg.copy_(exp_avg * s.beta1 + grad * s.one_minus_beta1)
    exp_avg_sq.copy_(exp_avg_sq * s.beta2 + (grad * grad) * s.one_minus_beta2)
    numerator = exp_avg * s.reciprocal1
    denominator = square_root(exp_avg_sq * s.reciprocal2) + s.eps
    update = numerator / denominator
    if s.adam_w_mode:
        update = update + param * s.weight_decay
    param.copy_(param - update * s.learning_rate)


class UnfusedAdam:
    """Owns a model's weights the unfused way; an fp32 weight is its own master."""

    def __init__(self, model: nn.Module, config: OptimizerConfig, variant: UnfusedVariant) -> None:
        self.parameters = dict(model.named_parameters())
        self.config = config
        self.round = ROUNDINGS[variant.rounding]
        self.steps_done = 0
        self.state = {name: self._initial_state(p) for name, p in self.parameters.items()}

    @staticmethod
    def _initial_state(parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        zeros = torch.zeros_like(parameter, dtype=torch.float32)
        state = {"exp_avg": zeros, "exp_avg_sq": zeros.clone()}
        if parameter.dtype != torch.float32:
            state["master"] = parameter.detach().float()
        return state

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """Updates masters and moments, then casts the masters into the weights."""
        self.steps_done += 1
        for name, parameter in self.parameters.items():
            if parameter.grad is None:
                continue
            state = self.state[name]
            master = state.get("master", parameter)
            decay = weight_decay_of(parameter, self.config)
            scalars = scalars_of(self.config, self.steps_done, learning_rate, decay)
            gradient = parameter.grad.float()
            adam_update(master, gradient, state["exp_avg"], state["exp_avg_sq"], scalars)
            if master is not parameter:
                parameter.copy_(self.round(master))

    def weights(self, name: str) -> dict[str, torch.Tensor]:
        """What is recorded of a parameter's weight, by quantity."""
        return {"weight": self.parameters[name]}

    def parts(self) -> Iterator[Part]:
        """The weights and the state, as they are."""
        for name, state in self.state.items():
            for quantity, tensor in (self.weights(name) | state).items():
                yield part(name, quantity, tensor)

    def state_dict(self) -> dict[str, Any]:
        """Step count and state."""
        return {"step": self.steps_done, "state": self.state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copies the state in, bit for bit."""
        self.steps_done = state_dict["step"]
        for name, state in self.state.items():
            for kind, tensor in state.items():
                tensor.copy_(state_dict["state"][name][kind])
