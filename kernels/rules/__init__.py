"""The update rules, by name and contract."""

from __future__ import annotations

from megaopt.kernels.rules.adam_ieee import ADAM_IEEE, ADAMW_IEEE
from megaopt.kernels.rules.adam_te import ADAM_TE, ADAMW_TE
from megaopt.kernels.rules.adam_torch import ADAM_TORCH, ADAMW_TORCH
from megaopt.kernels.rules.base import Rule

RULES = {
    (rule.name, rule.contract): rule
    for rule in (ADAMW_IEEE, ADAM_IEEE, ADAMW_TE, ADAM_TE, ADAMW_TORCH, ADAM_TORCH)
}

__all__ = ["RULES", "Rule"]
