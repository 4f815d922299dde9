"""FusedSGD: SGD in one launch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

import torch

from megaopt.kernels.rules import RULES, Rule
from megaopt.optimizer import FusedOptimizer
from megaopt.options.checks import NOT_NEGATIVE, Range, number, one_of, refuse
from megaopt.options.choices import Backend, ExternalWrite, Nonfinite, Rounding, StepCounts
from megaopt.options.names import check_arguments
from megaopt.options.options import FLAGS, Numbers, Options
from megaopt.options.placement import StateDevice
from megaopt.state.masters import MasterWeights

MOMENTUM = Range("a number >= 0 and < 1", lambda value: 0 <= value < 1)
DAMPENING = Range("a number >= 0 and <= 1", lambda value: 0 <= value <= 1)


@dataclass(frozen=True, kw_only=True)
class SGDOptions(Options):
    """FusedSGD's own options."""

    NUMBERS: ClassVar[Numbers] = Numbers(
        {
            "lr": NOT_NEGATIVE,
            "momentum": MOMENTUM,
            "dampening": DAMPENING,
            "weight_decay": NOT_NEGATIVE,
        }
    )
    COUNTS_STEPS: ClassVar[bool] = False
    MARKS: ClassVar[tuple[str, ...]] = ("contract", "nesterov", "decoupled_weight_decay")
    CHOICES: ClassVar[dict[str, tuple[Any, ...]]] = {
        **Options.CHOICES,
        "nesterov": FLAGS,
        "decoupled_weight_decay": FLAGS,
    }

    momentum_buffer_dtype: torch.dtype | str = torch.float32
    has_momentum: bool = False
    """There is a momentum buffer."""
    nesterov: bool = False
    decoupled_weight_decay: bool = False

    def check_numbers(self, group: Mapping[str, Any], where: str) -> None:
        """Raises ValueError where a group's numbers do not go together."""
        momentum, dampening = float(group["momentum"]), float(group["dampening"])
        if momentum > 0 and not self.has_momentum:
            refuse(f"{where}: momentum", "0, as the optimizer's own is", momentum)
        if self.nesterov and (momentum == 0 or dampening != 0):
            raise ValueError(
                f"{where}: nesterov must be False without momentum or with dampening, got True, "
                f"momentum={momentum!r} and dampening={dampening!r}"
            )


class FusedSGD(FusedOptimizer):
    """SGD with momentum that writes the model's weights.

    As torch.optim.SGD computes it: a momentum buffer starts as the first gradient, without
    dampening. docs/numbers.md gives every operation in order; the bits are the same on every
    backend. Formats, masters, fp8 weights, DTensors, GradScaler and state dicts are FusedAdam's.

    step_counts="group" takes a group's first step for every parameter's first: the buffer of one
    that has its first gradient later starts at 0, and takes 1 - dampening of that gradient.
    "parameter" starts each buffer as the parameter's first gradient, as torch does.

    Args:
        params: as for FusedAdam.
        lr: step size, in units of the parameter per unit of the gradient; at least 0.
        momentum: decay of the momentum buffer per step, in [0, 1). With 0 there is no buffer.
        dampening: 1 - dampening of a gradient goes into the buffer; from 0 to 1.
        weight_decay: L2: added to the gradient per unit of the weight; or decoupled. At least 0.
        nesterov: Nesterov's momentum, which needs a momentum above 0 and dampening 0.
        maximize: steps along the gradient, not against it.
        decoupled_weight_decay: weight decay is the part of a weight that goes per step of size one,
            times lr, and passes by the momentum (SGDW, Loshchilov & Hutter 2019, arXiv:1711.05101).
        momentum_buffer_dtype: of the moment, as FusedAdam's exp_avg_dtype.
        dtype, master_weights, master_weight_dtype, store_param_remainders, weight_rounding, seed,
        use_decoupled_grad, capturable, nonfinite, direct_cast, round_scaled_grads,
        on_external_write, write_unscaled_grads, state_device, step_counts, backend, foreach,
        differentiable, fused: as for FusedAdam. step_counts=None is "group".
        **unknown: none; refused by name.

    Raises:
        TypeError, ValueError, RuntimeError: as FusedAdam.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor | None = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        decoupled_weight_decay: bool = False,
        dtype: torch.dtype | None = None,
        master_weights: MasterWeights = None,
        master_weight_dtype: torch.dtype | str = torch.float32,
        momentum_buffer_dtype: torch.dtype | str = torch.float32,
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
        step_counts: StepCounts | None = None,
        backend: Backend = "auto",
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        **unknown: NoReturn,
    ) -> None:
        check_arguments(
            "FusedSGD",
            SGDOptions.NUMBERS,
            foreach=foreach,
            differentiable=differentiable,
            fused=fused,
            unknown=unknown,
        )
        one_of("use_decoupled_grad", use_decoupled_grad, (True, False))
        has_momentum = number("momentum", momentum, MOMENTUM) > 0
        options = SGDOptions(
            dtype=dtype,
            master_weight_dtype=master_weight_dtype,
            momentum_buffer_dtype=momentum_buffer_dtype,
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
            step_counts=step_counts,
            maximize=maximize,
            has_momentum=has_momentum,
            nesterov=nesterov,
            decoupled_weight_decay=decoupled_weight_decay,
        )
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults, options, master_weights)
        self.use_decoupled_grad = use_decoupled_grad

    @property
    def rule(self) -> Rule:
        """SGD of the optimizer's kind, under contract ieee."""
        options: Any = self.options
        kind = "_nesterov" if options.nesterov else "_momentum" if options.has_momentum else ""
        name = "sgdw" if options.decoupled_weight_decay else "sgd"
        return RULES[name + kind, options.contract]
