"""Megatron's ChainedOptimizer, with clipping left to the step."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.optimizer.clip_grads import l2_norm_impl
from megatron.core.utils import local_multi_tensor_l2_norm

from megaopt.integration.megatron.checkpoints import align_steps
from megaopt.integration.megatron.gradients import norm_groups


class Chained(ChainedOptimizer):
    """Steps one or several optimizers of ours (dense and expert parameters, say)."""

    def __init__(self, chained_optimizers: list[Any]) -> None:
        super().__init__(chained_optimizers)
        # one list for the norm's kernel, which has one dtype
        allowed = l2_norm_impl is not local_multi_tensor_l2_norm and all(
            optimizer.has_16_bit_norm for optimizer in chained_optimizers
        )
        for optimizer in chained_optimizers:
            optimizer.has_16_bit_norm = allowed

    @torch.no_grad()
    def step(self) -> tuple[bool, Any, Any]:
        """Megatron's step, where gradients stay as they are and the steps are told a coefficient.

        Returns:
            Whether there was an update; the gradients' norm and how many of them are 0, both None
            after an overflow, the latter also if config.log_num_zeros_in_grad is not set.
        """
        self.grad_norms_by_group: dict[str, Any] = {}
        if self.prepare_grads():
            return False, None, None
        grad_norm = self.get_grad_norm()
        if len(norm_groups()) > 1 and self.config.clip_grad > 0.0:
            self._compute_grad_norms_by_group()  # ranks ask each other, once
        for optimizer in self.chained_optimizers:
            optimizer.clip(grad_norm, self.grad_norms_by_group)
        zeros = self.count_zeros() if self.config.log_num_zeros_in_grad else None
        is_skipped = any(each.skips(grad_norm) for each in self.chained_optimizers)
        return not is_skipped and self.step_with_ready_grads(), grad_norm, zeros

    def _synchronize_steps(self) -> int | None:
        """Megatron's, for groups that were never stepped and steps on the device too."""
        stepped = [each for each in self.chained_optimizers if not each.is_stub_optimizer]
        groups = [group for each in stepped for group in each.optimizer.param_groups]
        align_steps(groups)
        steps = {int(group["step"]) for group in groups if group["params"]}
        if len(steps) > 1:
            raise ValueError(f"chained optimizers must be at one step, got steps {sorted(steps)}")
        return steps.pop() if steps else None

    def count_zeros(self) -> Any:
        """How many of the clipped gradients are 0, over all ranks."""
        with contextlib.ExitStack() as stack:
            for optimizer in self.chained_optimizers:
                stack.enter_context(optimizer.clipped_grads())
            return super().count_zeros()
