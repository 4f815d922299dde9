"""The unfused Adam of this command as an inner optimizer of Megatron's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megaopt.commands.config import OptimizerConfig
from megaopt.commands.regression.unfused import adam_update, scalars_of


class UnfusedAdam(torch.optim.Optimizer):
    """Adam in plain torch operations, in the order of contract ieee, with Megatron's interface.

    Args:
        params: param groups of fp32 tensors.
        lr: learning rate.
        weight_decay: decoupled with adam_w_mode, else added to the gradient.
        betas: decays of the moments.
        eps: added to the denominator outside the root.
        adam_w_mode: AdamW.
        capturable: accepted, as Megatron passes it, if false.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        capturable: bool = False,
    ) -> None:
        if capturable:
            raise ValueError("capturable must be False, as plain torch operations wait, got True")
        defaults = {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps}
        super().__init__(params, {**defaults, "adam_w_mode": adam_w_mode})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Updates parameters and moments; a closure is not called."""
        for group in self.param_groups:
            if group["params"]:
                # Megatron wants one count for all groups that have parameters
                group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, group)

    def _update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        if not state:
            state["exp_avg"], state["exp_avg_sq"] = (torch.zeros_like(param) for _ in range(2))
        config = OptimizerConfig(
            learning_rate=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            eps=group["eps"],
            adam_w_mode=group["adam_w_mode"],
        )
        scalars = scalars_of(config, group["step"], group["lr"], group["weight_decay"])
        assert param.grad is not None
        adam_update(param, param.grad, state["exp_avg"], state["exp_avg_sq"], scalars)
