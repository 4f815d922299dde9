"""Other libraries' optimizers, measured beside ours; each is imported only when it is used."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from megaopt.commands.bench.float8_peers import AdamThenCast, FusedFloat8Adam, float8_parameter

__all__ = ["PEERS", "SHARED", "Peer", "describe_float8"]

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
        found = getattr(importlib.import_module(self.package), "__version__", None)
        try:
            return str(found or version(self.package))
        except PackageNotFoundError:
            return "unknown"

    def optimizer(self, parameters: Sequence[Parameter], **more: Any) -> Any:
        """Make the optimizer, or what has its step and state; `more` goes to its constructor."""
        kind: Any = AdamThenCast if self.separate_cast else FusedFloat8Adam
        if self.scaling is None:
            kind = getattr(importlib.import_module(self.module), self.kind)
        return kind(list(parameters), **SHARED, **self.options, **more)


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


def _flashoptim(
    name: str,
    description: str,
    bytes_per_parameter: float,
    kind: str = "FlashAdamW",
    **options: Any,
) -> Peer:
    return _peer(
        f"flashoptim-{name}", kind, f"bf16 weights{description}", bytes_per_parameter, **options
    )


def describe_float8(scaling: str) -> str:
    """Return the formats of a case with fp8 weights, ours or a peer's."""
    return f"fp8 matrices ({scaling}), other weights bf16, fp32 masters"


def _float8(
    scaling: str, bytes_per_parameter: float, *, separate_cast: bool, suffix: str = ""
) -> Peer:
    name, description = f"fp8-{scaling}{suffix}", describe_float8(scaling)
    peer = _transformer_engine(name, description, bytes_per_parameter)
    return replace(peer, scaling=scaling, separate_cast=separate_cast)


def _moments(dtype: torch.dtype) -> dict[str, torch.dtype]:
    return {"exp_avg_dtype": dtype, "exp_avg_sq_dtype": dtype}


MASTERS: Mapping[str, Any] = {"master_weights": True}
ROUNDED: Mapping[str, Any] = {"bf16_stochastic_round": True}

PEERS = {
    peer.name: peer
    for peer in (
        _transformer_engine("bf16", "bf16 weights, fp32 masters", 28, **MASTERS),
        _transformer_engine(
            "bf16-remainders",
            "bf16 weights, int16 remainders",
            26,
            store_param_remainders=True,
            **MASTERS,
        ),
        _transformer_engine(
            "bf16-moments",
            "bf16 weights and moments, fp32 masters",
            20,
            **MASTERS,
            **_moments(torch.bfloat16),
        ),
        _transformer_engine(
            "fp16-moments",
            "bf16 weights, fp32 masters, fp16 moments",
            20,
            **MASTERS,
            **_moments(torch.float16),
        ),
        _transformer_engine(
            "fp8-moments",
            "bf16 weights, fp32 masters, fp8 moments",
            16,
            **MASTERS,
            **_moments(torch.uint8),
        ),
        _float8("delayed", 27, separate_cast=False),
        _float8("delayed", 27, separate_cast=True, suffix="-cast"),
        _float8("current", 31, separate_cast=True),
        _float8("block_128x128", 27, separate_cast=True),
        _torch("fused-fp32", torch.float32, 28, fused=True),
        _torch("foreach-fp32", torch.float32, 28, foreach=True),
        _peer("apex-fp32", "FusedAdam", "fp32 weights", 28, weight_dtype=torch.float32),
        _torch("fused-bf16", torch.bfloat16, 14, fused=True),
        _torch("foreach-bf16", torch.bfloat16, 14, foreach=True),
        # unquantized, its moments are stored in the weights' dtype
        _peer(
            "flashoptim-32bit-master",
            "FlashAdamW",
            "bf16 weights and moments, 16 more bits a weight",
            18,
            quantize=False,
            master_weight_bits=32,
        ),
        _flashoptim("8bit", ", 8 more bits a weight, 8-bit moments", 12),
        _flashoptim(
            "8bit-32bit-master",
            ", 16 more bits a weight, 8-bit moments",
            14,
            master_weight_bits=32,
        ),
        _flashoptim("8bit-no-master", ", 8-bit moments", 10, master_weight_bits=None),
        _flashoptim(
            "lion-8bit",
            ", Lion with 8-bit momentum",
            8,
            "FlashLion",
            master_weight_bits=None,
        ),
        _flashoptim(
            "sgd-8bit",
            ", SGD with 8-bit momentum",
            8,
            "FlashSGD",
            master_weight_bits=None,
            momentum=0.9,
        ),
        _peer("torchao-8bit", "AdamW8bit", "bf16 weights, 8-bit moments", 10, **ROUNDED),
        _peer("bitsandbytes-8bit", "AdamW8bit", "bf16 weights, 8-bit moments", 10),
        _peer("torchao-fp8", "AdamWFp8", "bf16 weights, 8-bit moments", 10, **ROUNDED),
        _peer("bitsandbytes-lion-8bit", "Lion8bit", "bf16 weights, Lion with 8-bit momentum", 8),
        _peer(
            "bitsandbytes-sgd-8bit",
            "SGD8bit",
            "bf16 weights, SGD with 8-bit momentum",
            8,
            momentum=0.9,
        ),
        _peer("torchao-4bit", "AdamW4bit", "bf16 weights, 4-bit moments", 8, **ROUNDED),
    )
}
