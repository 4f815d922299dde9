"""TransformerEngine's Adam on its own fp8 weights, called as its modules and Megatron call it.

Its library is imported within the functions: this module can be imported without it.
"""

import atexit
import importlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from megaopt.commands.bench.weights import is_float8
from megaopt.float8 import RECIPES
from megaopt.kernels.quantizers.scale import scale_from_amax_reference

__all__ = ["AdamThenCast", "FusedFloat8Adam", "float8_parameter", "one_rank_group"]


def float8_parameter(values: Tensor, scaling: str) -> Parameter:
    """Make a parameter that TransformerEngine keeps in fp8 (e4m3), by rows alone.

    Its modules keep the transpose too; a step of ours writes none. The values stay with it as
    `initial_value`, until a master has them.

    Args:
        values: bf16, two-dimensional, on a GPU.
        scaling: "delayed", "current" or "block_128x128", with the options of RECIPES. A delayed
            scale starts as Float8Weight's does, from the values' amax; the parameter then has an
            `amax_history`, fp32 (1024, 1).
    """
    library = _library()
    e4m3 = library.DType.kFloat8E4M3
    usage = {"rowwise": True, "columnwise": False}
    history = None
    if scaling == "delayed":
        history = values.new_zeros((RECIPES[scaling].amax_history_len, 1), dtype=torch.float32)
        amax = values.abs().amax().float().reshape(1)
        scale = scale_from_amax_reference(amax, RECIPES[scaling].code_max)
        quantizer = _tensor_kind("float8", "Float8Quantizer")(scale, history[0], e4m3, **usage)
    elif scaling == "current":
        kind = _tensor_kind("float8", "Float8CurrentScalingQuantizer")
        quantizer = kind(e4m3, values.device, **usage)
    else:
        quantizer = _tensor_kind("float8_blockwise", "Float8BlockQuantizer")(e4m3, **usage)
    with torch.no_grad():
        made: Any = Parameter(quantizer(values))
    made.initial_value, made.amax_history = values, history
    parameter: Parameter = made
    return parameter


def _library() -> Any:
    """The extension module; it can only be loaded after the package."""
    importlib.import_module("transformer_engine.pytorch")
    return importlib.import_module("transformer_engine_torch")


def _tensor_kind(module: str, name: str) -> Any:
    return getattr(
        importlib.import_module(f"transformer_engine.pytorch.tensor.{module}_tensor"), name
    )


class FusedFloat8Adam:
    """FusedAdam, which writes weights with delayed scaling itself, and the move of their scales.

    FusedAdam leaves the move to the next forward pass, where one call does it for many weights; a
    step of ours has it.

    Args:
        parameters: of `float8_parameter`, with delayed scaling, and plain ones.
        options: of FusedAdam.
    """

    def __init__(self, parameters: Sequence[Parameter], **options: Any) -> None:
        self.weights: list[Any] = [p for p in parameters if is_float8(p)]
        self.adam = _fused_adam(parameters, master_weights=True, **options)
        for weight in self.weights:
            # FusedAdam's own first master is the dequantized weight
            self.adam.initialize_state(weight, False)
            self.adam.set_scaled_state(weight, "master_param", weight.initial_value.float())
            del weight.initial_value

    @property
    def state(self) -> Any:
        """FusedAdam's: moments and `master_param`, by parameter."""
        return self.adam.state

    def step(self) -> None:
        """Update masters, moments, codes and scale_inv, then the scales of the next step."""
        self.adam.step()
        _move_scales(self.weights)


class AdamThenCast:
    """FusedAdam on fp32 masters, then quantize_master_weights, as distributed optimizers do it.

    Args:
        parameters: of `float8_parameter`, and plain ones, which FusedAdam updates alone.
        use_decoupled_grad: Whether gradients are the parameters' `decoupled_grad`.
        options: of FusedAdam.
    """

    def __init__(
        self, parameters: Sequence[Parameter], *, use_decoupled_grad: bool = False, **options: Any
    ) -> None:
        self.grad_name = "decoupled_grad" if use_decoupled_grad else "grad"
        self.weights: list[Any] = [p for p in parameters if is_float8(p)]
        self.masters: list[Any] = [Parameter(w.initial_value.float()) for w in self.weights]
        for weight in self.weights:
            del weight.initial_value
        # decoupled: torch has no bf16 `grad` of an fp32 parameter
        self.adams = [_fused_adam(self.masters, use_decoupled_grad=True, **options)]
        if plain := [p for p in parameters if not is_float8(p)]:
            options |= {"use_decoupled_grad": use_decoupled_grad, "master_weights": True}
            self.adams.append(_fused_adam(plain, **options))
        one_rank_group("nccl")  # started now, outside measured steps

    @property
    def state(self) -> dict[Parameter, dict[str, Any]]:
        """Moments and `master_param`, by parameter."""
        found = {parameter: state for adam in self.adams for parameter, state in adam.state.items()}
        for weight, master in zip(self.weights, self.masters, strict=True):
            found[weight] = {**found.pop(master, {}), "master_param": master.detach()}
        return found

    @torch.no_grad()
    def step(self) -> None:
        """Update masters and moments, cast the masters, and move delayed scales."""
        for weight, master in zip(self.weights, self.masters, strict=True):
            master.decoupled_grad = getattr(weight, self.grad_name)
        for adam in self.adams:
            adam.step()
        cast = importlib.import_module("transformer_engine.pytorch.tensor.utils")
        flat = [master.detach().view(-1) for master in self.masters]
        cast.quantize_master_weights(self.weights, flat, [0] * len(flat), one_rank_group("nccl"))
        _move_scales([weight for weight in self.weights if weight.amax_history is not None])


def _fused_adam(parameters: Sequence[Parameter], **options: Any) -> Any:
    module = importlib.import_module("transformer_engine.pytorch.optimizers")
    return module.FusedAdam(list(parameters), **options)


def _move_scales(weights: Sequence[Any]) -> None:
    """Find the next delayed scales, as FP8GlobalStateManager does it before a forward pass."""
    if not weights:
        return
    library = _library()
    recipe = RECIPES["delayed"]
    library.fused_amax_and_scale_update_after_reduction(
        torch.cat([weight.amax_history[0] for weight in weights]),
        [weight.amax_history for weight in weights],
        [weight._quantizer.scale for weight in weights],
        recipe.amax_compute_algo,
        library.DType.kFloat8E4M3,
        recipe.margin,
    )


def one_rank_group(backend: str) -> Any:
    """Return the process group, started with this process alone where there is none yet.

    quantize_master_weights puts amaxes together in one, a single rank's too. Keep no reference to
    it: a group that somebody holds when Python ends is taken down without its threads having
    finished, which can abort the process.
    """
    if not dist.is_initialized():
        store = dist.HashStore()  # type: ignore[attr-defined]  # torch's documentation has it there
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
        atexit.register(_end_group)
    return dist.group.WORLD


def _end_group() -> None:
    if dist.is_initialized():  # nobody ended it before
        dist.destroy_process_group()
