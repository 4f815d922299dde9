"""A case made real: parameters, gradients, an optimizer, and the bytes that a step must move."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

from megaopt import FusedAdam
from megaopt.bench.cases import Mode

__all__ = ["Instance", "build", "bytes_per_step", "state_tensors"]

STATES = ("exp_avg", "exp_avg_sq", "master_param")


@dataclass
class Instance:
    """Parameters with gradients, and the optimizer that updates them."""

    parameters: list[Parameter]
    optimizer: FusedAdam
    generator: torch.Generator

    def draw_gradients(self) -> None:
        """Fill every gradient with fresh values, in place."""
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            parameter.grad.normal_(generator=self.generator)

    def move_gradients(self) -> None:
        """Put every gradient at another address, as a backward pass after zero_grad does."""
        for parameter in self.parameters:
            assert parameter.grad is not None  # build drew them
            parameter.grad = parameter.grad.clone()


def build(
    mode: Mode, sizes: Sequence[int], device: torch.device, backend: str, seed: int = 0
) -> Instance:
    """Make parameters and gradients of random values: the same for the same seed and device.

    Args:
        mode: The formats.
        sizes: Elements of each tensor.
        device: Where everything lies.
        backend: FusedAdam's backend, "triton" or "reference".
        seed: Of the generator that draws weights and gradients.
    """
    generator = torch.Generator(device).manual_seed(seed)
    parameters = []
    for size in sizes:
        weight = torch.empty(size, dtype=mode.weight_dtype, device=device)
        parameters.append(Parameter(weight.normal_(0, 0.02, generator=generator)))
    optimizer = FusedAdam(parameters, backend=backend, **mode.options)
    instance = Instance(parameters, optimizer, generator)
    instance.draw_gradients()
    return instance


def state_tensors(instance: Instance, parameter: Parameter) -> dict[str, Tensor]:
    """Return the weight and every state tensor of one parameter by name, as stored."""
    state = instance.optimizer.state[parameter]
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    return {"weight": parameter.detach(), **tensors}


def bytes_per_step(instance: Instance) -> int:
    """Return the bytes that a step must move, counted on the tensors that it uses.

    Gradients are read; moments and masters are read and written; a weight is written, and is read
    too where it holds (the upper half of) the value that is updated. Call it after a first step.
    """
    return sum(_bytes_of(instance, parameter) for parameter in instance.parameters)


def _bytes_of(instance: Instance, parameter: Parameter) -> int:
    assert parameter.grad is not None  # build drew them
    tensors = state_tensors(instance, parameter)
    stored = sum(2 * tensors[name].nbytes for name in STATES if name in tensors)
    master = tensors.get("master_param")
    weight_is_read = master is None or master.dtype is torch.int16
    return parameter.grad.nbytes + stored + parameter.nbytes * (2 if weight_is_read else 1)
