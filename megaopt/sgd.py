"""FusedSGD: SGD in one launch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from typing_extensions import Unpack

from megaopt.kernels.refusals import refuse
from megaopt.kernels.rules import RULES, Rule
from megaopt.optimizer import FusedOptimizer
from megaopt.options.arguments import options_of, show_options
from megaopt.options.checks import DECAY, NOT_NEGATIVE, Range, number
from megaopt.options.options import Numbers, Options, SharedOptions, StepOptions

DAMPENING = Range("a number >= 0 and <= 1", lambda value: 0 <= value <= 1)


@dataclass(frozen=True, kw_only=True)
class SGDOptions(Options):
    """FusedSGD's own options."""

    NUMBERS: ClassVar[Numbers] = Numbers(
        {"lr": NOT_NEGATIVE, "momentum": DECAY, "dampening": DAMPENING}
        | {"weight_decay": NOT_NEGATIVE}
    )
    COUNTS_STEPS: ClassVar[bool] = False
    MARKS: ClassVar[tuple[str, ...]] = ("contract", "nesterov", "decoupled_weight_decay")

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
        decoupled_weight_decay: weight decay is the part of a weight that goes per step of size one,
            times lr, and passes by the momentum (SGDW, Loshchilov & Hutter 2019, arXiv:1711.05101).
        momentum_buffer_dtype: of the moment, as FusedAdam's exp_avg_dtype.

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
        decoupled_weight_decay: bool = False,
        momentum_buffer_dtype: torch.dtype | str = torch.float32,
        **options: Unpack[StepOptions],
    ) -> None:
        flags = {"has_momentum": number("momentum", momentum, DECAY) > 0}
        super().__init__(params, *options_of(self, SGDOptions, {**locals(), **flags}))

    @property
    def rule(self) -> Rule:
        """SGD of the optimizer's kind, under contract ieee."""
        options: Any = self.options
        kind = "_nesterov" if options.nesterov else "_momentum" if options.has_momentum else ""
        name = "sgdw" if options.decoupled_weight_decay else "sgd"
        return RULES[name + kind, options.contract]


show_options(FusedSGD, SGDOptions, SharedOptions, StepOptions)
