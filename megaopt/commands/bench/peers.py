"""Other libraries' optimizers, measured beside ours; each is imported only when it is used."""

import atexit
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from megaopt.commands.bench.instance import is_float8
from megaopt.float8 import RECIPES
from megaopt.kernels.quantizers.scale import scale_from_amax_reference

SHARED: Mapping[str, Any] = MappingProxyType({"lr": 1e-3, "weight_decay": 0.1})
"""What every optimizer is given; a decay, so that a step does all that it does in training."""


MODULES: Mapping[str, str] = MappingProxyType(
    {
        "torch": "torch.optim",
        "transformerengine": "transformer_engine.pytorch.optimizers",
        "apex": "apex.optimizers",
        "flashoptim": "flashoptim",
        "torchao": "torchao.optim",
        "bitsandbytes": "bitsandbytes.optim",
    }
)
"""The module that a peer's class is in, by what the peer's name begins with."""


@dataclass(frozen=True, kw_only=True)
class Peer:
    """One optimizer of another library, in one of its forms."""

    name: str
    description: str
    """The formats of weight and state, in the words that ours use."""
    module: str
    """What is imported; its top level names the library."""
    kind: str
    """The optimizer's class in that module."""
    weight_dtype: torch.dtype
    """The dtype of weights and of gradients."""
    bytes_per_parameter: float
    """What a step must move in a large tensor, scales of blocks left out."""
    options: Mapping[str, Any]
    decoupled_grad: bool = False
    """Whether it can read `p.decoupled_grad`, of another dtype than the weight."""
    scaling: str | None = None
    """The recipe of fp8 matrices, which TransformerEngine's optimizer writes, by its name in
    megaopt.float8.RECIPES."""
    separate_cast: bool = False
    """Whether the optimizer updates masters and another call casts them to fp8."""

    @property
    def weight(self) -> Callable[[Tensor], Parameter] | None:
        """What makes an fp8 weight of a matrix; None where weights are of weight_dtype."""
        if self.scaling is None:
            return None
        return partial(float8_parameter, scaling=self.scaling)

    @property
    def package(self) -> str:
        """The name of the package that is imported."""
        return self.module.partition(".")[0]

    def why_not(self) -> str | None:
        """Return None where the library can be imported, else the reason."""
        return _why_not(self.module)

    def version(self) -> str:
        """Return the version of the library, which is installed."""
        return version_of(self.package)

    def optimizer(self, parameters: Sequence[Parameter], **more: Any) -> Any:
        """Make the optimizer, or what has its step and state; `more` goes to its constructor."""
        kind: Any = AdamThenCast if self.separate_cast else FusedFloat8Adam
        if self.scaling is None:
            kind = getattr(importlib.import_module(self.module), self.kind)
        return kind(list(parameters), **SHARED, **self.options, **more)


def version_of(package: str) -> str:
    """Return the version of a package that can be imported, "unknown" where it says none."""
    found = getattr(importlib.import_module(package), "__version__", None)
    try:
        return str(found or version(package))
    except PackageNotFoundError:
        return "unknown"


@cache
def _why_not(module: str) -> str | None:
    library = module.partition(".")[0]
    if find_spec(library) is None:
        return f"{library} is not installed"
    try:
        importlib.import_module(module)
    except Exception as error:  # a library built for something else fails in its own way
        return f"{module} cannot be imported: {type(error).__name__}: {error}"
    return None


def _peer(
    name: str,
    kind: str,
    description: str,
    bytes_per_parameter: float,
    *,
    weight_dtype: torch.dtype = torch.bfloat16,
    **options: Any,
) -> Peer:
    """One whose name begins with its library's."""
    return Peer(
        name=name,
        description=description,
        module=MODULES[name.partition("-")[0]],
        kind=kind,
        weight_dtype=weight_dtype,
        bytes_per_parameter=bytes_per_parameter,
        options=options,
    )


def _torch(name: str, weight: torch.dtype, bytes_per_parameter: float, **options: Any) -> Peer:
    description = "fp32 weights" if weight is torch.float32 else "bf16 weights and moments"
    row = (f"torch-{name}", "AdamW", description, bytes_per_parameter)
    return _peer(*row, weight_dtype=weight, **options)


def _transformer_engine(
    name: str, description: str, bytes_per_parameter: float, **options: Any
) -> Peer:
    row = (f"transformerengine-{name}", "FusedAdam", description, bytes_per_parameter)
    return replace(_peer(*row, **options), decoupled_grad=True)


