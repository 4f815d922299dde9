"""What is measured: the formats and contracts of a step of ours, and the cases of a run."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch.nn import Parameter

from megaopt import FusedAdam
from megaopt.bench.peers import PEERS, SHARED, Peer
from megaopt.bench.sets import SETS, TensorSet
from megaopt.kernels.contracts import CONTRACTS

__all__ = ["MODES", "Case", "Mode", "select"]


@dataclass(frozen=True, kw_only=True)
class Mode:
    """The formats of weight, gradient and state, and the contract."""

    name: str
    description: str
    weight_dtype: torch.dtype
    """Of weights and of gradients."""
    options: Mapping[str, Any]
    """What FusedAdam is given besides what every optimizer is given."""
    bytes_per_parameter: float
    """What a step must move: each input read once, each output written once."""
    contract: str = "ieee"
    twin: str | None = None
    """The peer whose bits the contract promises, by its name in PEERS."""
    against: tuple[str, ...] = ()
    """The peers that do the same work, by their names in PEERS."""

    def optimizer(self, parameters: Sequence[Parameter], **more: Any) -> FusedAdam:
        """Make the optimizer; `more` goes to its constructor."""
        return FusedAdam(list(parameters), contract=self.contract, **SHARED, **self.options, **more)


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

    Args:
        sets: Names of SETS; none means all.
        only: Names of modes and peers; none means all. A mode brings the peers it is against.
        peers: Those that may be measured.

    Raises:
        ValueError: A name is none of SETS, or none of MODES and PEERS.
    """
    for parameter, names, table in (("sets", sets, SETS), ("only", only, {**MODES, **PEERS})):
        if unknown := [name for name in names if name not in table]:
            allowed = ", ".join(table)
            raise ValueError(f"{parameter}={unknown}: unknown; allowed are {allowed}")
    modes = [mode for mode in MODES.values() if mode.name in (only or MODES)]
    wanted = {*only, *(name for mode in modes for name in mode.against)}
    chosen = [peer for peer in peers if not only or peer.name in wanted]
    return [
        Case(tensor_set, subject)
        for tensor_set in SETS.values()
        if tensor_set.name in (sets or SETS)
        for subject in _in_order(modes, chosen)
    ]


def _in_order(modes: Sequence[Mode], peers: Sequence[Peer]) -> Iterator[Mode | Peer]:
    last = {name: mode.name for mode in modes for name in mode.against}
    for mode in modes:
        yield mode
        yield from (peer for peer in peers if last.get(peer.name) == mode.name)
    yield from (peer for peer in peers if peer.name not in last)
