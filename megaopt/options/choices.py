"""The closed choices of the optimizers' arguments, as a type checker reads them."""

from __future__ import annotations

from typing import Literal

import torch

Contract = Literal["ieee", "te", "torch"]
"""The rounding of operations: the names of megaopt.kernels.contracts.CONTRACTS."""

Backend = Literal["auto", "triton", "reference"]
"""The code that runs a step: names of megaopt.kernels.backends.BACKENDS, or a choice by device."""

Nonfinite = Literal["propagate", "skip", "error"]
"""The effect of an infinity or NaN in a gradient: it goes through the step's arithmetic; the whole
step is left out; FloatingPointError is raised."""

ExternalWrite = Literal["refresh", "error", "ignore"]
"""The reaction of a step to a weight that was written outside the optimizer: it sets the master to
the written elements, and warns once; it raises RuntimeError; it goes on from the master."""

Rounding = Literal["nearest", "stochastic"]
"""The rounding of weights without a master."""

StepCounts = Literal["group", "parameter"]
"""The steps that count in a parameter's update: all of its group, or those that it took itself."""

MakesStates = Literal["stepped", "trainable", "all"]
"""The states that a step makes: of parameters with a gradient; also of others that may get one
(requires_grad); of frozen ones too."""

MasterWeights = bool | list[torch.Tensor | None] | None
"""Whether weights have masters, or the masters."""

Recipe = Literal["delayed", "current", "block_128x128", "mxfp8"]
"""The recipes by which weights become fp8: the names of megaopt.kernels.float8.RECIPES."""

ProjType = Literal["std", "reverse_std", "right", "left", "auto"]
"""The side on which GaLoreAdamW projects a gradient."""

LowRankKernel = Literal["auto", "torch", "compiled", "hybrid", "grouped", "fused"]
"""The code that steps GaLoreAdamW's matrices with a rank."""

Precision = Literal["ieee", "tf32", "bf16"]
"""The precision of GaLoreAdamW's products: megaopt.kernels.galore.products.PRECISIONS."""

Refresh = Literal["subspace", "svd"]
"""The way in which GaLoreAdamW's projections follow the gradient."""

MuonContract = Literal["ieee", "torch", "eo"]
"""The rounding of FusedMuon: its own, or that of torch.optim.Muon or of Emerging-Optimizers."""

MuonMethod = Literal["auto", "standard", "gram"]
"""The form in which FusedMuon iterates; "auto" goes by a matrix's shape and the precision."""

MuonPrecision = Literal["bf16", "fp16"]
"""The precision of FusedMuon's products."""

SteppedBy = Literal["muon", "adamw", "both"]
"""The rule, or both, whose parameters a state dict of FusedMuon has."""

SecondMoment = Literal["normuon"]
"""The second moment that FusedMuon keeps beside the momentum."""
