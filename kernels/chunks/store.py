"""Stores, how a step's pass stores weights, and quantizers, which give fp8 weights their scales.

Both are values, compile-time ones in kernels, as formats and rules are. A Store, what the step's
own pass does with weights, is apart from its Quantizer: plain weights need nothing else, and what a
pass cannot do takes another store (LATER) of the same quantizer. What is alike for all of them,
passes over masters, tiles and shards, goes by the shape of blocks (cast.py, tiles.py, launch.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any, Protocol

import torch

from megaopt.kernels.chunks.blocks import store_block
from megaopt.kernels.chunks.draws import weight_bits
from megaopt.kernels.formats.base import Format
from megaopt.kernels.optional_triton import helper, tl
from megaopt.kernels.rules.base import digest


class Left(Enum):
    """The work left to do for a weight when the step's pass is through."""

    NOTHING = "nothing"
    SHARED = "codes of blocks of which other ranks have a part"
    CODES = "all codes"
    ALL = "amaxes and codes"


@helper
def no_scale(column, FORMATS: tl.constexpr):
    return 1.0


@helper
def put_nothing(pointers, block, param, scale, amax_bits, words, FORMATS: tl.constexpr):
    return amax_bits


@helper
def same_value(scale_inv):
    return scale_inv


@helper
def finish_nothing(column, start, scale, amax_bits, FORMATS: tl.constexpr):
    pass


# equal only to itself: launches hash it
@dataclass(frozen=True, eq=False)
class Store:
    """A way in which the step's pass stores weights; its kernel calls three Triton functions.

    What they are given is described in megaopt.kernels.chunks.chunk.

    - `begin(column, FORMATS) -> scale`: before a chunk.
    - `put(pointers, block, param, scale, amax_bits, words, FORMATS) -> amax_bits`: a block of new
      fp32 values; amax_bits, int32 and one for each, are 0 at first; words: random ones
      (megaopt.kernels.chunks.draws) where the formats draw.
    - `finish(column, start, scale, amax_bits, FORMATS)`: behind a chunk.
    - `tile`, in place of them: steps and casts a tile of 128 x 128 (tiles.tile_in_lines).
    """

    name: str
    left: Left = Left.NOTHING
    begin: Any = no_scale
    put: Any = put_nothing
    finish: Any = finish_nothing
    tile: Any = None
    tile_options: Mapping[str, object] = field(default_factory=dict)
    """The options of the launch over tiles."""
    in_place: bool = False
    """True where the pass reads and stores the codes of a weight without a master: no fp32 value of
    an element lasts for longer. With tiles only where no other rank has a part of the weight."""

    @cached_property
    def cache_key(self) -> str:
        """The key of Triton's compilation cache: a change of the source changes it."""
        return digest(self.name, self.begin, self.put, self.finish, self.tile)


@helper
def drawn_code(value, words, FORMAT: tl.constexpr):
    # the lower 16 bits of each element's word
    if FORMAT.draws:
        code = FORMAT.encode(value, 1.0, weight_bits(words))
    else:
        code = FORMAT.encode(value, 1.0)
    return code


@helper
def joined_codes(value, words, FORMAT: tl.constexpr):
    """The codes of a weight and of what lies beside it."""
    return FORMAT.encode(value, weight_bits(words)) if FORMAT.draws else FORMAT.encode(value)


@helper
def put_plain(pointers, block, param, scale, amax_bits, words, FORMATS: tl.constexpr):
    FORMAT: tl.constexpr = FORMATS.weight
    store_block(pointers.weight, block.offsets, drawn_code(param, words, FORMAT), block.mask)
    # as they came: plain weights have no scale
    return amax_bits


PLAIN = Store("plain", put=put_plain)
"""The store of weights without scales: nothing of fp8 is here."""
LATER = Store("later", Left.ALL)
"""fp8 weights of which one pass over the masters finds the amaxes, and one stores the codes."""


class Recipe(Protocol):
    """A megaopt.kernels.float8.Float8Recipe, which describes its options, as quantizers read it."""

    @property
    def quantizer(self) -> Quantizer: ...
    @property
    def format(self) -> Format: ...
    @property
    def block(self) -> tuple[int, int] | None: ...
    @property
    def direct(self) -> bool: ...
    @property
    def code_max(self) -> float: ...
    @property
    def code_max_inverse(self) -> float: ...
    @property
    def power_of_two_scales(self) -> bool | None: ...
    @property
    def amax_epsilon(self) -> float: ...
    @property
    def amax_history_len(self) -> int: ...
    @property
    def amax_compute_algo(self) -> str: ...
    def scale_shape(self, shape: torch.Size) -> tuple[int, ...]: ...


# equal only to itself: launches hash it
@dataclass(frozen=True, eq=False)
class Quantizer:
    """A source of the scales of fp8 weights: one file and one row of the table a scaling.

    `scale(column, amax_bits, FORMATS) -> scale, scale_inv` (Triton) and its twin
    `scales_reference(amax, recipe, scale)` give what values are multiplied by, fp32, and scale_inv
    as it is stored, of one amax or many, each of a whole weight or block. The twin's `scale` is the
    one that the weight keeps, or None.
    """

    name: str
    """Float8Recipe's `scaling`."""
    options: tuple[str, ...]
    """The options of Float8Recipe that it looks at, beside dtype and direct."""
    store: Store
    scale: Any
    scales_reference: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    rows: int = 0
    """Rows of a block, whose elements share a scale: 128, or 1; 0: the whole tensor shares one."""
    columns: int = 0
    """Likewise: 128, or, of one row, a divisor of it."""
    scale_dtype: torch.dtype = torch.float32
    """The dtype of scale_inv."""
    scale_element: Any = tl.float32
    """The Triton type under which kernels store it."""
    value_reference: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.float
    """The factor of codes, fp32, from scale_inv."""
    value: Any = same_value
    """The same in Triton."""
    move: Callable[..., None] | None = None
    """`move(table, recipe, controls)` launches the kernel that makes the next step's scales, for
    weights that keep a scale and amaxes; else None. table: int64 [4, weights], addresses of
    histories, scales, amaxes."""
    move_reference: Callable[..., None] | None = None
    """`move_reference(history, scale, recipe)`, its twin, of one weight."""

    @property
    def keeps_scale(self) -> bool:
        """Weights have a scale and an amax_history beside scale_inv."""
        return self.move is not None

    @cached_property
    def cache_key(self) -> str:
        """The key of Triton's compilation cache: a change of the source changes it."""
        fields = (self.name, self.rows, self.columns, self.scale_element, self.store.cache_key)
        return digest(fields, self.scale, self.value)
