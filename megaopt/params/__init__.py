"""Parameters of every kind behind one interface; the only place that asks of what kind one is."""

from __future__ import annotations

from typing import Any

from megaopt.kernels.rules.matrix import Matrix
from megaopt.params.dtensor import DTensorView, MatrixDTensorView, is_dtensor
from megaopt.params.flat import PARTS, FlatMatrixView
from megaopt.params.view import PLAIN, MatrixView, ParamView, ReplicatedView


def view_of(param: Any) -> ParamView:
    """A parameter as the optimizer sees it.

    Raises ValueError for another library's fp8 tensor that cannot be stepped.
    """
    if type(param) in PLAIN:
        return ParamView(param)
    if is_dtensor(param):
        return DTensorView(param)

    # a class of its own: fp8, of this library or another, or a subclass of a plain tensor
    from megaopt.float8.foreign import foreign_weight
    from megaopt.float8.shard import Float8Shard
    from megaopt.float8.weight import Float8Weight
    from megaopt.params.float8 import Float8ShardView, Float8View

    is_shard = isinstance(param, Float8Shard)
    whole = param.weight if is_shard else param
    weight = whole if isinstance(whole, Float8Weight) else foreign_weight(whole)
    if is_shard:
        return Float8ShardView(param, weight)
    return ParamView(param) if weight is None else Float8View(param, weight)


def matrix_view(param: Any, matrix: Matrix, replicas: Any = None) -> ParamView:
    """A plain matrix, an fp8 weight, a DTensor or a part that a rule for whole matrices steps.

    replicas: the mesh of ranks that all have a plain one; None: this rank knows of no others.
    """
    view = view_of(param)
    if view.weight is not None:
        from megaopt.params.float8 import Float8MatrixView

        return Float8MatrixView(param, view.weight, matrix)
    if hasattr(param, PARTS):
        return FlatMatrixView(param, matrix)
    if is_dtensor(param):
        return MatrixDTensorView(param, matrix)
    if replicas is not None:
        return ReplicatedView(param, matrix, replicas)
    return MatrixView(param, matrix)


__all__ = ["ParamView", "matrix_view", "view_of"]
