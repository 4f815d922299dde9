"""Storage formats, and tables of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch


# equal only to itself: launches hash it
@dataclass(frozen=True, eq=False)
class Format:
    """A way to keep fp32 values in memory: one file a format, one row in this package's tables.

    `decode` and `encode` are Triton functions, `decode_reference` and `encode_reference` their
    torch twins; both work element by element and give the same bits.

    - plain: `decode(code, scale) -> fp32`, `encode(value, inverse) -> code`; scale and inverse are
      1 where the format has no scale.
    - joined (a master that lies beside its weight): `decode(weight_code, code) -> fp32`,
      `encode(value) -> (weight_code, code)`.

    Where the format draws, `encode` has a last argument: 16 random bits, an int32 for each element.

    The kernel sees a code as `element`, an integer or fp32 type of the dtype's width: rounding is
    done on the bits, because Triton's interpreter truncates where the GPU rounds.
    """

    name: str
    """The name in errors, records and the documentation."""
    dtype: torch.dtype | None
    """The dtype of the tensor that holds the codes; None where there is no such buffer."""
    element: Any
    """The Triton type under which the kernel loads and stores a code."""
    decode: Any
    encode: Any
    decode_reference: Callable[..., torch.Tensor]
    encode_reference: Callable[..., Any]
    code_max: float = 0.0
    """The code of the tensor's largest finite magnitude, where positive: a scale per tensor, that
    magnitude divided by code_max, goes with the codes."""
    scale_of_inverse: bool = False
    """The scale is 1 / inverse, rounded once more, as TransformerEngine's Float8Tensor keeps it;
    otherwise the quotient by code_max itself."""
    joined: bool = False
    """The codes mean something only together with the weight's."""
    requires_weight: torch.dtype | None = None
    """The only dtype of weights that a master in this format can lie beside; None: any."""
    draws: bool = False
    """Values are rounded stochastically: up with the probability that leaves the mean as it is."""
    block: int = 0
    """The size of a block, where positive: so many elements of the parameter, from its first on,
    share a scale of one byte (megaopt.kernels.formats.block8)."""
    window_offset: int = -1
    """Moves a block's window: its scale is the exponent of bits(amax) + window_offset. By -1
    a power of two is the largest of its window."""
    unsigned: bool = False
    """There are no codes for negative values."""
    one_nan: bool = False
    """Every NaN becomes the same code."""
    packed: int = 1
    """Codes that share an element of the tensor, which is so much shorter in the last dimension:
    2 are 4 bits each, that of even index the lower ones. In blocks only. `decode` and `encode` see
    a code by itself, as an int32."""

    decode_words: Any = None
    """Decodes int32 words with several codes each, the first in the lowest bits: a tuple of their
    first, second, ... numbers. For NVIDIA's GPUs from compute capability 9.0 on; elsewhere, and
    where it is None, codes are taken from the words one by one."""

    # made of these fields
    present: bool = field(init=False)
    """There is a buffer at all."""
    scaled: bool = field(init=False)
    """A scale per tensor goes with the codes."""
    has_scale: bool = field(init=False)
    """One or more scales go with the codes."""

    def __post_init__(self) -> None:
        scaled = self.code_max > 0
        has_scale = scaled or self.block > 0
        vars(self).update(present=self.dtype is not None, scaled=scaled, has_scale=has_scale)

    def drawn(self, encode: Any, encode_reference: Callable[..., Any], **more: Any) -> Format:
        """The same, rounded stochastically by these functions; more: other fields."""
        fields = {"encode": encode, "encode_reference": encode_reference, "draws": True}
        return replace(self, name=f"{self.name}_stochastic", **fields, **more)

    @property
    def codes_a_word(self) -> int:
        """The number of codes in 32 bits."""
        return 32 // int(self.element.primitive_bitwidth) * self.packed

    def stored_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of the tensor that holds the codes of a tensor of this shape.

        Raises ValueError where codes are packed and the last dimension is cut within an element.
        """
        if self.packed == 1:
            return tuple(shape)
        if not shape or shape[-1] % self.packed:
            raise ValueError(
                f"{self.name} keeps {self.packed} elements in a byte: the last dimension must be a "
                f"multiple of {self.packed}, got shape {tuple(shape)}"
            )
        return (*shape[:-1], shape[-1] // self.packed)

    def encode_by_hand(self, value: torch.Tensor, *inverse: torch.Tensor | None) -> Any:
        """Encodes values outside a step: a format that draws random bits rounds to nearest here.

        Other formats encode as encode_reference does. Ties of one that draws go away from zero:
        0x8000 is half of the last place in 16 random bits.
        """
        if not self.draws:
            return self.encode_reference(value, *inverse)
        # int32, one for each element; a joined format takes no inverse before them
        half = torch.full_like(value, 0x8000, dtype=torch.int32)
        rest = () if self.joined else (inverse or (None,))
        return self.encode_reference(value, *rest, half)

    def reads_as(self, form: Format) -> bool:
        """Returns whether another format's codes and scales are the same values in this one.

        So it is with rounding to nearest and stochastically, which differ in `encode` alone.
        """
        # everything that `decode` depends on
        scales = ("code_max", "scale_of_inverse", "block", "packed")
        names = ("dtype", "decode_reference", "joined", "requires_weight", *scales)
        return all(getattr(self, name) == getattr(form, name) for name in names)

    @cached_property
    def cache_key(self) -> str:
        """The key of Triton's compilation cache: a change of the source changes it."""
        # sources of the Triton functions, and fields that the compiled code depends on
        functions = (self.decode, self.encode, self.decode_words)
        keys = [getattr(function, "cache_key", "") for function in functions]
        scale = (self.code_max, self.scale_of_inverse, self.block, self.window_offset, self.packed)
        return f"{(self.name, self.element, self.joined, *scale)}:{keys}"


