"""GaLore's twin on fp64 tensors, and runs of GaLoreAdamW."""

import dataclasses

import torch
from runs import values

from megaopt.kernels.formats import NONE, WEIGHTS
from megaopt.kernels.lowrank import reference
from megaopt.kernels.lowrank.spec import LowRank
from megaopt.kernels.rules import galore
from megaopt.kernels.step.batch import Formats

FLOAT32 = WEIGHTS["float32"]
GROUP = {
    "lr": 0.01,
    "betas": (0.9, 0.999),
    "eps": 1e-6,
    "weight_decay": 0.1,
    "bias_correction": True,
    "scale": 0.25,
}
SHAPES = {"square": (16, 16), "tall": (21, 12), "wide": (12, 20)}
GAP = 3
"""Steps from refresh to refresh."""


def grad_of(shape, step, dtype=torch.float64):
    return values(shape, 100 + step).to(dtype)


class Twin:
    """The twin's own plan, refreshed as galore_torch does, on tensors of any dtype.

    In fp64 without the one NaN pattern that fp32 results have. reference, rules: modules, for
    mutants of them. number: of the parameter, in the steps of whose turn it is refreshed.
    """

    def __init__(
        self, weight, side, rank, group, reference=reference, rules=galore, refresh="svd", number=0
    ):
        names = ("GALORE_DIRECTION", "GALORE_APPLY")
        self.rules = {name: getattr(rules, name) for name in names}
        self.numbers = rules.scalars
        if weight.dtype == torch.float64:
            own = self.rules.items()
            self.rules = {name: dataclasses.replace(rule, contract="fp64") for name, rule in own}
            self.numbers = rules.numbers
        low_rank = LowRank(side, rank)
        moments = ("exp_avg", "exp_avg_sq")
        formats = Formats(FLOAT32, FLOAT32, NONE, (FLOAT32,) * 2, moments, low_rank=low_rank)
        self.plan = reference.LowRankReferencePlan(formats, refresh, [0])
        self.module, self.group, self.count, self.number = reference, group, 0, number
        self.weight, self.projection = weight.clone(), None
        small = low_rank.low_shape(weight.shape)
        self.moments = [torch.zeros(small, dtype=weight.dtype) for _ in moments]

    def step(self, grad):
        slots = ("weight", "exp_avg", "exp_avg_sq", "grad")
        tensors = (self.weight, *self.moments, grad)
        self.plan.look({slot: [each] for slot, each in zip(slots, tensors, strict=True)})
        if self.projection is None or self.count % GAP == self.number % GAP:
            self.projection, _ = self.plan.refreshed(0, self.projection, 0)
        self.plan.projections = [self.projection]
        self.count += 1
        were = {name: getattr(self.module, name) for name in self.rules}
        vars(self.module).update(self.rules)
        try:
            self.plan.step([self.numbers({**self.group, "step": self.count})])
        finally:
            vars(self.module).update(were)
