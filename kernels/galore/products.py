"""Matrix products of a stated precision, whatever torch's global settings say.

A product's numbers are rounded not at all (ieee), to 10 bits (tf32), or to bf16, to nearest, ties
to even. Tensor cores alone would cut tf32 off, with twice the error and a bias. Rounded numbers are
multiplied as docs/numbers.md's "Products" says, on any machine; ieee sums are fp32's, in an order
that a library chooses, as are those of `parts_product`, which refreshes take.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from megaopt.kernels.formats import Format, bfloat16
from megaopt.kernels.optional_triton import INTERPRETED, cuda_capability_geq, helper, tl
from megaopt.kernels.products.chain import chained
from megaopt.kernels.products.launch import products

IEEE, TF32, BF16 = "ieee", "tf32", "bf16"
PRECISIONS = (IEEE, TF32, BF16)

AS_INTERPRETED: tl.constexpr = tl.constexpr(INTERPRETED)
"""The interpreter cuts fp32 numbers to bf16 where a GPU rounds them."""
ON_NVIDIA: tl.constexpr = tl.constexpr(torch.version.hip is None)


@helper
def rounded_to_tf32(value):
    if cuda_capability_geq(9, 0):  # the same of all 2**32 patterns but NaN's, on an H100
        rounded = tl.inline_asm_elementwise(
            "cvt.rn.tf32.f32 $0, $1;", "=r,f", [value], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        # to 10 bits of the mantissa: what is cut off carries from half a place on, at a tie to even
        bits = value.to(tl.int32, bitcast=True)
        rounded = (bits + 0xFFF + ((bits >> 13) & 1)) & -0x2000
        # a NaN could be carried into another number
        rounded = tl.where(value == value, rounded.to(tl.float32, bitcast=True), value)
    return rounded


@helper
def operand(value, PRECISION: tl.constexpr):
    """fp32 values as a product takes them."""
    if PRECISION == "bf16":
        if AS_INTERPRETED:
            # by integers, to nearest, ties to even
            value = bfloat16.encode(value, 1.0).to(tl.bfloat16, bitcast=True)
        else:
            value = value.to(tl.bfloat16)
    elif PRECISION == "tf32":
        value = rounded_to_tf32(value)
    return value


@helper
def loaded(ptr, offsets, mask, EVEN: tl.constexpr):
    """A tile; EVEN: whole, of rows that begin at multiples of 16 bytes."""
    if EVEN:
        # on the sum: a hint on a function's argument would be lost
        tile = tl.load(tl.multiple_of(ptr + offsets, (1, 16)))
    else:
        tile = tl.load(ptr + offsets, mask=mask, other=0)
    return tile


@helper
def in_order(value):
    """fp32 values, of which Triton does not see that they were loaded in 16 bits.

    It would give a small tile's instructions of 8 terms every other pair of those of 16.
    """
    if ON_NVIDIA and not AS_INTERPRETED:
        value = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [value], dtype=tl.float32, is_pure=False, pack=1
        )
    return value


@helper
def taken(tile, FORMAT: tl.constexpr, PRECISION: tl.constexpr):
    """A loaded tile as a product takes it."""
    # bf16 tiles are what products take; others are decoded to fp32 and rounded
    if tile.dtype != tl.bfloat16:
        value = operand(FORMAT.decode(tile, 1.0), PRECISION)
        if PRECISION == "tf32" and tile.dtype.primitive_bitwidth < 32:
            value = in_order(value)
        tile = value
    return tile


@helper
def added_product(left, right, total, PRECISION: tl.constexpr):
    """Total + left @ right, of operands; fp32."""
    if PRECISION == "ieee":
        # a sum for each tile: one long one, a number at a time, was up to 4 times as far from fp64
        # as torch's. Minus, because Triton would take a plus into the product's own sum.
        total -= tl.dot(-left, right, input_precision="ieee")
    else:
        total = chained(left, right, total)
    return total


def element_of(form: Format, precision: str) -> Any:
    """Returns the Triton type as which a product's tiles are loaded."""
    is_exact = precision == BF16 and form.dtype == torch.bfloat16
    return tl.bfloat16 if is_exact else form.element


