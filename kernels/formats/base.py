"""What a storage format is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch


# equal only to itself: launches hash it
@dataclass(frozen=True, eq=False)
class Format:
    """How fp32 values are kept in memory: one file a format, one row in the tables of this package.

    `decode` and `encode` are Triton functions, the `_reference` ones their torch twins; both work
    element by element and give the same bits.

    - plain: `decode(code, scale) -> fp32`, `encode(value, inverse) -> code`; scale and inverse are
      1 where the format has no scale.
    - joined (a master that lies beside its weight): `decode(weight_code, code) -> fp32`,
      `encode(value) -> (weight_code, code)`.

    The kernel sees a code as `element`, an integer or fp32 type of the dtype's width: rounding is
    done on the bits, because Triton's interpreter truncates where the GPU rounds.
    """

    name: str
    """As errors, records and the documentation call it."""
    dtype: torch.dtype | None
    """Of the tensor that holds the codes; None where there is no such buffer."""
    element: Any
    """The Triton type under which the kernel loads and stores a code."""
    decode: Any
    encode: Any
    decode_reference: Callable[..., torch.Tensor]
    encode_reference: Callable[..., Any]
    code_max: float = 0.0
    """Where positive: a scale per tensor goes with the codes, the tensor's largest finite magnitude
    divided by code_max."""
    scale_of_inverse: bool = False
    """The scale is 1 / inverse, rounded once more, as TransformerEngine's Float8Tensor keeps it;
    otherwise the quotient by code_max itself."""
    joined: bool = False
    """The codes mean something only together with the weight's."""

    @property
    def present(self) -> bool:
        """Whether there is a buffer at all."""
        return self.dtype is not None

    @property
    def scaled(self) -> bool:
        """Whether a scale per tensor goes with the codes."""
        return self.code_max > 0

    @cached_property
    def cache_key(self) -> str:
        """What Triton's compilation cache needs to know: a change of the source changes it."""
        functions = [getattr(f, "cache_key", "") for f in (self.decode, self.encode)]
        fields = (self.name, self.element, self.code_max, self.scale_of_inverse, self.joined)
        return f"{':'.join(map(str, fields))}:{functions}"
