"""FusedAdam with the arguments, methods and bits of TransformerEngine's FusedAdam.

It takes the place of transformer_engine.pytorch.optimizers.FusedAdam. Changing the import is all it
takes, and moves no loss: the contract is te. TransformerEngine itself is not needed. Where it
ignores an option in silence, this one raises.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch

import megaopt
import megaopt.integration.transformer_engine_weights  # fp8 tensors become known
from megaopt.integration.grad_scaler import passed_on, step_with
from megaopt.options.choices import MasterWeights


class FusedAdam(megaopt.FusedAdam):
    """TransformerEngine 2.20's FusedAdam, equal in every bit on an NVIDIA GPU.

    The arguments are TransformerEngine's, with its order and defaults; megaopt.FusedAdam documents
    them. Moments in fp8 (torch.uint8) are plain torch.float8_e4m3fn tensors, and the scale of
    exp_avg is `state[p]["exp_avg_scale"]`, where TransformerEngine has a Float8Tensor's _data and
    _scale_inv.

    fp8 weights are its own tensors (integration/transformer_engine_weights.py), cast
    from fp32 as its optimizer casts them. Three things differ on purpose: transposes are marked
    stale, which TransformerEngine's fused fp8 step forgets, so that its backward pass goes on with
    the old ones; weights without masters are updated, which it leaves out in silence; and masters
    start from the values that fp8_model_init(preserve_high_precision_init_val=True) kept, where it
    did.

    The first step makes the state of every parameter, with a gradient or without.

    With capturable, lr and step are tensors on the device, and the bits are those of
    TransformerEngine's capturable kernels, also of the unscaled gradients, which a step with a
    grad_scaler leaves in the place of the scaled ones. Beyond TransformerEngine, all formats are
    allowed then (its step has only fp32 masters, and moments that are both fp32 or both bf16): each
    stores the values of the same kernel. Three things differ on purpose:

    - `group["step"]` counts the steps that were taken. TransformerEngine's count looks at the
      overflow of the step before: after an overflow it is one too high until the next step, which
      it leaves out instead. Every update has the same number, and the same bits; but an overflow at
      the very first step stays counted there in all groups but the first.
    - Gradients that `GradScaler.unscale_` has unscaled are not unscaled again.
    - Without a grad_scaler gradients stay as they are. TransformerEngine writes them back there
      too, with zeros for subnormal numbers.

    Raises:
        ValueError: as megaopt.FusedAdam; also store_param_remainders without master_weights or
            without bf16 weights, which TransformerEngine switches off in silence.
        RuntimeError: a parameter is not on an NVIDIA GPU.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        capturable: bool = False,
        master_weights: MasterWeights = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
        set_grad_none: bool | None = None,
    ) -> None:
        arguments = locals()
        if set_grad_none is not None:
            warnings.warn(
                "set_grad_none in the constructor is deprecated: pass set_to_none to zero_grad",
                DeprecationWarning,
                stacklevel=2,
            )
        self.set_grad_none = set_grad_none
        super().__init__(**passed_on(arguments), direct_cast=True, makes_states="all")
        self.step_unscales = capturable

    def step(  # type: ignore[override]  # TransformerEngine's face
        self,
        closure: Callable[[], Any] | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
    ) -> Any:
        """One update, as megaopt.FusedAdam.step, without clipping.

        Args:
            closure: reevaluates the model and returns the loss.
            grad_scaler: with capturable, gradients are unscaled by its scale, and an infinity or
                NaN that it finds among them skips the step.

        Raises:
            ValueError: as megaopt.FusedAdam.step; also grad_scaler without capturable, which
                TransformerEngine ignores in silence.
        """
        base_step = functools.partial(super().step, closure)
        return step_with(self, base_step, grad_scaler, "TransformerEngine")

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Sets gradients to None, or to zero where set_to_none or set_grad_none is False.

        Raises:
            ValueError: set_to_none is not what set_grad_none was in the constructor.
        """
        chosen = self.set_grad_none
        if chosen is None:
            chosen = set_to_none
        elif set_to_none not in (None, chosen):
            raise ValueError(
                f"set_to_none must be the constructor's set_grad_none, {chosen}, got {set_to_none}"
            )
        super().zero_grad(chosen is None or chosen)

    def get_unscaled_state(
        self, param: torch.Tensor, state_name: str, skip_unscale: bool = False
    ) -> torch.Tensor:
        """The value as megaopt.FusedAdam gives it; with skip_unscale a bf16 state as it is."""
        stored = self.state.get(param, {}).get(state_name)
        if skip_unscale and isinstance(stored, torch.Tensor) and stored.dtype == torch.bfloat16:
            return stored
        return super().get_unscaled_state(param, state_name)

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state for pickle and deepcopy."""
        return {**super().__getstate__(), "set_grad_none": self.set_grad_none}
