"""The update rules, by name and contract."""

from __future__ import annotations

from megaopt.kernels.rules.adam_ieee import (
    ADAM_AMSGRAD_IEEE,
    ADAM_IEEE,
    ADAMW_AMSGRAD_IEEE,
    ADAMW_IEEE,
)
from megaopt.kernels.rules.adam_te import ADAM_TE, ADAMW_TE
from megaopt.kernels.rules.adam_torch import (
    ADAM_AMSGRAD_TORCH,
    ADAM_TORCH,
    ADAMW_AMSGRAD_TORCH,
    ADAMW_TORCH,
)
from megaopt.kernels.rules.average import EMA
from megaopt.kernels.rules.base import Moment, Rule
from megaopt.kernels.rules.lion import LION
from megaopt.kernels.rules.sgd import SGD_RULES

RULES = {
    (rule.name, rule.contract): rule
    for rule in (
        *(ADAMW_IEEE, ADAM_IEEE, ADAMW_AMSGRAD_IEEE, ADAM_AMSGRAD_IEEE),
        *(ADAMW_TE, ADAM_TE),
        *(ADAMW_TORCH, ADAM_TORCH, ADAMW_AMSGRAD_TORCH, ADAM_AMSGRAD_TORCH),
        LION,
        *SGD_RULES,
    )
}

__all__ = ["EMA", "RULES", "Moment", "Rule"]
