"""FusedAdam in the place of apex.optimizers.FusedAdam: its face, its bits.

apex's multi_tensor_adam and TransformerEngine's run the same instructions: the contract is te. apex
itself is not needed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import megaopt


class FusedAdam(megaopt.FusedAdam):
    """apex's FusedAdam, equal in every bit on an NVIDIA GPU.

    The arguments are apex's, with its order and defaults; the state is fp32, and the weights alone
    are updated. Refused: capturable, and master_weights, which apex has only with it.

    Raises:
        ValueError: as megaopt.FusedAdam.
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
        if master_weights and not capturable:
            raise ValueError(
                "master_weights=True is not allowed: apex keeps masters only with capturable=True; "
                "megaopt.FusedAdam(..., contract='te', master_weights=True) keeps them"
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
            contract="te",
        )
        self.set_grad_none = set_grad_none

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Sets the gradients to None, or to zero where set_grad_none is False."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)
