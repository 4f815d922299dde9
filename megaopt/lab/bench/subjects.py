"""Optimizers that are measured, each in one of its forms; the table of other libraries' ones."""

import atexit
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from megaopt.float8 import RECIPES, Float8Recipe, Float8Weight
from megaopt.kernels.quantizers.scale import scale_from_amax_reference
from megaopt.lab.bench.instance import Instance, build, is_float8
from megaopt.lab.bench.sets import TensorSet

SHARED: Mapping[str, Any] = MappingProxyType({"lr": 1e-3, "weight_decay": 0.1})
"""Arguments of every optimizer; a decay, so that a step does all that it does in training."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """One optimizer in one of its forms: of ours, a mode, or of another library, a peer."""

    name: str
    description: str
    """The formats of weight and state; ours and peers of the same formats have the same words."""
    options: Mapping[str, Any]
    """Arguments of the optimizer besides those that every optimizer is given."""
    bytes_per_parameter: float
    """Bytes that a step must move in a large tensor: each input read once, each output written
    once; the master twice where fp8 codes wait for the whole tensor's amax. Scales of blocks are
    left out."""
    module: str = "megaopt"
    """The module to import when the optimizer is made; its top level names the library."""
    kind: str = "FusedAdam"
    """The optimizer's class in that module."""
    around: Callable[..., Any] | None = None
    """A function that makes the optimizer: it takes the class, and then the arguments."""
    weight_dtype: torch.dtype = torch.bfloat16
    """The dtype of weights and of gradients."""
    recipe: Float8Recipe | None = None
    """The fp8 format of matrices; None: all weights are of weight_dtype."""
    contract: str = "ieee"
    """The contract of FusedAdam's step: no other optimizer has others."""
    twin: str | None = None
    """The peer whose bits the contract promises, by its name in PEERS."""
    against: tuple[str, ...] = ()
    """The peers that do the same work, by their names in PEERS."""
    decoupled_grad: bool = False
    """Whether a peer can read `p.decoupled_grad`, of another dtype than the weight."""
    title: str = ""
    """The title in the pictures of Muon."""

    @property
    def package(self) -> str:
        """The name of the package that is imported."""
        return self.module.partition(".")[0]

    @property
    def is_ours(self) -> bool:
        """Return whether the optimizer is of this package."""
        return self.package == "megaopt"

    @property
    def is_installed(self) -> bool:
        """Return whether the library is installed; nothing is imported."""
        return find_spec(self.package) is not None

    @property
    def weight(self) -> Callable[[Tensor], Parameter] | None:
        """Return what makes a matrix an fp8 weight; None where weights are of weight_dtype."""
        recipe = self.recipe
        if recipe is None:
            return None
        if self.is_ours:
            return lambda values: Parameter(Float8Weight.from_values(values, recipe))
        return partial(float8_parameter, recipe=recipe)

    def why_not(self) -> str | None:
        """Return None where the library can be imported, else the reason."""
        return _why_not(self.module) if self.is_installed else f"{self.package} is not installed"

    def version(self) -> str:
        """Return the version of the library, which is installed; "unknown" where it says none."""
        attribute = getattr(importlib.import_module(self.package), "__version__", None)
        try:
            return str(attribute or version(self.package))
        except PackageNotFoundError:
            return "unknown"

    def optimizer(self, parameters: Sequence[Parameter], **more: Any) -> Any:
        """Make the optimizer, or what has its step and state; `more` goes to its constructor."""
        kind = getattr(importlib.import_module(self.module), self.kind)
        make = kind if self.around is None else partial(self.around, kind)
        return make(list(parameters), **SHARED, **self.options, **more)

    def instance(
        self,
        tensors: TensorSet,
        device: torch.device,
        grad_dtype: torch.dtype | None = None,
        **more: Any,
    ) -> Instance:
        """Make parameters and gradients with the optimizer: `build`; `more` as `optimizer`."""
        make, arguments = partial(self.optimizer, **more), (tensors, self.weight_dtype, device)
        return build(make, *arguments, weight=self.weight, grad_dtype=grad_dtype)


@cache
def _why_not(module: str) -> str | None:
    try:
        importlib.import_module(module)
    except Exception as error:  # a library built for something else fails in its own way
        return f"{module} cannot be imported: {type(error).__name__}: {error}"
    return None


# --- TransformerEngine's Adam on its own fp8 weights, called as its modules and Megatron call it


