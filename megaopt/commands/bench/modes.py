"""What is measured of ours: the formats and contracts of a step."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

import megaopt
from megaopt.commands.bench.peers import SHARED, describe_float8
from megaopt.float8 import RECIPES, Float8Recipe, Float8Weight
from megaopt.kernels.contracts import CONTRACTS
from megaopt.optimizer import FusedOptimizer

__all__ = ["MODES", "Mode"]


@dataclass(frozen=True, kw_only=True)
class Mode:
    """The formats of weight, gradient and state, and the contract."""

    name: str
    description: str
    weight_dtype: torch.dtype
    """The dtype of weights and of gradients."""
    options: Mapping[str, Any]
    """What the optimizer is given besides what every optimizer is given."""
    bytes_per_parameter: float
    """What a step must move: each input read once, each output written once; the master twice
    where fp8 codes wait for the whole tensor's amax. Scales of blocks are left out."""
    contract: str = "ieee"
    twin: str | None = None
    """The peer whose bits the contract promises, by its name in PEERS."""
    against: tuple[str, ...] = ()
    """The peers that do the same work, by their names in PEERS."""
    recipe: Float8Recipe | None = None
    """How matrices are kept in fp8; None: all weights are of weight_dtype."""
    kind: str = "FusedAdam"
    """megaopt's optimizer; FusedAdam alone has contracts."""

    @property
    def weight(self) -> Callable[[Tensor], Parameter] | None:
        """What makes an fp8 weight of a matrix; None where weights are of weight_dtype."""
        return None if self.recipe is None else self._float8_weight

    def _float8_weight(self, values: Tensor) -> Parameter:
        assert self.recipe is not None
        return Parameter(Float8Weight.from_values(values, self.recipe))

    def optimizer(self, parameters: Sequence[Parameter], **more: Any) -> FusedOptimizer:
        """Make the optimizer; `more` goes to its constructor."""
        own: Any = getattr(megaopt, self.kind)
        contract = {"contract": self.contract} if self.kind == "FusedAdam" else {}
        made: FusedOptimizer = own(list(parameters), **contract, **SHARED, **self.options, **more)
        return made


_MASTER = {"dtype": torch.float32}
_REMAINDERS = {"dtype": torch.float32, "store_param_remainders": True}
_BF16_MOMENTS = {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16}
_NO_MASTER = {"master_weights": False, "weight_rounding": "stochastic"}
_STOCHASTIC = {
    **_NO_MASTER,
    "exp_avg_dtype": "bfloat16_stochastic",
    "exp_avg_sq_dtype": "bfloat16_stochastic",
}
_REMAINDER8 = {"master_weights": True, "master_weight_dtype": "remainder8_stochastic"}
_FP16_MOMENTS = {"exp_avg_dtype": torch.float16, "exp_avg_sq_dtype": torch.float16}
_FP8_MOMENTS = {"exp_avg_dtype": torch.float8_e4m3fn, "exp_avg_sq_dtype": torch.float8_e4m3fn}
_BLOCKS = {"exp_avg_dtype": "block_e4m3", "exp_avg_sq_dtype": "block_e5m3"}
_NEAREST_BLOCKS = {
    "exp_avg_dtype": "block_e4m3_nearest",
    "exp_avg_sq_dtype": "block_e5m3_nearest",
}
_BLOCKS_OF_4_BITS = {"exp_avg_dtype": "block32_e3m0", "exp_avg_sq_dtype": "block32_e4m0"}
_OF_10_BYTES = (
    "flashoptim-8bit-no-master",
    "torchao-8bit",
    "torchao-fp8",
    "bitsandbytes-8bit",
)


def _modes(
    name: str,
    description: str,
    bytes_per_parameter: float,
    options: Mapping[str, Any],
    *,
    against: tuple[str, ...],
    twins: Mapping[str, str | None] = MappingProxyType({}),
    weight: torch.dtype = torch.bfloat16,
    recipe: Float8Recipe | None = None,
    kind: str = "FusedAdam",
) -> Iterator[Mode]:
    """Give the mode under ieee, and under each contract in `twins`, where that contract exists.

    A twin is None where no peer keeps these formats.
    """
    for contract, twin in {"ieee": None, **twins}.items():
        if contract in CONTRACTS:
            yield Mode(
                name=name if contract == "ieee" else f"{contract}:{name}",
                description=description,
                weight_dtype=weight,
                options=MappingProxyType(dict(options)),
                bytes_per_parameter=bytes_per_parameter,
                contract=contract,
                twin=twin,
                against=against,
                recipe=recipe,
                kind=kind,
            )


def _beside_weights(name: str, description: str, bytes_per_parameter: float) -> Iterator[Mode]:
    """Give the mode of fp32 moments and a master that lies beside its bf16 weight."""
    options = {"master_weights": True, "master_weight_dtype": name}
    return _modes(name, f"bf16 weights, {description}", bytes_per_parameter, options, against=())


def _in_blocks(
    name: str,
    description: str,
    bytes_per_parameter: float,
    options: Mapping[str, Any],
    *peers: str,
    te: bool = False,
    kind: str = "FusedAdam",
) -> Iterator[Mode]:
    """Give the mode of bf16 weights and moments in blocks; with te, under that contract too."""
    return _modes(
        name,
        f"bf16 weights{description}",
        bytes_per_parameter,
        options,
        against=peers,
        twins={"te": None} if te else {},
        kind=kind,
    )


