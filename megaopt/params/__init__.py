"""Parameters of every kind behind one interface; the only place that asks of what kind one is."""

from __future__ import annotations

from typing import Any

from megaopt.float8.foreign import foreign_weight
from megaopt.float8.shard import Float8Shard
from megaopt.float8.weight import Float8Weight
from megaopt.kernels.rules.matrix import Matrix
from megaopt.kernels.shards import PLAIN
from megaopt.params.dtensor import DTensorView, MatrixDTensorView, is_dtensor
from megaopt.params.flat import PARTS, FlatMatrixView
from megaopt.params.float8 import Float8MatrixView, Float8ShardView, Float8View
from megaopt.params.view import MatrixView, ParamView, ReplicatedView


def view_of(param: Any) -> ParamView:
    """A parameter as the optimizer sees it.

    Raises ValueError for another library's fp8 tensor that cannot be stepped.
    """
    if type(param) in PLAIN:
        return ParamView(param)
    if is_dtensor(param):
        return DTensorView(param)
    if isinstance(param, Float8Shard):
        return Float8ShardView(param, _weight_of(param.weight))
    weight = _weight_of(param)
    return ParamView(param) if weight is None else Float8View(param, weight)


def matrix_view(param: Any, matrix: Matrix, replicas: Any = None) -> ParamView:
    """A plain matrix, an fp8 weight, a DTensor or a part that a rule for whole matrices steps.

    replicas: the mesh of ranks that all have a plain one; None: this rank knows of no others.
    """
    view = view_of(param)
    if view.weight is not None:
        return Float8MatrixView(param, view.weight, matrix)
    if hasattr(param, PARTS):
        return FlatMatrixView(param, matrix)
    if is_dtensor(param):
        return MatrixDTensorView(param, matrix)
    if replicas is not None:
        return ReplicatedView(param, matrix, replicas)
    return MatrixView(param, matrix)


def _weight_of(whole: Any) -> Any:
    return whole if isinstance(whole, Float8Weight) else foreign_weight(whole)


__all__ = ["ParamView", "matrix_view", "view_of"]
