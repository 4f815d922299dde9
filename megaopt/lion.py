"""FusedLion: Lion in one launch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

import torch

from megaopt.kernels.rules import RULES, Rule
from megaopt.optimizer import FusedOptimizer
from megaopt.options.checks import NOT_NEGATIVE, one_of
from megaopt.options.choices import Backend, ExternalWrite, Nonfinite, Rounding
from megaopt.options.names import check_arguments
from megaopt.options.options import Numbers, Options
from megaopt.options.placement import StateDevice
from megaopt.state.masters import MasterWeights


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
        maximize: steps along the gradient, not against it.
        exp_avg_dtype: of the moment, as for FusedAdam.
        dtype, master_weights, master_weight_dtype, store_param_remainders, weight_rounding, seed,
        use_decoupled_grad, capturable, nonfinite, direct_cast, round_scaled_grads,
        on_external_write, write_unscaled_grads, state_device, backend, foreach, differentiable,
        fused: as for FusedAdam.
        **unknown: none; refused by name.

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
        maximize: bool = False,
        dtype: torch.dtype | None = None,
        master_weights: MasterWeights = None,
        master_weight_dtype: torch.dtype | str = torch.float32,
        exp_avg_dtype: torch.dtype | str = torch.float32,
        store_param_remainders: bool = False,
        weight_rounding: Rounding = "nearest",
        seed: int = 0,
        use_decoupled_grad: bool = False,
        capturable: bool = False,
        nonfinite: Nonfinite = "propagate",
        direct_cast: bool | None = None,
        round_scaled_grads: bool = False,
        on_external_write: ExternalWrite = "refresh",
        write_unscaled_grads: bool = False,
        state_device: StateDevice = None,
        backend: Backend = "auto",
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        **unknown: NoReturn,
    ) -> None:
        check_arguments(
            "FusedLion",
            LionOptions.NUMBERS,
            foreach=foreach,
            differentiable=differentiable,
            fused=fused,
            unknown=unknown,
        )
        one_of("use_decoupled_grad", use_decoupled_grad, (True, False))
        options = LionOptions(
            dtype=dtype,
            master_weight_dtype=master_weight_dtype,
            exp_avg_dtype=exp_avg_dtype,
            store_param_remainders=store_param_remainders,
            weight_rounding=weight_rounding,
            seed=seed,
            backend=backend,
            capturable=capturable,
            nonfinite=nonfinite,
            direct_cast=direct_cast,
            round_scaled_grads=round_scaled_grads,
            on_external_write=on_external_write,
            write_unscaled_grads=write_unscaled_grads,
            state_device=state_device,
            maximize=maximize,
        )
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay}
        super().__init__(params, defaults, options, master_weights)
        self.use_decoupled_grad = use_decoupled_grad

    @property
    def rule(self) -> Rule:
        """Lion, under contract ieee."""
        return RULES["lion", self.options.contract]
