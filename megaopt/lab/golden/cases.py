"""Cases, whose names say it all, and their record: in two parts a line for each, what it hashes to.

Not every combination. Each format of a slot stands beside each format that it is read or written
with: each exp_avg beside each exp_avg_sq, both beside each master, weights beside masters, and
gradients beside weights. Each recipe of fp8 has cases, and each option where it has something to
do. The tests of the record say what lacks a case. A new case is a line of its name and no digests,
{}; `megaopt verify --record` writes them, and a review shows what moved.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from typing import Any

import torch

from megaopt.float8 import RECIPES, Float8Recipe
from megaopt.kernels.formats import MOMENTS

DTYPES: dict[str, Any] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.float8_e4m3fn,
    "stochastic": "bfloat16_stochastic",
    **{name: name for name in MOMENTS if name.startswith("block")},
}


@dataclass(frozen=True)
class OptimizerKind:
    """The optimizer that steps by a rule, and its arguments."""

    optimizer: str
    options: dict[str, Any]
    moments: tuple[str, ...]
    """The moments whose formats a case names."""
    numbers: tuple[str, ...]
    """The numbers of a group, beside lr and weight_decay."""


ADAM = (("exp_avg", "exp_avg_sq"), ("betas", "eps"))
SGD: tuple[Any, ...] = (("momentum_buffer",), ("momentum", "dampening"))
GALORE = (("exp_avg", "exp_avg_sq"), ("betas", "eps", "scale"))
MUON = (("momentum_buffer",), ("betas", "momentum"))
PROJECTED = {"rank": 3, "update_proj_gap": 1000}
DECOUPLED = {"decoupled_weight_decay": True}
NESTEROV = {"momentum": 0.5, "nesterov": True}
RULES = {
    "adamw": OptimizerKind("FusedAdam", {"adam_w_mode": True}, *ADAM),
    "adam": OptimizerKind("FusedAdam", {"adam_w_mode": False}, *ADAM),
    "adamw_amsgrad": OptimizerKind("FusedAdam", {"amsgrad": True}, *ADAM),
    "adam_amsgrad": OptimizerKind("FusedAdam", {"adam_w_mode": False, "amsgrad": True}, *ADAM),
    "galore": OptimizerKind("GaLoreAdamW", PROJECTED, *GALORE),
    "lion": OptimizerKind("FusedLion", {}, ("exp_avg",), ("betas",)),
    "muon": OptimizerKind("FusedMuon", {}, *MUON),
    "sgd": OptimizerKind("FusedSGD", {}, (), ()),
    "sgd_momentum": OptimizerKind("FusedSGD", {"momentum": 0.5}, *SGD),
    "sgd_nesterov": OptimizerKind("FusedSGD", NESTEROV, SGD[0], ("momentum",)),
    "sgdw": OptimizerKind("FusedSGD", DECOUPLED, (), ()),
    "sgdw_momentum": OptimizerKind("FusedSGD", {"momentum": 0.5, **DECOUPLED}, *SGD),
    "sgdw_nesterov": OptimizerKind("FusedSGD", {**NESTEROV, **DECOUPLED}, SGD[0], ("momentum",)),
}
NO_MOMENTS = "no-moments"
MASTERS: dict[str, dict[str, Any]] = {
    "no-master": {},
    "fp32-master": {"dtype": torch.float32},
    "fp16-master": {"master_weights": True, "master_weight_dtype": torch.float16},
    "remainder": {"dtype": torch.float32, "store_param_remainders": True},
    "no-master-stochastic": {"master_weights": False, "weight_rounding": "stochastic"},
    **{
        f"{name.replace('_', '-')}-master": {"master_weights": True, "master_weight_dtype": name}
        for name in ("remainder8", "remainder8_stochastic", "kahan", "kahan_stochastic")
    },
}
FLOAT8: dict[str, Float8Recipe] = {
    **RECIPES,
    "current_direct": Float8Recipe("current", direct=True),
    "current_powers": Float8Recipe("current", power_of_two_scales=True, amax_epsilon=0.5),
    "delayed_short": Float8Recipe("delayed", amax_history_len=2),
    "delayed_recent": Float8Recipe("delayed", margin=1, amax_compute_algo="most_recent"),
}
"""The recipes by name, and such with options."""

VARIATIONS: dict[str, dict[str, Any]] = {
    # gradients of this dtype, in decoupled_grad
    "fp32-grad": {},
    "bf16-grad": {},
    "fp16-grad": {},
    # what an fp8 weight is to everybody, where others are bf16
    "fp32-values": {},
    "fp16-values": {},
    "no-bias-correction": {"bias_correction": False},
    "capturable": {"capturable": True},
    "maximize": {"maximize": True},
    # GaLore's products, of numbers rounded so, with projections of any numbers
    "tf32": {"precision": "tf32"},
    "bf16-products": {"precision": "bf16"},
    "larger-side": {"proj_type": "reverse_std"},  # sums of 1,400 terms
    # Muon's iteration
    "fp16-products": {"precision": "fp16"},
    "gram": {"precision": "fp16", "method": "gram"},
    "quintic": {"ns_coefficients": "quintic"},
    "normuon": {"second_moment": "normuon"},
    "late": {},  # from step 99,990 on in the first group, from 4,090 on in the second
    "clip": {},  # clip_norm, which every other step exceeds
    "grad-scale": {},  # a GradScaler's scale, a power of two in some steps and not in others
    "overflow": {},  # found_inf at some steps, under a GradScaler's scale
    "skip": {"nonfinite": "skip"},  # with infinities and NaNs at some steps
    # among the gradients, let through
    "nonfinite": {},
    "nan": {},
    "infinite": {},
    "round-scaled-grads": {"round_scaled_grads": True},
    "direct-cast": {"direct_cast": True},
    "rounded-cast": {"direct_cast": False},
    "external-masters": {},  # master_weights is a list
    "external-write": {},  # weights are written by somebody else after step 9
    "resume": {},  # after step 10 from a state_dict, in a new optimizer with new parameters
}
"""The variations that a name may end with, and the options that each adds."""


def _dtypes(moments: str) -> list[str]:
    return [] if moments == NO_MOMENTS else moments.split("-")


@dataclass(frozen=True)
class GoldenCase:
    """Contract, rule, weight, master, moments and variations, joined by "/".

    "ieee/adamw/bf16-weight/fp32-master/fp32-bf16/clip": exp_avg in fp32 and exp_avg_sq in bf16.
    Raises ValueError for another name.
    """

    name: str

    def __post_init__(self) -> None:
        try:
            _ = self.options, self.weight, self.grad
        except (LookupError, ValueError):
            raise ValueError(
                f"name must be contract/rule/weight/master/moments/variations, got {self.name!r}"
            ) from None

    @cached_property
    def parts(self) -> list[str]:
        """Returns the parts of the name."""
        return self.name.split("/")

    @property
    def kind(self) -> OptimizerKind:
        """Returns the optimizer of the case's rule."""
        return RULES[self.parts[1]]

    @property
    def features(self) -> frozenset[tuple[str, str]]:
        """All that it steps, and what each is to it: its rule, a moment's format, an option."""
        rule, weight, master, _, *variations = self.parts[1:]
        moments = zip(self.kind.moments, _dtypes(self.parts[4]), strict=True)
        options = (("option", name) for name in variations)
        return frozenset(
            [("rule", rule), ("weight", weight), ("master", master), *moments, *options]
        )

    @property
    def is_projected(self) -> bool:
        """Returns whether matrices are stepped through a projection of their gradients."""
        return "rank" in self.kind.options

    @property
    def contract(self) -> str:
        """The name of the contract."""
        return self.parts[0]

    @cached_property
    def recipe(self) -> Float8Recipe | None:
        """Returns the fp8 format of matrices; None where no weight is in fp8."""
        return FLOAT8.get(self.parts[2].removesuffix("-weight"))

    @cached_property
    def has_blocks(self) -> bool:
        """Returns whether a moment is kept in blocks, as those of small parameters never are."""
        return any(moment.startswith("block") for moment in _dtypes(self.parts[4]))

    @cached_property
    def weight(self) -> torch.dtype:
        """The dtype of weights, of fp8 ones what they are to everybody."""
        if self.recipe is None:
            dtype: torch.dtype = DTYPES[self.parts[2].removesuffix("-weight")]
            return dtype
        return self._dtype("values", torch.bfloat16)

    @cached_property
    def grad(self) -> torch.dtype:
        """The dtype of gradients."""
        return self._dtype("grad", self.weight)

    def _dtype(self, of: str, otherwise: torch.dtype) -> torch.dtype:
        names = [name.removesuffix(f"-{of}") for name in self.parts[5:] if name.endswith(f"-{of}")]
        return DTYPES[names[0]] if names else otherwise

    @cached_property
    def options(self) -> dict[str, Any]:
        """Returns the optimizer's arguments, without parameters, groups and backend."""
        moments = zip(self.kind.moments, _dtypes(self.parts[4]), strict=True)
        arguments = {
            **({} if self.contract == "ieee" else {"contract": self.contract}),
            **self.kind.options,
            **{f"{name}_dtype": DTYPES[dtype] for name, dtype in moments},
            "use_decoupled_grad": self.grad != self.weight,
            **MASTERS[self.parts[3]],
        }
        for variation in self.parts[5:]:
            arguments |= VARIATIONS[variation]
        return arguments

    def has(self, variation: str) -> bool:
        """Returns whether the case has this one of VARIATIONS."""
        return variation in self.parts[5:]


