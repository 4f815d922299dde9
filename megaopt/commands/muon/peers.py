"""What `megaopt muon bench` times: FusedMuon in its forms, and other libraries' Muon."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch.nn import Parameter

from megaopt.commands.bench.peers import SHARED
from megaopt.commands.bench.sets import TensorSet
from megaopt.muon import FusedMuon

OURS = "megaopt"
STEPS = 5
"""The steps of every iteration."""
NESTEROV = {"nesterov": True}


class Masters:
    """Another library's optimizer of fp32 masters, between copies of gradients and of weights.

    Trainers keep bf16 weights so, as no other Muon has masters.
    """

    def __init__(
        self, make: Callable[..., Any], options: dict[str, Any], parameters: Sequence[Parameter]
    ) -> None:
        self._parameters = list(parameters)
        self._masters = [Parameter(each.detach().float()) for each in parameters]
        for master in self._masters:
            master.grad = torch.empty_like(master)
        self._own = make(self._masters, **SHARED, **options)

    @property
    def state(self) -> dict[Parameter, dict[str, Any]]:
        """The library's state of each parameter, and its `master_param`."""
        pairs = zip(self._parameters, self._masters, strict=True)
        return {p: {**self._own.state[m], "master_param": m.detach()} for p, m in pairs}

    @torch.no_grad()
    def step(self) -> None:
        """One step of all: gradients to fp32, the library's step, weights from masters."""
        copy: Any = torch._foreach_copy_  # whose types know no lists of parameters
        copy([each.grad for each in self._masters], [each.grad for each in self._parameters])
        self._own.step()
        copy(self._parameters, self._masters)


class Subject(NamedTuple):
    """One optimizer in one of its forms."""

    title: str
    """In pictures, with the precision of products."""
    description: str
    module: str
    """What is imported; its top level names the library."""
    options: dict[str, Any]
    kind: str = "Muon"
    """The class in that module."""

    @property
    def package(self) -> str:
        """The name of the package that is imported."""
        return self.module.partition(".")[0]

    @property
    def is_there(self) -> bool:
        """Whether its package is installed; nothing is imported."""
        return find_spec(self.package) is not None

    def make(self, parameters: Sequence[Parameter]) -> Any:
        """An optimizer of bf16 parameters, or what has its step and state."""
        if self.package == OURS:
            own = {**SHARED, **self.options}
            return FusedMuon(parameters, dtype=torch.float32, **own)
        kind = getattr(importlib.import_module(self.module), self.kind)
        return Masters(kind, self.options, parameters)


_emerging = partial(Subject, module="emerging_optimizers.orthogonalized_optimizers.muon")
_dion = partial(Subject, module="dion")
EMERGING = {**NESTEROV, "coefficient_type": "simple"}
SUBJECTS = {
    "ours": Subject("FusedMuon, bf16", "bf16, standard form", OURS, {"method": "standard"}),
    "ours-fp16": Subject("FusedMuon, fp16", "fp16, form by shape", OURS, {"precision": "fp16"}),
    "torch": Subject("torch.optim.Muon, bf16", "bf16, one after another", "torch.optim", {}),
    "emerging": _emerging("Emerging-Optimizers, bf16", "bf16, fp32 between", options=EMERGING),
    "emerging-syrk": _emerging(
        "the same, syrk", "the same by syrk", options={**EMERGING, "use_syrk": True}
    ),
    "dion": _dion("dion, bf16", "bf16, stacked by shape", options=NESTEROV),
    "dion-triton": _dion(
        "the same, Triton", "the same by Triton", options={**NESTEROV, "use_triton": True}
    ),
    "gram-newton-schulz": Subject(
        "gram-newton-schulz, fp16", "fp16, Gram's form by quack", "gram_newton_schulz", NESTEROV
    ),
}
"""All have momentum 0.95, nesterov and STEPS steps; coefficients, which cost none, are others."""


def _llama(layers: int) -> list[tuple[int, int]]:
    attention = [(4096, 4096)] * 2 + [(1024, 4096)] * 2
    return (attention + [(14336, 4096)] * 2 + [(4096, 14336)]) * layers


_gpt = [(2304, 768), (768, 768), (3072, 768), (768, 3072)] * 12
_experts = ([(1408, 2048)] * 2 + [(2048, 1408)]) * 64
SETS = {
    "L": TensorSet.of_shapes("L", "4 layers of Llama-3-8B", _llama(4)),
    "G": TensorSet.of_shapes("G", "GPT of 124M", _gpt),
    "E": TensorSet.of_shapes("E", "64 experts of 1408 x 2048", _experts),
}


def operations(tensors: TensorSet) -> int:
    """The fewest floating-point operations known of STEPS steps of all matrices: Gram's form.

    Of short side s and long side l: two X X^T of s^2 l, as they are symmetric, two Q X of 2 s^2 l,
    and 14 products [s, s], each symmetric, of s^3.
    """
    sides = (sorted(shape) for shape in tensors.shapes)
    return sum(6 * short**2 * long + 14 * short**3 for short, long in sides)


def floor_bytes(tensors: TensorSet) -> int:
    """Bytes that a step must move: bf16 gradient and weight, fp32 master and momentum, twice."""
    return 20 * sum(tensors.sizes)