def float8_parameter(values: Tensor, recipe: Float8Recipe) -> Parameter:
    """Make a parameter that TransformerEngine keeps in fp8 (e4m3), by rows alone.

    Its modules keep the transpose too; a step of ours writes none. The values stay with it as
    `initial_value`, until a master has them.

    Args:
        values: bf16, two-dimensional, on a GPU.
        recipe: RECIPES' "delayed", "current" or "block_128x128". A delayed scale starts as
            Float8Weight's does, from the values' amax; the parameter then has an `amax_history`,
            fp32 (1024, 1).
    """
    e4m3 = _library().DType.kFloat8E4M3
    usage = {"rowwise": True, "columnwise": False}
    kind = "float8_blockwise" if recipe.scaling.startswith("block") else "float8"
    module: Any = importlib.import_module(f"transformer_engine.pytorch.tensor.{kind}_tensor")
    history = None
    if recipe.scaling == "delayed":
        history = values.new_zeros((recipe.amax_history_len, 1), dtype=torch.float32)
        amax = values.abs().amax().float().reshape(1)
        scale = scale_from_amax_reference(amax, recipe.code_max)
        quantizer = module.Float8Quantizer(scale, history[0], e4m3, **usage)
    elif recipe.scaling == "current":
        quantizer = module.Float8CurrentScalingQuantizer(e4m3, values.device, **usage)
    else:
        quantizer = module.Float8BlockQuantizer(e4m3, **usage)
    with torch.no_grad():
        weight: Any = Parameter(quantizer(values))
    weight.initial_value, weight.amax_history = values, history
    parameter: Parameter = weight
    return parameter


def _library() -> Any:
    """The extension module; it can only be loaded after the package."""
    importlib.import_module("transformer_engine.pytorch")
    return importlib.import_module("transformer_engine_torch")


class FusedFloat8Adam:
    """FusedAdam, which writes weights with delayed scaling itself, and the move of their scales.

    FusedAdam leaves the move to the next forward pass, where one call does it for many weights; a
    step of ours has it.

    Args:
        fused_adam: The class.
        parameters: of `float8_parameter`, with delayed scaling, and plain ones.
        options: of FusedAdam.
    """

    def __init__(self, fused_adam: Any, parameters: list[Parameter], **options: Any) -> None:
        self.weights: list[Any] = [p for p in parameters if is_float8(p)]
        self.adam = fused_adam(parameters, master_weights=True, **options)
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
        fused_adam: The class.
        parameters: of `float8_parameter`, and plain ones, which FusedAdam updates alone.
        use_decoupled_grad: Whether gradients are the parameters' `decoupled_grad`.
        options: of FusedAdam.
    """

    def __init__(
        self,
        fused_adam: Any,
        parameters: list[Parameter],
        *,
        use_decoupled_grad: bool = False,
        **options: Any,
    ) -> None:
        self.grad_name = "decoupled_grad" if use_decoupled_grad else "grad"
        self.weights: list[Any] = [p for p in parameters if is_float8(p)]
        self.masters: list[Any] = [Parameter(w.initial_value.float()) for w in self.weights]
        for weight in self.weights:
            del weight.initial_value
        # decoupled: torch has no bf16 `grad` of an fp32 parameter
        self.adams = [fused_adam(self.masters, use_decoupled_grad=True, **options)]
        if plain := [p for p in parameters if not is_float8(p)]:
            options |= {"use_decoupled_grad": use_decoupled_grad, "master_weights": True}
            self.adams.append(fused_adam(plain, **options))
        one_rank_group("nccl")  # started now, outside measured steps

    @property
    def state(self) -> dict[Parameter, dict[str, Any]]:
        """Moments and `master_param`, by parameter."""
        states = {
            parameter: state for adam in self.adams for parameter, state in adam.state.items()
        }
        for weight, master in zip(self.weights, self.masters, strict=True):
            states[weight] = {**states.pop(master, {}), "master_param": master.detach()}
        return states

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
        # nobody may have ended it before
        atexit.register(lambda: dist.is_initialized() and dist.destroy_process_group())
    return dist.group.WORLD


# --- other libraries' optimizers; each is imported only when it is used


def describe_float8(scaling: str) -> str:
    """Return the formats of a case with fp8 weights, ours or a peer's."""
    return f"fp8 matrices ({scaling}), other weights bf16, fp32 masters"


MODULES = {
    "torch": "torch.optim",
    "transformerengine": "transformer_engine.pytorch.optimizers",
    "apex": "apex.optimizers",
    "flashoptim": "flashoptim",
    "torchao": "torchao.optim",
    "bitsandbytes": "bitsandbytes.optim",
}
"""The module that a peer's class is in, by what the peer's name begins with."""


