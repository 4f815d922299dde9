"""A case made real: parameters, gradients, an optimizer, and the bytes that a step must move."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from megaopt.float8 import Float8Weight
from megaopt.kernels.formats import MASTERS, MOMENTS
from megaopt.kernels.quantizers import Left
from megaopt.kernels.rules.matrix import PROJECTION
from megaopt.lab.bench.sets import TensorSet

STATES = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "master_param")
SCALED = {f.dtype for table in (MOMENTS, MASTERS) for f in table.values() if f.scaled}


@dataclass
class Instance:
    """Parameters with gradients, and the optimizer that updates them."""

    tensors: TensorSet
    parameters: list[Parameter]
    optimizer: torch.optim.Optimizer
    generator: torch.Generator
    grad_name: str
    """The parameters' attribute that the optimizer reads: grad or decoupled_grad."""

    @property
    def gradients(self) -> list[Tensor]:
        """The gradients, a parameter's each."""
        return [getattr(parameter, self.grad_name) for parameter in self.parameters]

    def draw_gradients(self) -> None:
        """Fill every gradient with fresh values, in place."""
        for gradient in self.gradients:
            gradient.normal_(generator=self.generator)

    def move_gradients(self) -> None:
        """Put every gradient at another address, as a backward pass after zero_grad does."""
        old = self.gradients
        new = _allocate(self.tensors, old[0].dtype, old[0].device)
        for parameter, gradient, storage in zip(self.parameters, old, new, strict=True):
            setattr(parameter, self.grad_name, storage.view_as(gradient).copy_(gradient))


def build(
    make: Callable[[Sequence[Parameter]], torch.optim.Optimizer],
    tensors: TensorSet,
    weight_dtype: torch.dtype,
    device: torch.device,
    *,
    weight: Callable[[Tensor], Parameter] | None = None,
    grad_dtype: torch.dtype | None = None,
    seed: int = 0,
) -> Instance:
    """Make parameters and gradients of random values: the same for the same seed and device.

    Args:
        make: Makes the optimizer of the parameters.
        tensors: The set that is made real.
        weight_dtype: Of the parameters.
        device: Where everything lies.
        weight: Makes an fp8 weight of a matrix; others than matrices stay plain, as norms and
            biases do. None: all are plain.
        grad_dtype: Of gradients in `decoupled_grad`; None for gradients in `grad`.
        seed: Of the generator that draws weights and gradients.
    """
    generator = torch.Generator(device).manual_seed(seed)
    values = _allocate(tensors, weight_dtype, device)
    for value in values:
        value.normal_(0, 0.02, generator=generator)
    if tensors.shapes:  # they decide which moments are in blocks
        values = [v.view(shape) for v, shape in zip(values, tensors.shapes, strict=True)]
    parameters = [weight(v) if weight and v.dim() == 2 else Parameter(v) for v in values]
    name = "grad" if grad_dtype is None else "decoupled_grad"
    gradients = _allocate(tensors, grad_dtype or weight_dtype, device)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        setattr(parameter, name, gradient.view(parameter.shape))
    instance = Instance(tensors, parameters, make(parameters), generator, name)
    instance.draw_gradients()
    return instance


