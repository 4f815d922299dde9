"""Digests of what a step starts from: its batches and the state of random generators."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy
import torch

from megaopt.kernels.place import Place
from megaopt.params.dtensor import local_of
from megaopt.recording.files import LANES
from megaopt.recording.standin import of_places

MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
"""The multipliers of the splitmix64 generator."""


def random_states(devices: set[torch.device]) -> dict[str, str]:
    """A digest of the state of each generator: Python's, numpy's, torch's, and each device's."""
    version, words, gauss = random.getstate()
    legacy: Any = numpy.random.get_state(legacy=False)
    key, rest = legacy["state"]["key"], (legacy["state"]["pos"], legacy["gauss"])
    found = {
        "python": _hash(numpy.array(words, "u4").tobytes(), (version, gauss)),
        "numpy": _hash(key.tobytes(), rest),
        "torch": _hash(torch.get_rng_state().numpy().tobytes()),
    }
    for device in sorted(devices, key=str):
        if device.type == "cuda":
            found[str(device)] = _hash(torch.cuda.get_rng_state(device).numpy().tobytes())
    return found


def _hash(data: bytes, more: object = None) -> str:
    return hashlib.blake2b(data + repr(more).encode(), digest_size=16).hexdigest()


def leaves(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in arguments or results, in order."""
    if isinstance(value, torch.Tensor):
        yield local_of(value)
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from leaves(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from leaves(each)
    elif hasattr(value, "__dataclass_fields__"):
        yield from leaves(vars(value))


def batch_digest(value: Any) -> torch.Tensor:
    """The digest of a batch, which adds over its samples in any order: int64 (2,).

    Tensors of as many rows as the first has are cut into samples; others belong to all of them.
    """
    tensors = [each for each in leaves(value) if each.numel() and not each.is_sparse]
    if not tensors:
        return torch.zeros(2, dtype=torch.int64)
    rows = tensors[0].shape[0] if tensors[0].dim() else 1
    total: Any = 0
    for number, tensor in enumerate(tensors):
        is_cut = tensor.dim() and tensor.shape[0] == rows
        parts = tensor.detach().unbind() if is_cut else (tensor.detach(),)
        found = of_places(parts, [Place(0)] * len(parts))[:, :2].to(tensors[0].device)
        total = total + _mixed(found + number)  # so that tensors may not be exchanged
    return _mixed(total).expand(rows, 2).sum(0)


def _mixed(lanes: torch.Tensor) -> torch.Tensor:
    """Each number through splitmix64, so that parts of samples may not be exchanged."""
    for shift, multiplier in zip((30, 27), MIX, strict=True):
        lanes = (lanes ^ _shifted(lanes, shift)) * (multiplier - LANES)
    return lanes ^ _shifted(lanes, 31)


def _shifted(lanes: torch.Tensor, bits: int) -> torch.Tensor:
    """Shifted right with zeros: torch's own shift of an int64 repeats the sign."""
    return (lanes >> bits) & ((1 << (64 - bits)) - 1)


def in_digits(lanes: torch.Tensor) -> str:
    """A digest on the host as 32 digits."""
    low, high = (int(each) % LANES for each in lanes)
    return f"{high:016x}{low:016x}"
