"""The operations of torch on a Float8Weight: the few that keep it one, and all others."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from megaopt.float8.linear import linear

aten = torch.ops.aten


def is_float8(value: object) -> bool:
    """Checks for a Float8Weight, whose module imports this one."""
    return isinstance(value, Tensor) and hasattr(value, "data8")


def call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A function of torch's with a Float8Weight among its arguments, above autograd."""
    # F.linear with the weight alone in fp8: a function with gradients of its own
    if func is torch.nn.functional.linear:
        operands = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
        if [name for name, value in operands.items() if is_float8(value)] == ["weight"]:
            return linear(*args, **kwargs)
    if func in OF_STORAGE and is_float8(args[0]):
        return OF_STORAGE[func](*args, **kwargs)
    # everything else goes on to autograd, and comes back to `dispatch`
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An operator of torch's with a Float8Weight among its arguments, below autograd."""
    # detach, clone, to and copy_ keep the weight in fp8
    if func in OWN and is_float8(args[0]):
        return OWN[func](*args, **kwargs)
    # a plain copy must not be written: arguments that the operator's schema says it writes
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        written = args[index] if index < len(args) else kwargs.get(argument.name)
        if any(map(is_float8, tree_flatten(written)[0])):
            raise TypeError(
                f"{func} must not be called in place on a Float8Weight: it would write to a copy. "
                "quantize_ sets values; an optimizer must know fp8 weights, as megaopt's do"
            )
    # other operators get plain tensors: the values, or, where only the shape counts, any memory
    shape_alone = func in SHAPE_ALONE

    def plain(value: Any) -> Any:
        if not is_float8(value):
            return value
        if shape_alone:
            return torch.empty(value.shape, dtype=value.dtype, device=value.device)
        return value.dequantize()

    return func(*tree_map(plain, args), **tree_map(plain, kwargs))


def _alias(weight: Any) -> Any:
    same = weight._mapped(lambda tensor: tensor)
    same._initial = weight._initial
    return same


def _clone(weight: Any, *, memory_format: Any = None) -> Any:
    copied = weight._mapped(torch.clone)
    copied._initial = list(weight._initial)
    return copied


def _to(weight: Any, *, dtype: torch.dtype | None = None, **options: Any) -> Any:
    # another dtype: plain values
    options.pop("memory_format", None)
    if dtype is not None and dtype != weight.dtype:
        return weight.dequantize().to(dtype=dtype, **_placed(options))
    # another device: codes and scales move as they are
    moved = weight._mapped(lambda tensor: tensor.to(copy=True, **_placed(options)))
    moved._initial = [value.to(**_placed(options)) for value in weight._initial]
    return moved


def _placed(options: dict[str, Any]) -> dict[str, Any]:
    return {name: options[name] for name in ("device", "non_blocking") if options.get(name)}


def _copy(weight: Any, source: Any, non_blocking: bool = False) -> Any:
    # plain values are quantized by the weight's recipe
    if not is_float8(source):
        return weight.quantize_(source.expand(weight.shape))
    # codes of another recipe or dtype would stand for other values
    same = ("recipe", "dtype", "shape")
    if any(getattr(source, name) != getattr(weight, name) for name in same):
        raise ValueError(
            f"copy_ to {weight!r} must be from an fp8 weight of its recipe, dtype and shape, got "
            f"{source!r}, whose codes would be others; source.dequantize() gives their values"
        )
    source_tensors = source.tensors()
    for name, tensor in weight.tensors().items():
        tensor.copy_(source_tensors[name], non_blocking)
    weight.values_changed()
    return weight


def _share(weight: Any) -> Any:
    for tensor in weight.tensors().values():
        tensor.share_memory_()
    return weight


def _set_data(weight: Any, source: Any) -> None:
    if not is_float8(source):
        raise TypeError(
            "data of a Float8Weight must be a Float8Weight, so its module takes no other dtype, "
            f"got {type(source).__name__}; quantize_ sets values, module.weight = "
            "torch.nn.Parameter(values) replaces it"
        )
    if source.shape != weight.shape or source.dtype != weight.dtype:
        raise ValueError(f"data must have the shape and dtype of {weight!r}, got {source!r}")
    for name in ("data8", "scale_inv", "scale", "amax_history", "recipe", "_initial"):
        setattr(weight, name, getattr(source, name))


def _refuse(message: str, *_: Any) -> None:
    raise TypeError(f"a Float8Weight {message}")


OF_STORAGE: dict[Any, Callable[..., Any]] = {
    Tensor.share_memory_: _share,
    Tensor.data.__set__: _set_data,  # type: ignore[attr-defined]
    Tensor.__setitem__: partial(
        _refuse, "must be set whole, by quantize_, got weight[...] = values"
    ),
    Tensor.data_ptr: partial(_refuse, "has no storage of its own: see its data8, scale_inv, scale"),
}
"""Functions of torch that would go past the codes, and what is done instead."""

OWN: dict[Any, Callable[..., Tensor]] = {
    aten.detach.default: _alias,
    aten.alias.default: _alias,
    aten.clone.default: _clone,
    aten._to_copy.default: _to,
    aten.copy_.default: _copy,
}
SHAPE_ALONE = {
    aten.empty_like.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.rand_like.default,
    aten.randn_like.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
}
"""Operations that do not look at the values."""