def _float8(name: str, bytes_per_parameter: float, *peers: str) -> Iterator[Mode]:
    """Give the mode of a recipe; its bits under te are those of the first peer.

    With delayed scaling these are of a fused step, which casts fp32 values directly.
    """
    recipe = RECIPES[name]
    modes = _modes(
        f"fp8-{name}",
        describe_float8(name),
        bytes_per_parameter,
        _MASTER,
        against=peers,
        twins={"te": peers[0]} if peers else {},
        recipe=recipe,
    )
    for mode in modes:
        direct = recipe.quantizer.keeps_scale and mode.contract == "te"
        yield replace(mode, recipe=replace(recipe, direct=direct))


def _float8_alone(name: str) -> Iterator[Mode]:
    """Give the modes of a recipe without fp32 masters, moments in 8 bits beside the codes."""
    kept = {
        "stochastic": ("stochastic", 8, _NO_MASTER),
        "remainder8": ("8 more bits beside each", 10, _REMAINDER8),
    }
    for key, (words, size, options) in kept.items():
        yield from _modes(
            f"fp8-{name}-{key}-8bit",
            f"{describe_float8(name).split(',')[0]}, {words}, no fp32 masters, 8-bit moments",
            size,
            {**options, **_BLOCKS},
            against=(),
            recipe=RECIPES[name],
        )


def _as_transformer_engine(
    name: str, description: str, bytes_per_parameter: float, options: Mapping[str, Any]
) -> Iterator[Mode]:
    peer = f"transformerengine-{name}"
    twins = {"te": peer}
    return _modes(name, description, bytes_per_parameter, options, against=(peer,), twins=twins)


MODES = {
    mode.name: mode
    for modes in (
        _as_transformer_engine("bf16", "bf16 weights, fp32 masters", 28, _MASTER),
        _as_transformer_engine(
            "bf16-remainders", "bf16 weights, int16 remainders", 26, _REMAINDERS
        ),
        _as_transformer_engine(
            "bf16-moments",
            "bf16 weights and moments, fp32 masters",
            20,
            {**_MASTER, **_BF16_MOMENTS},
        ),
        _modes(
            "bf16-remainders-moments",
            "bf16 weights and moments, int16 remainders",
            18,
            {**_REMAINDERS, **_BF16_MOMENTS},
            against=("flashoptim-32bit-master",),
        ),
        _as_transformer_engine(
            "fp16-moments",
            "bf16 weights, fp32 masters, fp16 moments",
            20,
            {**_MASTER, **_FP16_MOMENTS},
        ),
        _as_transformer_engine(
            "fp8-moments",
            "bf16 weights, fp32 masters, fp8 moments",
            16,
            {**_MASTER, **_FP8_MOMENTS},
        ),
        _float8(
            "delayed", 27, "transformerengine-fp8-delayed", "transformerengine-fp8-delayed-cast"
        ),
        _float8("current", 31, "transformerengine-fp8-current"),
        _float8("block_128x128", 27, "transformerengine-fp8-block_128x128"),
        _float8("mxfp8", 27),
        *map(_float8_alone, RECIPES),
        _modes(
            "stochastic",
            "bf16 weights without masters and bf16 moments, stochastic",
            14,
            _STOCHASTIC,
            against=(),
        ),
        _beside_weights("remainder8_stochastic", "24-bit masters, stochastic", 24),
        _beside_weights("kahan_stochastic", "Kahan compensation, stochastic", 26),
        _modes(
            "lion", "Lion, bf16 weights, fp32 masters", 20, _MASTER, against=(), kind="FusedLion"
        ),
        _modes(
            "sgd",
            "SGD with momentum, bf16 weights, fp32 masters",
            20,
            {**_MASTER, "momentum": 0.9},
            against=(),
            kind="FusedSGD",
        ),
        _in_blocks(
            "blocks", ", 8-bit moments", 10, {**_NO_MASTER, **_BLOCKS}, *_OF_10_BYTES, te=True
        ),
        _in_blocks(
            "blocks-nearest",
            ", 8-bit moments",
            10,
            {**_NO_MASTER, **_NEAREST_BLOCKS},
            *_OF_10_BYTES,
            te=True,
        ),
        _in_blocks(
            "remainder8_stochastic-blocks",
            ", 8 more bits a weight, 8-bit moments",
            12,
            {"master_weights": True, "master_weight_dtype": "remainder8_stochastic", **_BLOCKS},
            "flashoptim-8bit",
        ),
        _in_blocks(
            "bf16-remainders-blocks",
            ", 16 more bits a weight, 8-bit moments",
            14,
            {**_REMAINDERS, **_BLOCKS},
            "flashoptim-8bit-32bit-master",
        ),
        _in_blocks(
            "lion-blocks",
            ", Lion with 8-bit momentum",
            8,
            {**_NO_MASTER, "exp_avg_dtype": "block_e4m3"},
            "flashoptim-lion-8bit",
            "bitsandbytes-lion-8bit",
            kind="FusedLion",
        ),
        _in_blocks(
            "sgd-blocks",
            ", SGD with 8-bit momentum",
            8,
            {**_NO_MASTER, "momentum_buffer_dtype": "block_e4m3", "momentum": 0.9},
            "flashoptim-sgd-8bit",
            "bitsandbytes-sgd-8bit",
            kind="FusedSGD",
        ),
        _in_blocks(
            "blocks-4bit",
            ", 4-bit moments",
            8,
            {**_NO_MASTER, **_BLOCKS_OF_4_BITS},
            "torchao-4bit",
        ),
        _modes(
            "fp32",
            "fp32 weights",
            28,
            {},
            against=("torch-fused-fp32", "torch-foreach-fp32", "apex-fp32"),
            twins={"torch": "torch-fused-fp32"},
            weight=torch.float32,
        ),
    )
    for mode in modes
}
