"""Products of lists of matrices: one launch on a GPU, the twin elsewhere, to the same bits.

Launches are imported where one is made: without a GPU nobody needs what they import.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch

from megaopt.kernels.chunks.table import is_capturing
from megaopt.kernels.products.epilogue import (
    OUTS,
    Factors,
    ProductCoefficients,
    products_with_epilogue,
)
from megaopt.kernels.products.reference import OPERANDS
from megaopt.kernels.subnormals import check_subnormals

if TYPE_CHECKING:
    from megaopt.kernels.products.tables import ProductTile, Tables


@torch.no_grad()
def products(
    left: Sequence[torch.Tensor],
    right: Sequence[torch.Tensor],
    out: Sequence[torch.Tensor] | None = None,
    *,
    add: Sequence[torch.Tensor] | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    diagonal: float = 0.0,
    scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    tables: Tables | None = None,
    launches: bool | None = None,
    tile: ProductTile | None = None,
) -> list[torch.Tensor]:
    """Makes scale[i] (alpha left[i] @ right[i] + beta add[i] + diagonal I).

    With the bits of docs/numbers.md's "Products". alpha, beta and diagonal are rounded to fp32. The
    sum times alpha, add times beta, the sum of both, that and diagonal, and that times scale are
    rounded once each to fp32, and the last once to the result's dtype. NaNs are 0x7FFFFFFF, or
    0x7FFF.

    Args:
        left: [m, k] of any shapes, all bf16, all fp16, or all fp32 on one device; products cut fp32
            to TF32. Rows or columns lie in memory without gaps between numbers.
        right: [k, n], likewise.
        out: fp32, bf16 or fp16 [m, n], all alike; rows without gaps. They may be what is added,
            and share no memory otherwise. None: new ones.
        add: likewise.
        alpha: of the products.
        beta: of what is added.
        diagonal: what is added to the results' diagonals.
        scale: fp32 [products] on the matrices' device; None: no factors.
        out_dtype: of new results; None: left's.
        tables: what to keep for further calls; None: nothing, which no CUDA graph can capture.
        launches: whether to launch the kernel, or have the twin compute; None: on a GPU.
        tile: for tests.

    Raises:
        ValueError: lists are not of one length, matrices not of such shapes, dtypes or strides,
            out_dtype is given beside out, out is an inference tensor outside of inference mode, or
            tables is None within a capture.
        RuntimeError: this thread of a CPU makes zeros of subnormal numbers.
    """
    factors = factors_of(left, right, out, add, scale, out_dtype)
    numbers = ProductCoefficients(alpha, beta, diagonal)
    return _multiply(factors, (False, False), numbers, tables, launches, tile)


@torch.no_grad()
def symmetric_products(
    matrices: Sequence[torch.Tensor],
    out: Sequence[torch.Tensor] | None = None,
    *,
    right: Sequence[torch.Tensor] | None = None,
    add: Sequence[torch.Tensor] | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    diagonal: float = 0.0,
    scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    tables: Tables | None = None,
    launches: bool | None = None,
    tile: ProductTile | None = None,
) -> list[torch.Tensor]:
    """Makes scale (alpha A A^T + beta add + diagonal I) of each matrix A [m, k].

    In little more than half of the time of `products`, whose bits and arguments it has. Where A is
    symmetric A A^T is A^2. add is symmetric to the bit, which is not looked at.

    right: [k, m], in the place of A^T. Of such a product the numbers on and below the diagonal are
    made, and stand above it, too: for products that are symmetric but for roundings, as those of
    polynomials of one symmetric matrix are.
    """
    turned = [matrix.mT for matrix in matrices] if right is None else right
    factors = factors_of(matrices, turned, out, add, scale, out_dtype)
    numbers = ProductCoefficients(alpha, beta, diagonal)
    return _multiply(factors, (True, right is None), numbers, tables, launches, tile)


def factors_of(
    left: Sequence[torch.Tensor],
    right: Sequence[torch.Tensor],
    out: Sequence[torch.Tensor] | None,
    add: Sequence[torch.Tensor] | None,
    scale: torch.Tensor | None,
    out_dtype: torch.dtype | None = None,
) -> list[Factors]:
    """The factors of each product, as `products` takes them; raises its ValueErrors."""
    if out is not None and out_dtype is not None:
        raise ValueError(f"out_dtype must be None beside out, got {out_dtype}")
    if out is None:
        dtype = out_dtype or (left[0].dtype if left else None)
        pairs = zip(left, right, strict=False)  # lengths are looked at below
        out = [a.new_empty(a.shape[0], b.shape[1], dtype=dtype) for a, b in pairs]
    # from here on lists of one length; None where nothing is added
    added: Sequence[Any] = [None] * len(left) if add is None else add
    lists: dict[str, Sequence[Any]] = {"left": left, "right": right, "add": added, "out": out}
    for name, matrices in lists.items():
        if len(matrices) != len(left):
            raise ValueError(f"{name} must have {len(left)} matrices, as left, got {len(matrices)}")
        for index, matrix in enumerate(matrices):
            if not isinstance(matrix, torch.Tensor) and not (name == "add" and add is None):
                raise ValueError(f"{name}[{index}] must be a matrix, got {matrix!r}")
    # one factor a product, each a view of shape ()
    factors: Sequence[Any] = [None] * len(left)
    if scale is not None:
        if scale.dtype != torch.float32 or scale.shape != (len(left),):
            description = f"{scale.dtype} {list(scale.shape)}"
            raise ValueError(f"scale must be torch.float32 [{len(left)}], got {description}")
        factors = scale.unbind()
    products = [
        # what a view has in a bit of its own, as its sign, a kernel does not see
        Factors(a.resolve_neg(), b.resolve_neg(), None if c is None else c.resolve_neg(), d, e)
        for a, b, c, d, e in zip(*lists.values(), factors, strict=True)
    ]
    for index, product in enumerate(products):
        _check(index, product, products[0])
    return products


def _multiply(
    products: Sequence[Factors],
    symmetry: tuple[bool, bool],
    numbers: ProductCoefficients,
    tables: Tables | None,
    launches: bool | None,
    tile: ProductTile | None,
) -> list[torch.Tensor]:
    results = [product.out for product in products]
    if not products:
        return results
    device, (is_mirrored, is_squared) = products[0].out.device, symmetry
    # tensor cores count subnormal numbers, and so must the twin
    if device.type != "cuda":
        check_subnormals()
    # autograd learns that results are written in place
    torch.autograd.graph.increment_version(results)
    # the twin; a square is symmetric by itself, other symmetric products are mirrored
    if not (device.type == "cuda" if launches is None else launches):
        products_with_epilogue(products, numbers, is_mirrored and not is_squared)
        return results
    # within a capture tables must outlive this call, as replays read them
    if tables is None and is_capturing(device):
        raise ValueError("tables must be given within the capture of a CUDA graph, got None")
    if tables is None:
        from megaopt.kernels.products.tables import Tables

        tables = Tables()
    for launch, runs in tables.prepared(products, symmetry, numbers, tile):
        launch(runs, numbers)
    return results


def _check(index: int, product: Factors, first: Factors) -> None:
    left, right, added, out, _ = product
    matrix: Any
    for name, matrix in (("left", left), ("right", right)):
        if matrix.dim() != 2 or 1 not in matrix.stride():
            layout = f"{list(matrix.shape)} with strides {list(matrix.stride())}"
            raise ValueError(f"{name}[{index}] must be a matrix with a stride of 1, got {layout}")
    (m, k), (terms, n) = left.shape, right.shape
    if k != terms:
        shapes = f"{[m, k]} and {[terms, n]}"
        raise ValueError(
            f"left[{index}] and right[{index}] must be [m, k] and [k, n], got {shapes}"
        )
    # operands are all of one dtype, results too, and what is added
    for name, matrix, like in (
        ("left", left, first.left), ("right", right, first.left),
        ("out", out, first.out), ("add", added, first.added),
    ):  # fmt: skip
        if matrix is None or like is None:
            continue
        is_operand = name in ("left", "right")
        dtypes: Collection[torch.dtype] = OPERANDS if is_operand else OUTS
        if matrix.dtype not in dtypes:
            allowed = ", ".join(map(str, dtypes))
            raise ValueError(
                f"{name}[{index}] must be of one of the dtypes {allowed}, got {matrix.dtype}"
            )
        if matrix.dtype != like.dtype:
            raise ValueError(
                f"{name}[{index}] must be of dtype {like.dtype}, as the first is, "
                f"got {matrix.dtype}"
            )
        if is_operand:
            continue
        # rows of results must not lie over each other
        overlaps = name == "out" and m > 1 and matrix.stride(0) < n
        if matrix.shape != (m, n) or matrix.stride(1) != 1 or overlaps:
            layout = f"{list(matrix.shape)} with strides {list(matrix.stride())}"
            raise ValueError(
                f"{name}[{index}] must be {[m, n]} with rows without gaps, got {layout}"
            )
    if out.is_inference() and not torch.is_inference_mode_enabled():
        raise ValueError(f"out[{index}] must be no inference tensor outside of inference mode")
    names = ("left", "right", "add", "out", "scale")
    for name, matrix in zip(names, product, strict=True):
        if matrix is not None and matrix.device != first.left.device:
            place = f"on left[0]'s device {first.left.device}"
            raise ValueError(f"{name}[{index}] must be {place}, got {matrix.device}")
