"""The contracts: how each arithmetic operation of a step is rounded."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Contract:
    """A promise about bits. The rules that keep it are in megaopt.kernels.rules.RULES."""

    name: str
    promise: str
    backends: tuple[str, ...]
    """The backends on which the promise can be kept."""
    needs_gpu: str | None = None
    """Why only an NVIDIA GPU gives these bits; None where every device does."""


IEEE = Contract(
    "ieee",
    "fp32, each operation rounded to nearest even once, in a written order: the same bits on every "
    "backend",
    ("triton", "reference"),
)

TE = Contract(
    "te",
    "the bits of TransformerEngine's FusedAdam, on the GPU",
    ("triton",),
    "TransformerEngine's kernels use an NVIDIA GPU's approximate reciprocals and roots",
)

TORCH = Contract(
    "torch",
    "the bits of torch.optim.Adam and AdamW with fused=True, on the GPU",
    ("triton", "reference"),
    "torch's fused kernels compute bias corrections with CUDA's powf",
)

CONTRACTS = {contract.name: contract for contract in (IEEE, TE, TORCH)}
