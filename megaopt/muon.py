"""FusedMuon: Muon for matrices, AdamW for all other parameters."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any, ClassVar, NamedTuple

import torch
from typing_extensions import Unpack

from megaopt.kernels.matrix.muon import MUON, NORMUON, Orthogonal, coefficients_of
from megaopt.kernels.rules import RULES, Rule
from megaopt.kernels.rules.base import in_one_row
from megaopt.kernels.rules.matrix import Matrix, MatrixRule
from megaopt.optimizer import FusedOptimizer
from megaopt.options.arguments import options_of, takes
from megaopt.options.checks import DECAY, NOT_NEGATIVE, one_of, refuse
from megaopt.options.choices import MuonContract, MuonMethod, MuonPrecision, SecondMoment
from megaopt.options.options import Numbers, Options, SharedOptions
from megaopt.params import ParamView, view_of
from megaopt.params.dtensor import DTensorView

ORTHOGONALIZING = ("ns_coefficients", "ns_steps", "adjust_lr_fn", "split_sizes")
"""Keys of groups that say how matrices are made orthogonal: no numbers of the step."""
MARKS = {"use_muon": False, "is_embedding_or_output_parameter": True}
"""Attributes of parameters that Muon does not step, with the values that say so: the second is
Megatron-Core's."""


# --- the rules, which share a row of scalars


def _of_adam(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group as AdamW reads it."""
    eps = group["eps" if group["use_muon"] is False else "adam_eps"]
    return {**group, "eps": eps, "bias_correction": True}


@cache
def rules_of(contract: str) -> tuple[Rule, MatrixRule]:
    """AdamW and Muon under a contract; AdamW is ieee's beside contract eo."""
    adamw = RULES["adamw", "torch" if contract == "torch" else "ieee"]
    own = replace(
        adamw,
        scalars=lambda group: adamw.scalars(_of_adam(group)),
        hyper=lambda group: adamw.hyper(_of_adam(group)),
        tables=lambda group, device: adamw.tables(_of_adam(group), device),
    )
    first, inner, apply = in_one_row(own, MUON.inner, MUON.apply)
    return first, replace(MUON, inner=inner, apply=apply)


# --- options


def why_adamw(param: torch.Tensor, group: Mapping[str, Any]) -> str | None:
    """Why AdamW steps a parameter of a group; None where Muon does."""
    if group["use_muon"] is False:
        return "its group has use_muon=False"
    if param.dim() < 2:
        return f"it has {param.dim()} dimensions"
    for name, value in MARKS.items():
        if getattr(param, name, None) is value:
            return f"it is marked {name}={value}"
    return None


@dataclass(frozen=True, kw_only=True)
class MuonOptions(Options):
    """FusedMuon's own options."""

    NUMBERS: ClassVar[Numbers] = Numbers(
        {
            "lr": NOT_NEGATIVE,
            "weight_decay": NOT_NEGATIVE,
            "momentum": DECAY,
            "eps": NOT_NEGATIVE,
            "adam_eps": NOT_NEGATIVE,
        },
        has_betas=True,
        flags=("nesterov",),
    )
    COUNTS_STEPS: ClassVar[bool] = False
    OF_ALL: ClassVar[tuple[str, ...]] = ("method", "precision", "second_moment")
    MATRIX: ClassVar[MatrixRule] = MUON
    MATRIX_KEYS: ClassVar[tuple[str, ...]] = ("use_muon", "eps", *ORTHOGONALIZING)
    OFFLOADS: ClassVar[bool] = False

    momentum_buffer_dtype: torch.dtype | str = torch.float32
    exp_avg_dtype: torch.dtype | str = torch.float32
    exp_avg_sq_dtype: torch.dtype | str = torch.float32
    method: MuonMethod = "auto"
    precision: MuonPrecision = "bf16"
    second_moment: SecondMoment | None = None
    contract: MuonContract = "ieee"  # type: ignore[assignment]  # others than other optimizers'

    @cached_property
    def names_but_step(self) -> tuple[str, ...]:
        """The keys that every group has, but the step count's."""
        return (*super().names_but_step, "use_muon", *ORTHOGONALIZING)

    @property
    def group_keys(self) -> dict[str, Any]:
        """What every group has beside its numbers, at first."""
        return {**super().group_keys, "use_muon": None, "split_sizes": None}

    def how(self, group: Mapping[str, Any]) -> Orthogonal:
        """How matrices of a group are made orthogonal; ValueError for what is no way."""
        sizes = group["split_sizes"]
        return Orthogonal(
            coefficients_of(group["ns_coefficients"], group["ns_steps"]),
            eps=float(group["eps"]),
            method=self.method,
            precision=self.precision,
            adjust=group["adjust_lr_fn"],
            second_moment=self.second_moment,
            split_sizes=None if sizes is None else tuple(sizes),
            contract=self.contract,
        )

    def matrix(self, param: torch.Tensor, group: Mapping[str, Any]) -> Matrix | None:
        """How Muon steps a parameter; None where AdamW does."""
        if not group or why_adamw(param, group) is not None:
            return None
        return Matrix(rules_of(self.contract)[1], self.how(group))

    def check_numbers(self, group: Mapping[str, Any], where: str) -> None:
        """Raises ValueError for what a group says of its matrices."""
        one_of(f"{where}: use_muon", group["use_muon"], (None, True, False))
        if group["use_muon"] is False:
            return
        sizes = group["split_sizes"]
        if sizes is not None and not _are_sizes(sizes):
            refuse(f"{where}: split_sizes", "None or a list of whole numbers >= 1", sizes)
        try:
            how = self.how(group)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{where}: {error}") from None
        for index, param in enumerate(group["params"]):
            self._check_param(param, group, how, f"{where}: use_muon", f"its parameter {index}")

    def _check_param(
        self, param: Any, group: Mapping[str, Any], how: Orthogonal, name: str, which: str
    ) -> None:
        """Raises ValueError for a parameter that Muon is asked to step, and cannot."""
        reason, wanted = why_adamw(param, group), group["use_muon"]
        if reason is not None:
            if wanted:
                refuse(name, f"None or False beside {which}, as {reason}", wanted)
            return
        if type(view_of(param)) not in (ParamView, DTensorView):
            kind = type(param).__name__
            refuse(name, f"False beside {which}, a {kind}: Muon steps plain tensors and DTensors", wanted)
        try:
            how.pieces(param.shape)
        except ValueError as error:
            raise ValueError(f"{name.removesuffix('use_muon')}{which}: {error}") from None


def _are_sizes(value: Any) -> bool:
    is_list = isinstance(value, (list, tuple)) and len(value) > 0
    return is_list and all(type(each) is int and each >= 1 for each in value)
