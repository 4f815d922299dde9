"""The closed choices of the optimizers' arguments, as a type checker reads them."""

from __future__ import annotations

from typing import Literal

import torch

Contract = Literal["ieee", "te", "torch"]
"""How operations are rounded: the names of megaopt.kernels.contracts.CONTRACTS."""

Backend = Literal["auto", "triton", "reference"]
"""What runs a step: the names of megaopt.kernels.backends.BACKENDS, and the choice by device."""

Nonfinite = Literal["propagate", "skip", "error"]
"""What an infinity or NaN in a gradient does: goes through the step's arithmetic; leaves the whole
step out; raises FloatingPointError."""

ExternalWrite = Literal["refresh", "error", "ignore"]
"""What a step does about a weight that was written outside the optimizer: it sets the master to the
written elements, and warns once; it raises RuntimeError; it goes on from the master."""

Rounding = Literal["nearest", "stochastic"]
"""How weights without a master are rounded."""

StepCounts = Literal["group", "parameter"]
"""Whose steps count in a parameter's update: all of its group, or those that it took itself."""

MakesStates = Literal["stepped", "trainable", "all"]
"""Whose state a step makes: of parameters with a gradient; also of others that may get one
(requires_grad); of frozen ones too."""

MasterWeights = bool | list[torch.Tensor | None] | None
"""Whether weights have masters, or the masters."""

Recipe = Literal["delayed", "current", "block_128x128", "mxfp8"]
"""How weights become fp8: the names of megaopt.kernels.float8.RECIPES."""

ProjType = Literal["std", "reverse_std", "right", "left", "auto"]
"""On which side GaLoreAdamW projects a gradient."""

LowRankKernel = Literal["auto", "torch", "compiled", "hybrid", "grouped", "fused"]
"""What steps GaLoreAdamW's matrices with a rank."""

Precision = Literal["ieee", "tf32", "bf16"]
"""What GaLoreAdamW's products round numbers to: megaopt.kernels.matrix.products.PRECISIONS."""

Refresh = Literal["subspace", "svd"]
"""How GaLoreAdamW's projections follow the gradient."""

MuonContract = Literal["ieee", "torch", "eo"]
"""How FusedMuon rounds: its own way, or the bits of torch.optim.Muon or of Emerging-Optimizers'."""

MuonMethod = Literal["auto", "standard", "gram"]
"""In which form FusedMuon iterates; "auto" goes by a matrix's shape and the precision."""

MuonPrecision = Literal["bf16", "fp16"]
"""What FusedMuon's products round numbers to."""

SteppedBy = Literal["muon", "adamw", "both"]
"""The rule, or both, whose parameters a state dict of FusedMuon has."""

SecondMoment = Literal["normuon"]
"""What FusedMuon keeps beside the momentum."""