@dataclass(frozen=True)
class Product:
    """The product of a matrix, gradients or directions, with a projection of rank `rank`."""

    form: Format
    """The format of the matrix."""
    projection: Format
    precision: str
    """The precision, one of PRECISIONS."""
    on_left: bool
    """The projection stands on the left (rule.LEFT)."""
    even: bool
    """Only whole tiles, rows of which begin at multiples of 16 bytes."""
    rank: int
    turned: bool = False
    """The right factor's columns, along which sums go, lie one behind another."""
    projection_rounded: bool = False
    """The projection was rounded ahead;"""
    form_rounded: bool = False
    """and the matrix."""

    @property
    def element(self) -> Any:
        """The Triton type as which the matrix is loaded."""
        return element_of(self.form, self.precision)

    @property
    def projection_element(self) -> Any:
        """The Triton type as which the projection is loaded."""
        return element_of(self.projection, self.precision)


def operand_reference(value: torch.Tensor, precision: str) -> torch.Tensor:
    """Returns fp32 values as a product takes them, in fp32; fp64 ones stay.

    Every precision has bf16's.
    """
    if value.dtype == torch.bfloat16:
        return value.float()
    if value.dtype != torch.float32 or precision == IEEE:
        return value
    if precision == BF16:
        return value.bfloat16().float()
    # as rounded_to_tf32
    bits = value.view(torch.int32)
    rounded = (bits + 0xFFF + ((bits >> 13) & 1)) & -0x2000
    return torch.where(value.isnan(), value, rounded.view(torch.float32))


@contextmanager
def _without_autocast() -> Iterator[None]:
    """Turns torch.autocast off, which would make the products of fp32 numbers in 16 bits."""
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    try:
        for kind in kinds:
            torch.set_autocast_enabled(kind, False)
        yield
    finally:
        for kind in kinds:
            torch.set_autocast_enabled(kind, True)


@contextmanager
def fp32_products(precision: str) -> Iterator[None]:
    """Has torch multiply fp32 numbers so: IEEE or TF32, whatever its own settings say."""
    backends: Any = torch.backends  # whose types lack some of it
    places = (backends.cuda.matmul, backends.mkldnn.matmul)
    were = [place.fp32_precision for place in places]
    try:
        for place in places:
            place.fp32_precision = precision
        yield
    finally:
        for place, was in zip(places, were, strict=True):
            place.fp32_precision = was


@_without_autocast()
def product(left: torch.Tensor, right: torch.Tensor, precision: str = IEEE) -> torch.Tensor:
    """Returns the matrix product of fp32 tensors [m, k] and [k, n], fp32; or of fp64 ones, fp64.

    precision: of fp32 numbers in products, of PRECISIONS, and with bf16 they may be bf16. "tf32"
    and "bf16": docs/numbers.md's "Products". "ieee": torch's, of fp32 numbers.
    """
    if precision == IEEE or left.dtype == torch.float64:
        with fp32_products(IEEE):
            return _aligned(left) @ _aligned(right)
    # rounded first, then multiplied with the bits of tensor cores
    if precision == BF16:
        left, right = left.bfloat16(), right.bfloat16()
    else:
        left, right = (operand_reference(matrix, TF32) for matrix in (left, right))
    return products([left], [right], out_dtype=torch.float32)[0]


@_without_autocast()
def parts_product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Returns the matrix product of fp32 [m, k] and any [k, n], fp32.

    It is about as near as one of fp32 numbers. Where a GPU is given `right` in bf16, each of `left`
    goes as two numbers of bf16, to 2**-16 of it, and tensor cores multiply them, by torch: 41 us
    for 128 by 4096 x 11008 on an H200, three such numbers 52, fp32 ones 230. Two of fp16 would lose
    what is below 2**-25.
    """
    if not (right.is_cuda and right.dtype == torch.bfloat16):
        # this way, so that with other columns beside them a column's bits stay, as far as they do
        return product(right.mT.to(left.dtype), left.mT).mT
    rows, terms = left.shape
    # bf16 [2, rows, terms]: left rounded, and what the rounding left over
    pair = torch.empty((2, rows, terms), dtype=right.dtype, device=right.device)
    torch.sub(left, pair[0].copy_(left), out=pair[1])
    # fp32 [2 rows, n] by one product; the halves of each number are added up
    halves = torch.mm(pair.view(2 * rows, terms), _aligned(right), out_dtype=torch.float32)
    return halves[:rows] + halves[rows:]


def _aligned(matrix: torch.Tensor) -> torch.Tensor:
    """Returns the matrix at an address that torch's own allocations may have.

    Libraries choose how to multiply by the address, too.
    """
    return matrix.clone() if matrix.data_ptr() % (16 if matrix.is_cuda else 64) else matrix
