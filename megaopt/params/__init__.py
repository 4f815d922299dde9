"""Parameters of every kind behind one interface; the only place that asks of what kind one is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megaopt.kernels.shards import PLAIN, is_dtensor
from megaopt.params.dtensor import DTensorView
from megaopt.params.flat import PARTS, FlatMatrixView
from megaopt.params.view import ParamView

if TYPE_CHECKING:
    from megaopt.kernels.rules.matrix import Matrix


def view_of(param: Any, matrix: Matrix | None = None, replicas: Any = None) -> ParamView:
    """A parameter as the optimizer sees it.

    Args:
        param: a plain tensor, an fp8 weight or a rank's part of one, a DTensor, or a flat part.
        matrix: the rule that steps it as a whole matrix; None: it is stepped elementwise.
        replicas: the mesh of ranks that all have a plain matrix; None: nobody else is known.

    Raises:
        ValueError: another library's fp8 tensor that cannot be stepped.
    """
    if type(param) not in PLAIN and not is_dtensor(param):
        # fp8 weights, this library's and then others', are imported where a tensor may be one
        from megaopt.float8.foreign import foreign_weight
        from megaopt.float8.shard import Float8Shard
        from megaopt.float8.weight import Float8Weight
        from megaopt.params.float8 import Float8View

        whole = param.weight if isinstance(param, Float8Shard) else param
        weight = whole if isinstance(whole, Float8Weight) else foreign_weight(whole)
        if weight is not None:
            return Float8View(param, weight, matrix)
    if matrix is not None and hasattr(param, PARTS):
        return FlatMatrixView(param, matrix)
    return DTensorView(param, matrix) if is_dtensor(param) else ParamView(param, matrix, replicas)


__all__ = ["ParamView", "view_of"]