# --- the record

ANY_MACHINE, NVIDIA_GPU = "any machine", "NVIDIA GPU"
MADE_ON = f"{NVIDIA_GPU}, made on"
FILE = files("megaopt.lab.golden").joinpath("record.json")

Digests = dict[str, dict[str, str]]
"""The digest of each quantity of each case."""

CASES: dict[str, list[GoldenCase]] = {
    part: [GoldenCase(name) for name in json.loads(FILE.read_text("utf-8"))[part]]
    for part in (ANY_MACHINE, NVIDIA_GPU)
}
"""The cases of each part: those for any machine, and those for an NVIDIA GPU alone."""


def covering(
    cases: Sequence[GoldenCase], features: Callable[[GoldenCase], Collection[Hashable]]
) -> list[GoldenCase]:
    """Few of the cases that together have each feature of all: next is who adds the most of them.

    Where several add as many it is the first, so that the choice is the same everywhere.
    """
    chosen, missing = [], {feature for case in cases for feature in features(case)}
    while missing:
        case = max(cases, key=lambda case: len(missing.intersection(features(case))))
        missing.difference_update(features(case))
        chosen.append(case)
    return chosen


@dataclass(frozen=True)
class Record:
    """The digests that were recorded, and what they were made on."""

    digests: Mapping[str, Digests]
    """The digests of each part."""
    made_on: Mapping[str, str | None]
    """The versions and the hardware behind the part of NVIDIA GPUs."""


def packaged() -> Record:
    """The record that comes with this version."""
    return parse(FILE.read_text("utf-8"))


def parse(text: str) -> Record:
    """The record of which `render` made a text."""
    content = json.loads(text)
    return Record({part: content[part] for part in CASES}, content[MADE_ON])


def render(record: Record) -> str:
    """JSON with a line for each case."""
    parts = []
    for part in CASES:
        cases = record.digests[part].items()
        lines = [f"  {json.dumps(name)}: {json.dumps(quantities)}" for name, quantities in cases]
        parts.append(f"{json.dumps(part)}: " + "{\n" + ",\n".join(lines) + "\n}")
    parts.append(f"{json.dumps(MADE_ON)}: {json.dumps(dict(record.made_on), indent=2)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"