def converted(code: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
    """A twin of `decode`: the value, fp32; times the scale where there is one.

    A NaN is the canonical one: torch's conversions differ within one tensor, by place.
    """
    value = code.float()
    value = value.masked_fill(value.isnan(), torch.nan)
    return value if scale is None else value * scale.reshape(())


class FormatTable(dict[Any, Format]):
    """The formats that a kind of buffer may have, by name.

    A dtype finds the first format of that dtype; later ones of the same dtype, and those in blocks,
    are found by name alone.
    """

    def __init__(self, *formats: Format) -> None:
        super().__init__({form.name: form for form in formats})
        self._by_dtype = self._first_of_each()

    def add(self, form: Format) -> None:
        """Adds a row; raises ValueError where the table has the name."""
        if form.name in self:
            raise ValueError(f"form must have a name of its own, got {form.name!r} again")
        self[form.name] = form

    def __setitem__(self, name: str, form: Format) -> None:
        super().__setitem__(name, form)
        self._by_dtype = self._first_of_each()

    def __delitem__(self, name: str) -> None:
        super().__delitem__(name)
        self._by_dtype = self._first_of_each()

    def __getitem__(self, key: str | torch.dtype | None) -> Format:
        return super().__getitem__(key if isinstance(key, str) else self._by_dtype[key])

    def __contains__(self, key: object) -> bool:
        return super().__contains__(key) if isinstance(key, str) else key in self._by_dtype

    @property
    def allowed(self) -> list[str | torch.dtype | None]:
        """The keys of the formats, for options and messages: dtypes, else names.

        Options take torch.uint8 for fp8, as TransformerEngine does, whatever codes are bytes.
        """
        # the dtype that finds each format, where one does
        first = {name: dtype for dtype, name in self._by_dtype.items() if dtype != torch.uint8}
        return [first.get(name, name) for name in self]

    def _first_of_each(self) -> dict[torch.dtype | None, str]:
        """The first format of each dtype, which batches look for several times a parameter."""
        names: dict[torch.dtype | None, str] = {}
        for name, form in self.items():
            # those in blocks are found by name alone
            if not form.block:
                names.setdefault(form.dtype, name)
        return names

    def __str__(self) -> str:
        """Lists what is allowed, for messages."""
        return ", ".join(map(str, self.allowed))


def scale_shape(block: Sequence[int] | None, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of the scales of a parameter: one number, or, with a block, one for each block."""
    if block is None:
        return (1,)
    return tuple(-(-size // block_size) for size, block_size in zip(shape, block, strict=True))
