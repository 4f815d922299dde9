"""Other libraries' optimizers, measured beside ours; each is imported only when it is used."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from megaopt.commands.bench.float8_peers import AdamThenCast, FusedFloat8Adam, float8_parameter

__all__ = ["PEERS", "SHARED", "Float8Peer", "Peer", "describe_float8"]

SHARED: Mapping[str, Any] = MappingProxyType({"lr": 1e-3, "weight_decay": 0.1})
"""What every optimizer is given; a decay, so that a step does all that it does in training."""


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
    """Of weights and of gradients."""
    bytes_per_parameter: float
    """What a step must move in a large tensor, scales of blocks left out."""
    options: Mapping[str, Any]
    decoupled_grad: bool = False
    """Whether it can read `p.decoupled_grad`, of another dtype than the weight."""

    @property
    def weight(self) -> Callable[[Tensor], Parameter] | None:
        """What makes an fp8 weight of a matrix; None where weights are of weight_dtype."""
        return None

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

    def optimizer(self, parameters: Sequence[Parameter], **more: Any) -> torch.optim.Optimizer:
        """Make the optimizer; `more` goes to its constructor."""
        kind = getattr(importlib.import_module(self.module), self.kind)
        made: torch.optim.Optimizer = kind(list(parameters), **SHARED, **self.options, **more)
        return made


@dataclass(frozen=True, kw_only=True)
class Float8Peer(Peer):
    """An optimizer of TransformerEngine that writes its fp8 weights."""

    scaling: str
    """By its name in megaopt.float8.RECIPES."""
    separate_cast: bool
    """Whether the optimizer updates masters and another call casts them."""

    @property
    def weight(self) -> Callable[[Tensor], Parameter]:
        """What makes an fp8 weight of a matrix."""
        return partial(float8_parameter, scaling=self.scaling)

    def optimizer(self, parameters: Sequence[Parameter], **more: Any) -> Any:
        """Make what has the step and the state of an optimizer; `more` goes to FusedAdam."""
        kind = AdamThenCast if self.separate_cast else FusedFloat8Adam
        return kind(parameters, **SHARED, **self.options, **more)


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


def _torch(name: str, weight: torch.dtype, bytes_per_parameter: float, **options: Any) -> Peer:
    return Peer(
        name=f"torch-{name}",
        description="fp32 weights" if weight is torch.float32 else "bf16 weights and moments",
        module="torch.optim",
        kind="AdamW",
        weight_dtype=weight,
        bytes_per_parameter=bytes_per_parameter,
        options=options,
    )


def _transformer_engine(
    name: str, description: str, bytes_per_parameter: float, **options: Any
) -> Peer:
    return Peer(
        name=f"transformerengine-{name}",
        description=description,
        module="transformer_engine.pytorch.optimizers",
        kind="FusedAdam",
        weight_dtype=torch.bfloat16,
        bytes_per_parameter=bytes_per_parameter,
        options={"master_weights": True, **options},
        decoupled_grad=True,
    )


def describe_float8(scaling: str) -> str:
    """Return the formats of a case with fp8 weights, ours or a peer's."""
    return f"fp8 matrices ({scaling}), other weights bf16, fp32 masters"


def _float8(
    scaling: str, bytes_per_parameter: float, *, separate_cast: bool, suffix: str = ""
) -> Float8Peer:
    return Float8Peer(
        name=f"transformerengine-fp8-{scaling}{suffix}",
        description=describe_float8(scaling),
        module="transformer_engine.pytorch.optimizers",
        kind="FusedAdam",
        weight_dtype=torch.bfloat16,
        bytes_per_parameter=bytes_per_parameter,
        options={},
        decoupled_grad=True,
        scaling=scaling,
        separate_cast=separate_cast,
    )


def _apex() -> Peer:
    return Peer(
        name="apex-fp32",
        description="fp32 weights",
        module="apex.optimizers",
        kind="FusedAdam",
        weight_dtype=torch.float32,
        bytes_per_parameter=28,
        options={},
    )


def _flashoptim(name: str, description: str, bytes_per_parameter: float, **options: Any) -> Peer:
    return Peer(
        name=f"flashoptim-{name}",
        description=description,
        module="flashoptim",
        kind="FlashAdamW",
        weight_dtype=torch.bfloat16,
        bytes_per_parameter=bytes_per_parameter,
        options=options,
    )


def _torchao(name: str, kind: str, bytes_per_parameter: float) -> Peer:
    return Peer(
        name=f"torchao-{name}",
        description=f"bf16 weights, {name} moments",
        module="torchao.optim",
        kind=kind,
        weight_dtype=torch.bfloat16,
        bytes_per_parameter=bytes_per_parameter,
        options={"bf16_stochastic_round": True},
    )


def _bitsandbytes() -> Peer:
    return Peer(
        name="bitsandbytes-8bit",
        description="bf16 weights, 8bit moments",
        module="bitsandbytes.optim",
        kind="AdamW8bit",
        weight_dtype=torch.bfloat16,
        bytes_per_parameter=10,
        options={},
    )


def _moments(dtype: torch.dtype) -> dict[str, torch.dtype]:
    return {"exp_avg_dtype": dtype, "exp_avg_sq_dtype": dtype}


PEERS = {
    peer.name: peer
    for peer in (
        _transformer_engine("bf16", "bf16 weights, fp32 masters", 28),
        _transformer_engine(
            "bf16-remainders", "bf16 weights, int16 remainders", 26, store_param_remainders=True
        ),
        _transformer_engine(
            "bf16-moments", "bf16 weights and moments, fp32 masters", 20, **_moments(torch.bfloat16)
        ),
        _transformer_engine(
            "fp16-moments",
            "bf16 weights, fp32 masters, fp16 moments",
            20,
            **_moments(torch.float16),
        ),
        _transformer_engine(
            "fp8-moments", "bf16 weights, fp32 masters, fp8 moments", 16, **_moments(torch.uint8)
        ),
        _float8("delayed", 27, separate_cast=False),
        _float8("delayed", 27, separate_cast=True, suffix="-cast"),
        _float8("current", 31, separate_cast=True),
        _float8("block_128x128", 27, separate_cast=True),
        _torch("fused-fp32", torch.float32, 28, fused=True),
        _torch("foreach-fp32", torch.float32, 28, foreach=True),
        _apex(),
        _torch("fused-bf16", torch.bfloat16, 14, fused=True),
        _torch("foreach-bf16", torch.bfloat16, 14, foreach=True),
        # unquantized, its moments are stored in the weights' dtype
        _flashoptim(
            "32bit-master",
            "bf16 weights and moments, 16 more bits a weight",
            18,
            quantize=False,
            master_weight_bits=32,
        ),
        _flashoptim("8bit", "bf16 weights, 8 more bits a weight, 8bit moments", 12),
        _torchao("8bit", "AdamW8bit", 10),
        _bitsandbytes(),
        _torchao("fp8", "AdamWFp8", 10),
        _torchao("4bit", "AdamW4bit", 8),
    )
}
