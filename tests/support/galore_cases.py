"""GaLore's twin on fp64 tensors, and runs of GaLoreAdamW."""

import dataclasses
import importlib
import sys
import types
from importlib.util import find_spec

import pytest
import torch
from runs import values

from megaopt.kernels.chunks.batch import Formats
from megaopt.kernels.formats import NONE, WEIGHTS
from megaopt.kernels.galore import rule as matrix
from megaopt.kernels.matrix.plan import MatrixPlan
from megaopt.kernels.rules import galore
from megaopt.kernels.rules.matrix import Matrix

# galore_torch's AdamW, without what its package imports and AdamW does not need.

_missing = [
    name
    for name in ("galore_torch", "transformers")
    if name not in sys.modules and find_spec(name) is None
]
needs_galore_torch = pytest.mark.skipif(bool(_missing), reason=f"needs {', '.join(_missing)}")


def adamw():
    """The module galore_torch.adamw; the package's own __init__ wants bitsandbytes."""
    if "galore_torch" not in sys.modules:
        package, spec = types.ModuleType("galore_torch"), find_spec("galore_torch")
        package.__path__, package.__spec__ = list(spec.submodule_search_locations), spec
        sys.modules["galore_torch"] = package
    return importlib.import_module("galore_torch.adamw")


def side_of(proj_type, shape):
    """Which side of the gradient is multiplied: the smaller dimension's by default."""
    rows, columns = shape
    by_shape = {"std": rows >= columns, "reverse_std": rows < columns}
    return "right" if by_shape.get(proj_type, proj_type in ("right", "auto")) else "left"


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

    In fp64 without the one NaN pattern that fp32 results have. matrix, rules: modules, for mutants
    of them. number: of the parameter, in the steps of whose turn it is refreshed.
    """

    def __init__(
        self, weight, side, rank, group, matrix=matrix, rules=galore, refresh="svd", number=0
    ):
        own = {"inner": rules.GALORE_DIRECTION, "apply": rules.GALORE_APPLY}
        self.numbers = rules.scalars
        if weight.dtype == torch.float64:
            own = {n: dataclasses.replace(rule, contract="fp64") for n, rule in own.items()}
            self.numbers = rules.numbers
        self.low_rank = matrix.LowRank(side, rank)
        moments = ("exp_avg", "exp_avg_sq")
        rule = Matrix(dataclasses.replace(matrix.GALORE, **own), self.low_rank)
        formats = Formats(FLOAT32, FLOAT32, NONE, (FLOAT32,) * 2, moments, matrix=rule)
        self.plan, self.by_svd = MatrixPlan(formats, [0]), refresh == "svd"
        self.matrix, self.group, self.count, self.number = matrix, group, 0, number
        self.weight, self.projection = weight.clone(), None
        small = self.low_rank.low_shape(weight.shape)
        self.moments = [torch.zeros(small, dtype=weight.dtype) for _ in moments]

    def step(self, grad):
        slots = ("weight", "exp_avg", "exp_avg_sq", "grad")
        tensors = (self.weight, *self.moments, grad)
        self.plan.look({slot: [each] for slot, each in zip(slots, tensors, strict=True)})
        if self.projection is None or self.count % GAP == self.number % GAP:
            own = (grad, self.low_rank, self.projection, self.by_svd, 0)
            self.projection = self.matrix.refreshed(*own)
        self.plan.works[0].kept = {"projection": self.projection}
        self.count += 1
        self.plan.step([self.numbers({**self.group, "step": self.count})])
