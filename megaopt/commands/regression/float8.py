"""fp8 in a regression: which layers, both ways, and the baseline's owner."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from megaopt.commands.config import OptimizerConfig, UnfusedVariant
from megaopt.commands.regression.fake_quantize import FakeQuantizedLinear
from megaopt.commands.regression.unfused import UnfusedAdam
from megaopt.float8 import RECIPES, Float8Weight, to_float8


def in_a_block(name: str, module: nn.Module) -> bool:
    """The linear layers of the blocks; the output matrix, which is the embedding, stays bf16."""
    return isinstance(module, nn.Linear) and name.startswith("blocks.")


def quantize_model(model: nn.Module, recipe: str) -> None:
    """Makes the weights of the blocks' linear layers Float8Weights."""
    to_float8(model, RECIPES[recipe], filter=in_a_block)


def fake_quantize_model(model: nn.Module, recipe: str, scaled_matmul: bool) -> None:
    """Casts the weights of the blocks' linear layers to fp8 and back at every use."""
    for name, layer in list(model.named_modules()):
        if in_a_block(name, layer):
            owner, _, own_name = name.rpartition(".")
            made = FakeQuantizedLinear(layer.weight, recipe, scaled_matmul)
            setattr(model.get_submodule(owner), own_name, made)


def weight_tensors(parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """What is compared of a weight: itself, or what an fp8 weight is made of."""
    if not isinstance(parameter, Float8Weight):
        return {"weight": parameter.detach()}
    tensors = parameter.tensors()
    return {"codes": tensors.pop("data8"), **tensors}


def initial_master(parameter: torch.Tensor) -> torch.Tensor:
    """The fp32 values that a parameter's master starts from, a new tensor."""
    if isinstance(parameter, Float8Weight):
        values = parameter.high_precision_initial_value()
        return (parameter.dequantize() if values is None else values).float().clone()
    return parameter.detach().float()


class FakeQuantizedAdam(UnfusedAdam):
    """Owns a model's weights the unfused way, those that are cast to fp8 and back among them."""

    def __init__(self, model: nn.Module, config: OptimizerConfig, variant: UnfusedVariant) -> None:
        super().__init__(model, config, variant)
        self.quantizers = {
            f"{name}.weight": layer.quantizer
            for name, layer in model.named_modules()
            if isinstance(layer, FakeQuantizedLinear)
        }

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """Updates masters and moments, casts the masters, then moves delayed scales."""
        super().step(learning_rate)
        for name, quantizer in self.quantizers.items():
            quantizer.after_step(self.parameters[name])

    def weights(self, name: str) -> dict[str, torch.Tensor]:
        """The weight; of one that is cast to fp8 what it is cast to."""
        quantizer = self.quantizers.get(name)
        if quantizer is None:
            return super().weights(name)
        return quantizer.tensors(self.parameters[name].detach())

    def state_dict(self) -> dict[str, Any]:
        """Step count and state, scales and histories among it."""
        quantizers = {name: each.state() for name, each in self.quantizers.items()}
        return {**super().state_dict(), "quantizers": quantizers}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copies the state in, bit for bit."""
        super().load_state_dict(state_dict)
        for name, quantizer in self.quantizers.items():
            for kind, tensor in quantizer.state().items():
                tensor.copy_(state_dict["quantizers"][name][kind])
