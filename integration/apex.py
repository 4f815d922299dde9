"""A drop-in for apex.optimizers.FusedAdam, with its arguments and its bits.

apex's multi_tensor_adam and TransformerEngine's have the same bits: the contract is te.
tests/integration/test_apex.py compares this class with apex's own. apex itself is not needed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch

import megaopt
from megaopt.integration.grad_scaler import passed_on, step_with


class FusedAdam(megaopt.FusedAdam):
    """apex's FusedAdam, equal in every bit on an NVIDIA GPU.

    The arguments are apex's, with its order and defaults; the state is fp32. With capturable, lr
    and step are tensors on the device; megaopt.integration.transformer_engine says what differs
    there from apex on purpose too. Beside 16-bit weights without masters apex's capturable kernels
    round the fp32 moments to the weights' dtype at every step; this class keeps all their bits.

    Raises:
        ValueError: as megaopt.FusedAdam; also master_weights without capturable, as in apex, and
            master_weights with bf16 weights, whose masters apex makes and never uses.
        RuntimeError: a parameter is not on an NVIDIA GPU.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
    ) -> None:
        arguments = locals()
        if master_weights and not capturable:
            raise ValueError(
                "master_weights must be False without capturable=True, as apex keeps masters only "
                "then, got True; megaopt.FusedAdam(..., contract='te', master_weights=True) keeps "
                "them"
            )
        super().__init__(**passed_on(arguments), makes_states="stepped")
        self.set_grad_none, self.step_unscales = set_grad_none, capturable
        for param, where in zip(self._owned.params, self._owned.labels, strict=True):
            self._check_param(param, where)

    def _check_param(self, param: torch.Tensor, where: str) -> None:
        super()._check_param(param, where)
        if self._owned.wants_masters and param.dtype == torch.bfloat16:
            raise ValueError(
                f"{where}: dtype must be torch.float16 or torch.float32 with master_weights=True, "
                "got torch.bfloat16, whose masters apex makes and never uses; "
                "megaopt.FusedAdam(..., contract='te', master_weights=True) has masters for both"
            )

    def step(  # type: ignore[override]  # apex's face
        self,
        closure: Callable[[], Any] | None = None,
        grads: None = None,
        output_params: None = None,
        scale: None = None,
        grad_norms: None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
    ) -> Any:
        """One update, as megaopt.FusedAdam.step, without clipping.

        Args:
            closure: reevaluates the model and returns the loss.
            grads: only None, as in apex; likewise output_params, scale and grad_norms.
            output_params: only None.
            scale: only None.
            grad_norms: only None.
            grad_scaler: with capturable, gradients are unscaled by its scale, and an infinity or
                NaN that it finds among them skips the step.

        Raises:
            ValueError: as megaopt.FusedAdam.step; an argument that has to be None is not; also
                grad_scaler without capturable, which apex ignores in silence.
        """
        arguments = {"grads": grads, "output_params": output_params, "scale": scale}
        for name, value in {**arguments, "grad_norms": grad_norms}.items():
            if value is not None:
                raise ValueError(f"{name} must be None, got {value!r}")
        return step_with(self, functools.partial(super().step, closure), grad_scaler, "apex")

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Sets the gradients to None, or to zero where set_grad_none is False."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state for pickle and deepcopy."""
        return {**super().__getstate__(), "set_grad_none": self.set_grad_none}