def _in_bits(name: str, kind: str, of: str, bytes_per_parameter: float, **options: Any) -> Peer:
    """One of bf16 weights and moments in few bits."""
    return _peer(name, kind, f"bf16 weights, {of}", bytes_per_parameter, **options)


def describe_float8(scaling: str) -> str:
    """Return the formats of a case with fp8 weights, ours or a peer's."""
    return f"fp8 matrices ({scaling}), other weights bf16, fp32 masters"


def _float8(scaling: str, size: float, *, separate_cast: bool, suffix: str = "") -> Peer:
    peer = _transformer_engine(f"fp8-{scaling}{suffix}", describe_float8(scaling), size)
    return replace(peer, scaling=scaling, separate_cast=separate_cast)


def _all() -> Iterator[Peer]:
    masters: dict[str, Any] = {"master_weights": True}
    formats = "bf16 weights, fp32 masters"
    yield _transformer_engine("bf16", formats, 28, **masters)
    row: tuple[Any, ...] = ("bf16-remainders", "bf16 weights, int16 remainders", 26)
    yield _transformer_engine(*row, store_param_remainders=True, **masters)
    for name, dtype, words, size in (
        ("bf16", torch.bfloat16, "bf16 weights and moments, fp32 masters", 20),
        ("fp16", torch.float16, f"{formats}, fp16 moments", 20),
        ("fp8", torch.uint8, f"{formats}, fp8 moments", 16),
    ):
        moments: dict[str, Any] = {"exp_avg_dtype": dtype, "exp_avg_sq_dtype": dtype}
        yield _transformer_engine(f"{name}-moments", words, size, **masters, **moments)
    yield _float8("delayed", 27, separate_cast=False)
    yield _float8("delayed", 27, separate_cast=True, suffix="-cast")
    yield _float8("current", 31, separate_cast=True)
    yield _float8("block_128x128", 27, separate_cast=True)
    yield _torch("fused-fp32", torch.float32, 28, fused=True)
    yield _torch("foreach-fp32", torch.float32, 28, foreach=True)
    yield _peer("apex-fp32", "FusedAdam", "fp32 weights", 28, weight_dtype=torch.float32)
    yield _torch("fused-bf16", torch.bfloat16, 14, fused=True)
    yield _torch("foreach-bf16", torch.bfloat16, 14, foreach=True)
    # unquantized, its moments are stored in the weights' dtype
    formats = "bf16 weights and moments, 16 more bits a weight"
    row = ("flashoptim-32bit-master", "FlashAdamW", formats, 18)
    yield _peer(*row, quantize=False, master_weight_bits=32)
    flash, bits = "FlashAdamW", "8-bit moments"
    yield _in_bits("flashoptim-8bit", flash, f"8 more bits a weight, {bits}", 12)
    row = ("flashoptim-8bit-32bit-master", flash, f"16 more bits a weight, {bits}", 14)
    yield _in_bits(*row, master_weight_bits=32)
    alone: dict[str, Any] = {"master_weight_bits": None}
    yield _in_bits("flashoptim-8bit-no-master", flash, bits, 10, **alone)
    lion, sgd = "Lion with 8-bit momentum", "SGD with 8-bit momentum"
    yield _in_bits("flashoptim-lion-8bit", "FlashLion", lion, 8, **alone)
    yield _in_bits("flashoptim-sgd-8bit", "FlashSGD", sgd, 8, **alone, momentum=0.9)
    rounded = {"bf16_stochastic_round": True}
    yield _in_bits("torchao-8bit", "AdamW8bit", bits, 10, **rounded)
    yield _in_bits("bitsandbytes-8bit", "AdamW8bit", bits, 10)
    yield _in_bits("torchao-fp8", "AdamWFp8", bits, 10, **rounded)
    yield _in_bits("bitsandbytes-lion-8bit", "Lion8bit", lion, 8)
    yield _in_bits("bitsandbytes-sgd-8bit", "SGD8bit", sgd, 8, momentum=0.9)
    yield _in_bits("torchao-4bit", "AdamW4bit", "4-bit moments", 8, **rounded)


PEERS = {peer.name: peer for peer in _all()}


# --- TransformerEngine's Adam on its own fp8 weights, called as its modules and Megatron call it


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
