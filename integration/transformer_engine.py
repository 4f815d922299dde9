"""FusedAdam in the place of transformer_engine.pytorch.optimizers.FusedAdam: its face, its bits.

Changing the import is all it takes, and moves no loss: the contract is te. TransformerEngine itself
is not needed. Where TransformerEngine ignores an option in silence, this one raises.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

import megaopt
from megaopt.masters import MasterWeights


class FusedAdam(megaopt.FusedAdam):
    """TransformerEngine 2.20's FusedAdam, equal in every bit on an NVIDIA GPU.

    The arguments are TransformerEngine's, with its order and defaults; megaopt.FusedAdam documents
    them. Moments in fp8 (torch.uint8) are plain torch.float8_e4m3fn tensors, and the scale of
    exp_avg is `state[p]["exp_avg_scale"]`, where TransformerEngine has a Float8Tensor's _data and
    _scale_inv. Not supported yet, and refused: capturable, fp8 weights.

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
        if set_grad_none is not None:
            raise ValueError(
                f"set_grad_none={set_grad_none!r} is not allowed: pass set_to_none to zero_grad"
            )
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            bias_correction=bias_correction,
            adam_w_mode=adam_w_mode,
            capturable=capturable,
            master_weights=master_weights,
            master_weight_dtype=master_weight_dtype,
            exp_avg_dtype=exp_avg_dtype,
            exp_avg_sq_dtype=exp_avg_sq_dtype,
            use_decoupled_grad=use_decoupled_grad,
            store_param_remainders=store_param_remainders,
            contract="te",
        )
