"""What is measured: sets of tensors, and the formats in which a step keeps them."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

__all__ = ["MODES", "SETS", "Case", "Mode", "TensorSet", "select"]


@dataclass(frozen=True, kw_only=True)
class TensorSet:
    """The tensors of a model, by their numbers of elements."""

    name: str
    description: str
    sizes: tuple[int, ...]

    def shrunk(self, elements: int, tensors: int = 64) -> tuple[int, ...]:
        """Return sizes in the proportions of this set, for a check in place of a measurement.

        Args:
            elements: At most about so many elements in all; every tensor keeps at least one.
            tensors: At most how many tensors, taken evenly from the set.
        """
        chosen = self.sizes[:: -(-len(self.sizes) // tensors)]
        total = sum(chosen)
        return tuple(min(size, max(1, size * elements // total)) for size in chosen)


@dataclass(frozen=True, kw_only=True)
class Mode:
    """The formats of weight, gradient and state."""

    name: str
    description: str
    weight_dtype: torch.dtype
    """Of weights and of gradients."""
    options: Mapping[str, Any]
    """What FusedAdam is given besides the parameters."""
    bytes_per_parameter: int
    """What a step must move: each input read once, each output written once."""


@dataclass(frozen=True)
class Case:
    """One measurement: a set of tensors in one mode."""

    tensors: TensorSet
    mode: Mode

    @property
    def name(self) -> str:
        """The name in tables and records, "A/bf16"."""
        return f"{self.tensors.name}/{self.mode.name}"


def _llama_8b() -> tuple[int, ...]:
    """Return the numbers of elements of Llama-3.1-8B's 291 tensors, in the model's order."""
    hidden, key_value, feed_forward, vocabulary, layers = 4096, 1024, 14336, 128256, 32
    attention = [hidden * hidden, hidden * key_value, hidden * key_value, hidden * hidden]
    layer = [*attention, *[hidden * feed_forward] * 3, hidden, hidden]
    return (vocabulary * hidden, *layer * layers, hidden, vocabulary * hidden)


SETS = {
    tensor_set.name: tensor_set
    for tensor_set in (
        TensorSet(name="A", description="one tensor of 2**28 elements", sizes=(2**28,)),
        TensorSet(
            name="B",
            description="Llama-3.1-8B's 291 tensors, an eighth of each",
            sizes=tuple(size // 8 for size in _llama_8b()),
        ),
        TensorSet(name="C", description="4,000 tensors of 1,024 elements", sizes=(1024,) * 4000),
    )
}

_MASTER = {"dtype": torch.float32}
_REMAINDERS = {"dtype": torch.float32, "store_param_remainders": True}
_BF16_MOMENTS = {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16}


def _mode(
    name: str, description: str, weight: torch.dtype, bytes_per_parameter: int, **options: Any
) -> Mode:
    # a decay, so that a step does all that it does in a training run
    return Mode(
        name=name,
        description=description,
        weight_dtype=weight,
        options=MappingProxyType({"lr": 1e-3, "weight_decay": 0.1, **options}),
        bytes_per_parameter=bytes_per_parameter,
    )


MODES = {
    mode.name: mode
    for mode in (
        _mode("bf16", "bf16 weights, fp32 masters", torch.bfloat16, 28, **_MASTER),
        _mode(
            "bf16-remainders", "bf16 weights, int16 remainders", torch.bfloat16, 26, **_REMAINDERS
        ),
        _mode(
            "bf16-moments",
            "bf16 weights and moments, fp32 masters",
            torch.bfloat16,
            20,
            **_MASTER,
            **_BF16_MOMENTS,
        ),
        _mode(
            "bf16-remainders-moments",
            "bf16 weights and moments, int16 remainders",
            torch.bfloat16,
            18,
            **_REMAINDERS,
            **_BF16_MOMENTS,
        ),
        _mode("fp32", "fp32 weights", torch.float32, 28),
    )
}


def select(sets: tuple[str, ...] = (), only: tuple[str, ...] = ()) -> list[Case]:
    """Return the cases of the named sets and modes, set by set; no name means all of them.

    Raises:
        ValueError: A name is none of SETS, or none of MODES.
    """
    for parameter, names, table in (("sets", sets, SETS), ("only", only, MODES)):
        if unknown := [name for name in names if name not in table]:
            allowed = ", ".join(table)
            raise ValueError(f"{parameter}={unknown}: unknown; allowed are {allowed}")
    return [
        Case(SETS[tensor_set], MODES[mode])
        for tensor_set in SETS
        for mode in MODES
        if tensor_set in (sets or SETS) and mode in (only or MODES)
    ]
