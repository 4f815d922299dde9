"""What is measured: the formats and contracts of a step of ours, and the cases of a run."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

import megaopt
from megaopt.commands.bench.peers import PEERS, SHARED, Peer, describe_float8
from megaopt.commands.bench.sets import HOST, SETS, TensorSet
from megaopt.float8 import RECIPES, Float8Recipe, Float8Weight
from megaopt.kernels.contracts import CONTRACTS
from megaopt.optimizer import FusedOptimizer

__all__ = ["MODES", "Case", "Mode", "select"]


@dataclass(frozen=True, kw_only=True)
class Mode:
    """The formats of weight, gradient and state, and the contract."""

    name: str
    description: str
    weight_dtype: torch.dtype
    """Of weights and of gradients."""
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


@dataclass(frozen=True)
class Case:
    """One measurement: a set of tensors, and the optimizer that steps them."""

    tensors: TensorSet
    subject: Mode | Peer

    @property
    def name(self) -> str:
        """The name in tables and records, "A/bf16"."""
        return f"{self.tensors.name}/{self.subject.name}"


_MASTER = {"dtype": torch.float32}
_REMAINDERS = {"dtype": torch.float32, "store_param_remainders": True}
_BF16_MOMENTS = {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16}
_STOCHASTIC = {
    "master_weights": False,
    "weight_rounding": "stochastic",
    "exp_avg_dtype": "bfloat16_stochastic",
    "exp_avg_sq_dtype": "bfloat16_stochastic",
}
_FP16_MOMENTS = {"exp_avg_dtype": torch.float16, "exp_avg_sq_dtype": torch.float16}
_FP8_MOMENTS = {"exp_avg_dtype": torch.float8_e4m3fn, "exp_avg_sq_dtype": torch.float8_e4m3fn}


def _modes(
    name: str,
    description: str,
    bytes_per_parameter: float,
    options: Mapping[str, Any],
    *,
    against: tuple[str, ...],
    twins: Mapping[str, str] = MappingProxyType({}),
    weight: torch.dtype = torch.bfloat16,
    recipe: Float8Recipe | None = None,
    kind: str = "FusedAdam",
) -> Iterator[Mode]:
    """Give the mode under ieee, and under each contract in `twins`, where that contract exists."""
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
        _float8("block_1x128", 27),
        _float8("mxfp8", 27),
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


def select(
    sets: tuple[str, ...] = (), only: tuple[str, ...] = (), peers: Sequence[Peer] = ()
) -> list[Case]:
    """Return the cases of a run, set by set, a peer behind the modes that it is compared with.

    fp8 weights are measured on sets whose tensors have shapes.

    Args:
        sets: Names of SETS, and HOST, which has no cases; none means all.
        only: Names of modes and peers; none means all. A mode brings the peers it is against.
        peers: Those that may be measured.

    Raises:
        ValueError: A name is none of SETS, or none of MODES and PEERS; or all names are of fp8
            weights, and no set has shapes.
    """
    for parameter, names, table in (
        ("sets", sets, (*SETS, HOST)),
        ("only", only, (*MODES, *PEERS)),
    ):
        if unknown := [name for name in names if name not in table]:
            allowed = ", ".join(table)
            raise ValueError(f"{parameter}={unknown}: unknown; allowed are {allowed}")
    modes = [mode for mode in MODES.values() if mode.name in (only or MODES)]
    wanted = {*only, *(name for mode in modes for name in mode.against)}
    chosen = [peer for peer in peers if not only or peer.name in wanted]
    cases = [
        Case(tensor_set, subject)
        for tensor_set in SETS.values()
        if tensor_set.name in (sets or SETS)
        for subject in _in_order(modes, chosen)
        if subject.weight is None or tensor_set.shapes
    ]
    if not cases and only and modes + chosen and {*sets} != {HOST}:
        allowed = ", ".join(tensor_set.name for tensor_set in SETS.values() if tensor_set.shapes)
        raise ValueError(f"sets={[*sets]}: no matrices for fp8 weights; allowed are {allowed}")
    return cases


def _in_order(modes: Sequence[Mode], peers: Sequence[Peer]) -> Iterator[Mode | Peer]:
    last = {name: mode.name for mode in modes for name in mode.against}
    for mode in modes:
        yield mode
        yield from (peer for peer in peers if last.get(peer.name) == mode.name)
    yield from (peer for peer in peers if peer.name not in last)