def _allocate(tensors: TensorSet, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    if not tensors.flat:
        return [torch.empty(size, dtype=dtype, device=device) for size in tensors.sizes]
    whole = torch.empty(sum(tensors.sizes), dtype=dtype, device=device)
    return list(torch.split(whole, list(tensors.sizes)))


# --- what a weight and its state are made of, as stored


def is_float8(parameter: Parameter) -> bool:
    """Return whether the weight is in fp8: a Float8Weight, or a tensor of TransformerEngine's."""
    return isinstance(parameter, Float8Weight) or hasattr(parameter, "_quantizer")


def weight_tensors(parameter: Parameter) -> dict[str, Tensor]:
    """Return the tensors of a weight, as stored, "weight" first.

    Of fp8 weights "weight" is the codes, float8 of the weight's shape; beside it stand
    "weight_scale_inv" and, with delayed scaling, "weight_scale" and "weight_amax_history", of
    Float8Weight's shapes, TransformerEngine's too.
    """
    if isinstance(parameter, Float8Weight):
        tensors = parameter.tensors()
        codes = tensors.pop("data8")
        return {"weight": codes, **{f"weight_{name}": t for name, t in tensors.items()}}
    if not is_float8(parameter):
        return {"weight": parameter.detach()}
    # a Float8Tensor or Float8BlockwiseQTensor in e4m3, to which `float8_parameter` of
    # bench.subjects added the history
    weight: Any = parameter
    if hasattr(weight, "_rowwise_data"):
        # columns of scales are filled up to a multiple of 4
        columns = -(-weight.shape[-1] // 128)
        codes, scale_inv = weight._rowwise_data, weight._rowwise_scale_inv[:, :columns]
    else:
        codes, scale_inv = weight._data, weight._scale_inv
    tensors = {"weight": codes.view(torch.float8_e4m3fn), "weight_scale_inv": scale_inv}
    if (history := getattr(weight, "amax_history", None)) is not None:
        tensors["weight_scale"] = weight._quantizer.scale
        tensors["weight_amax_history"] = history.flatten()
    return tensors


def state_tensors(instance: Instance, parameter: Parameter) -> dict[str, Tensor]:
    """Return the weight, and the moments, master and scales of one parameter, as stored.

    They have the names that FusedAdam gives them, also for a peer that stores what FusedAdam does.
    """
    state = instance.optimizer.state[parameter]
    # TransformerEngine keeps its scales outside the state
    scales = getattr(instance.optimizer, "_scales", {}).get(parameter, {})
    tensors = weight_tensors(parameter)
    for name in STATES:
        value, scale_name = state.get(name), f"{name}_scale"
        if hasattr(value, "_scale_inv"):  # TransformerEngine's, which calls itself fp32
            tensors[name] = value._data.view(torch.float8_e4m3fn)
            tensors[scale_name] = value._scale_inv
        elif isinstance(value, Tensor):
            tensors[name] = value
            if scale_name in state or value.dtype in SCALED:
                tensors[scale_name] = state.get(scale_name, scales.get(name))
    return tensors


def _stored(instance: Instance, parameter: Parameter) -> Iterator[Tensor]:
    """Give the plain tensors that make up a state, of whatever library; no tables of codes."""
    for key, value in instance.optimizer.state[parameter].items():
        if key.startswith("qmap"):
            continue
        if isinstance(getattr(value, "_data", None), Tensor):  # beside it there may be a transpose
            yield value._data
        elif hasattr(value, "__tensor_flatten__"):
            names, _ = value.__tensor_flatten__()
            yield from (getattr(value, name) for name in names if name != "qmap")
        elif isinstance(value, Tensor):
            yield value
        elif hasattr(value, "__dict__"):
            yield from (entry for entry in vars(value).values() if isinstance(entry, Tensor))


def bytes_held(instance: Instance) -> int:
    """Return the bytes of all weights and states, without gradients and tables of codes."""
    return sum(
        tensor.nbytes
        for parameter in instance.parameters
        for tensor in (*weight_tensors(parameter).values(), *_stored(instance, parameter))
        if tensor.numel() > 1
    )


def bytes_per_step(instance: Instance) -> int:
    """Return the bytes that a step must move, counted on the tensors that it uses.

    Gradients and GaLore's projections are read; moments and masters are read and written; a weight
    is written, and is read too where it holds (the upper part of) the value that is updated. The
    master of an fp8 weight whose scale comes from its own new amax is read twice. Scales of blocks
    count, single numbers and tables of codes do not. Call it after a first step.
    """
    total = 0
    for parameter, gradient in zip(instance.parameters, instance.gradients, strict=True):
        state, tensors = instance.optimizer.state[parameter], weight_tensors(parameter)
        stored = [tensor for tensor in _stored(instance, parameter) if tensor.numel() > 1]
        moved = [gradient, *stored, *stored]
        if isinstance(state.get(PROJECTION), Tensor):
            total -= state[PROJECTION].nbytes
        # of an fp8 weight the codes and their scales
        written = [tensors["weight"]]
        if is_float8(parameter) and tensors["weight_scale_inv"].numel() > 1:
            written.append(tensors["weight_scale_inv"])
        moved += written
        master = state.get("master_param")
        if master is None or MASTERS[master.dtype].joined:  # the value is that of the weight
            moved += written
        elif isinstance(parameter, Float8Weight):
            moved += [master] * (parameter.recipe.quantizer.store.left is Left.CODES)
        else:
            quantizer = type(getattr(parameter, "_quantizer", None)).__name__
            moved += [master] * (quantizer == "Float8CurrentScalingQuantizer")
        total += sum(tensor.nbytes for tensor in moved)
    return total
