"""fp8 weights of other libraries: what the step needs of them, and who finds it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megaopt.kernels.float8 import Float8Recipe, dequantize_reference, quantize_reference


@dataclass
class ForeignWeight:
    """Another library's fp8 weight as the step sees it: views of that library's own tensors.

    Made anew where the library has put other tensors in their place.
    It has the attributes of a Float8Weight that the step reads.
    """

    owner: Tensor
    """The library's tensor: its shape, its logical dtype, its device."""
    recipe: Float8Recipe
    data8: Tensor
    """The codes: the recipe's dtype, the owner's shape, contiguous."""
    scale_inv: Tensor
    """fp32, or uint8 for mxfp8; the recipe's `scale_shape`, rows may lie apart in memory."""
    codes_changed: Callable[[], None]
    """Tells the library that codes and scale_inv were written: caches made of them are stale."""
    made_of: Callable[[], Sequence[Tensor | None]]
    """Reads, as they are now, the library's tensors of which all of this was made."""
    initial: Callable[[], Tensor | None]
    """The values that the weight was made of, if the library kept them."""
    scale: Tensor | None = None
    """Delayed scaling: fp32, (1,), read; the library moves it on."""
    latest_amax: Tensor | None = None
    """Delayed scaling: fp32, (1,): where the library looks for the step's amax."""
    columnwise: tuple[Tensor, Tensor] | None = None
    """mxfp8: codes and scale_inv of blocks of 32 rows of a column, in the weight's own order."""

    amax_history = None
    is_foreign = True
    """Its library moves its scales, and has to be told of new codes."""

    @property
    def shape(self) -> torch.Size:
        """The weight's shape."""
        return self.owner.shape

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the weight has for everybody else."""
        return self.owner.dtype

    def dequantize(self) -> Tensor:
        """Code * scale_inv in fp32, not rounded to the weight's dtype; a plain tensor."""
        return dequantize_reference(self.data8, self.scale_inv, self.recipe, torch.float32)

    def high_precision_initial_value(self) -> Tensor | None:
        """The values that the weight was made of, on its device; None where they are gone."""
        values = self.initial()
        return None if values is None else values.to(self.owner.device)

    def quantize_(self, values: Tensor, dtype: torch.dtype | None = None) -> None:
        """Becomes these values: fp32, of the weight's shape; dtype: as Float8Weight's."""
        # codes along columns would stay those of the old values
        if self.columnwise is not None:
            raise ValueError(
                f"a {type(self.owner).__name__} with columnwise data is not set from here: use its "
                "own quantize_"
            )
        quantized = quantize_reference(values, self.recipe, dtype or self.dtype, self.scale)
        # written in place: the library's tensors stay the same
        self.data8.copy_(quantized.codes)
        self.scale_inv.copy_(quantized.scale_inv)
        if self.latest_amax is not None:
            self.latest_amax.copy_(torch.maximum(self.latest_amax, quantized.amax))
        # caches of the library, then autograd
        self.codes_changed()
        torch.autograd.graph.increment_version(self.owner)


Adapter = Callable[[Tensor], "ForeignWeight | None"]

ADAPTERS: list[Adapter] = []
"""Functions that see in a tensor their library's weight, or None. Integrations add them."""


def foreign_weight(tensor: Tensor) -> ForeignWeight | None:
    """The weight that an adapter sees in a tensor; None where none does."""
    for adapter in ADAPTERS:
        weight = adapter(tensor)
        if weight is not None:
            return weight
    return None
