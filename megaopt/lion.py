"""FusedLion: Lion in one launch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from typing_extensions import Unpack

from megaopt.kernels.rules import RULES, Rule
from megaopt.optimizer import FusedOptimizer
from megaopt.options.arguments import options_of, show_options
from megaopt.options.checks import NOT_NEGATIVE
from megaopt.options.options import Numbers, Options, SharedOptions, StepOptions


@dataclass(frozen=True, kw_only=True)
class LionOptions(Options):
    """FusedLion's own options."""

    NUMBERS: ClassVar[Numbers] = Numbers(
        {"lr": NOT_NEGATIVE, "weight_decay": NOT_NEGATIVE}, has_betas=True
    )

    exp_avg_dtype: torch.dtype | str = torch.float32


class FusedLion(FusedOptimizer):
    """Lion (Chen et al. 2023, arXiv:2302.06675) that writes the model's weights.

    Each element moves by lr, in the direction that the sign of an average of gradients gives; one
    moment, exp_avg. docs/numbers.md gives every operation in order; the bits are the same on every
    backend. Formats, masters, fp8 weights, DTensors, GradScaler and state dicts are FusedAdam's.

    Args:
        params: as for FusedAdam.
        lr: how far an element moves in a step, in units of the parameter; at least 0. The paper
            takes a third to a tenth of AdamW's.
        betas: the weight of exp_avg in the direction, and exp_avg's decay per step; in [0, 1).
        weight_decay: decoupled: the part of a weight that goes per step, times lr. The paper takes
            three to ten times AdamW's. At least 0.
        exp_avg_dtype: of the moment, as for FusedAdam.

    Raises:
        TypeError, ValueError, RuntimeError: as FusedAdam.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor | None = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        exp_avg_dtype: torch.dtype | str = torch.float32,
        **options: Unpack[StepOptions],
    ) -> None:
        super().__init__(params, *options_of(self, LionOptions, locals()))

    @property
    def rule(self) -> Rule:
        """Lion, under contract ieee."""
        return RULES["lion", self.options.contract]


show_options(FusedLion, LionOptions, SharedOptions, StepOptions)