def _peer(
    name: str,
    kind: str,
    description: str,
    size: float,
    *,
    dtype: torch.dtype = torch.bfloat16,
    recipe: Float8Recipe | None = None,
    around: Callable[..., Any] | None = None,
    **options: Any,
) -> Subject:
    """Make a peer whose name begins with its library's."""
    library = name.partition("-")[0]
    return Subject(
        name=name,
        description=description,
        options=options,
        bytes_per_parameter=size,
        module=MODULES[library],
        kind=kind,
        around=around,
        weight_dtype=dtype,
        recipe=recipe,
        decoupled_grad=library == "transformerengine",
    )


def _peers() -> Iterator[Subject]:
    masters: dict[str, Any] = {"master_weights": True}
    alone: dict[str, Any] = {"master_weight_bits": None}
    adam, formats = "FusedAdam", "bf16 weights, fp32 masters"
    yield _peer("transformerengine-bf16", adam, formats, 28, **masters)
    row: tuple[Any, ...] = (adam, "bf16 weights, int16 remainders", 26)
    yield _peer("transformerengine-bf16-remainders", *row, store_param_remainders=True, **masters)
    for name, dtype, words, size in (
        ("bf16", torch.bfloat16, "bf16 weights and moments, fp32 masters", 20),
        ("fp16", torch.float16, f"{formats}, fp16 moments", 20),
        ("fp8", torch.uint8, f"{formats}, fp8 moments", 16),
    ):
        moments: dict[str, Any] = {"exp_avg_dtype": dtype, "exp_avg_sq_dtype": dtype}
        yield _peer(f"transformerengine-{name}-moments", adam, words, size, **masters, **moments)
    for name, scaling, size, around in (
        ("delayed", "delayed", 27, FusedFloat8Adam),
        ("delayed-cast", "delayed", 27, AdamThenCast),
        ("current", "current", 31, AdamThenCast),
        ("block_128x128", "block_128x128", 27, AdamThenCast),
    ):
        row, recipe = (adam, describe_float8(scaling), size), RECIPES[scaling]
        yield _peer(f"transformerengine-fp8-{name}", *row, recipe=recipe, around=around)
    row = ("AdamW", "fp32 weights", 28)
    yield _peer("torch-fused-fp32", *row, dtype=torch.float32, fused=True)
    yield _peer("torch-foreach-fp32", *row, dtype=torch.float32, foreach=True)
    yield _peer("apex-fp32", "FusedAdam", "fp32 weights", 28, dtype=torch.float32)
    row = ("AdamW", "bf16 weights and moments", 14)
    yield _peer("torch-fused-bf16", *row, fused=True)
    yield _peer("torch-foreach-bf16", *row, foreach=True)
    # unquantized, its moments are stored in the weights' dtype
    row = ("FlashAdamW", "bf16 weights and moments, 16 more bits a weight", 18)
    yield _peer("flashoptim-32bit-master", *row, quantize=False, master_weight_bits=32)
    bits = "8-bit moments"
    row = ("FlashAdamW", f"bf16 weights, 8 more bits a weight, {bits}", 12)
    yield _peer("flashoptim-8bit", *row)
    row = ("FlashAdamW", f"bf16 weights, 16 more bits a weight, {bits}", 14)
    yield _peer("flashoptim-8bit-32bit-master", *row, master_weight_bits=32)
    adam8, lion = f"bf16 weights, {bits}", "bf16 weights, Lion with 8-bit momentum"
    sgd = "bf16 weights, SGD with 8-bit momentum"
    yield _peer("flashoptim-8bit-no-master", "FlashAdamW", adam8, 10, **alone)
    yield _peer("flashoptim-lion-8bit", "FlashLion", lion, 8, **alone)
    yield _peer("flashoptim-sgd-8bit", "FlashSGD", sgd, 8, **alone, momentum=0.9)
    yield _peer("torchao-8bit", "AdamW8bit", adam8, 10, bf16_stochastic_round=True)
    yield _peer("bitsandbytes-8bit", "AdamW8bit", adam8, 10)
    yield _peer("torchao-fp8", "AdamWFp8", adam8, 10, bf16_stochastic_round=True)
    yield _peer("bitsandbytes-lion-8bit", "Lion8bit", lion, 8)
    yield _peer("bitsandbytes-sgd-8bit", "SGD8bit", sgd, 8, momentum=0.9)
    row = ("AdamW4bit", "bf16 weights, 4-bit moments", 8)
    yield _peer("torchao-4bit", *row, bf16_stochastic_round=True)


PEERS = {peer.name: peer for peer in _peers()}
