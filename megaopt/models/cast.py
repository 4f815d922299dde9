"""Models whose parameters become 16-bit, but for the modules that are kept in fp32."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from megaopt.kernels.refusals import is_dense, one_of, refuse, shown
from megaopt.models.fp32 import set_value
from megaopt.params import view_of
from megaopt.params.names import plain_names
from megaopt.state.access import check_master
from megaopt.state.owned import owned_of
from megaopt.state.tensors import MASTER, State

if TYPE_CHECKING:
    from megaopt.optimizer import FusedOptimizer
    from megaopt.state.owned import Owned

Keep = Callable[[str, nn.Module], bool] | type[nn.Module] | str | Iterable[type[nn.Module] | str]

SHORT = (torch.bfloat16, torch.float16)
CAST = (torch.float64, torch.float32, *SHORT)
"""The dtypes that are cast; codes of 8 bits are numbers only beside their scales, and stay."""

RUNNING: tuple[type[nn.Module], ...] = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)
"""Norms that may have running statistics; torch's own take 16-bit inputs beside fp32 weights."""
NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, *RUNNING)
CONTAINERS = (nn.ModuleList, nn.ModuleDict)
"""Modules that are never called."""


def is_norm(name: str, module: nn.Module) -> bool:
    """Whether a module normalizes: one of torch.nn's, or one whose class is called *Norm.

    The latter (LlamaRMSNorm, say) only without modules of its own: a PreNorm holds a whole block.
    """
    called = type(module).__name__.lower().endswith("norm")
    return isinstance(module, NORMS) or (called and not any(module.children()))


def cast_model(
    model: nn.Module,
    dtype: torch.dtype,
    keep: Keep = is_norm,
    *,
    recast: bool = True,
    optimizer: FusedOptimizer | None = None,
) -> nn.Module:
    """Casts parameters and buffers to 16 bits, in place, but for the modules that are kept.

    As `model.to(dtype)` does it: parameters stay the same objects, so that optimizers that hold
    them go on; gradients are cast with them. Tied parameters and buffers stay tied; what a kept
    module shares with others is kept. Integers, complex numbers and fp8 weights stay as they are.

    Without `optimizer` the bits that dtype does not hold are lost: a master that is made later
    starts from the rounded weight. With it they go into the masters, all of them where masters are
    fp32 or remainders of 16 bits, the 24 bits of "remainder8" and so on otherwise.

    Args:
        model: of any dtypes.
        dtype: torch.bfloat16 or torch.float16.
        keep: which modules stay as they are, with all modules in them: a function of a module's
            name ("" is the model) and the module; a class, a name with * and ? as in fnmatch, with
            or without the parts of wrappers (`_orig_mod.`, ...); or several of these. By default
            normalization layers (`is_norm`); () keeps none.
        recast: kept modules get 16-bit inputs as fp32, and give fp32 outputs as dtype, by forward
            hooks. False leaves that to autocast, or to the modules themselves.
        optimizer: owns parameters of the model, and keeps masters (master_weights=True, or
            dtype=torch.float32), whether any are made yet or not. It is made before the cast: with
            exact remainders, which need no fp32 copy, by master_weight_dtype="remainder16".

    Returns:
        The model.

    Raises:
        ValueError: dtype or keep is something else, or a name in keep is no module's; the optimizer
            has none of the parameters, no masters, a list of the caller's, or masters in a format
            that weights of dtype cannot have. Nothing has changed then.
    """
    # all that is refused is refused before the first tensor changes
    one_of("dtype", dtype, SHORT)
    one_of("recast", recast, (True, False))
    modules = _kept_modules(model, keep)
    # fixed: tensors that stay, by id; values: fp32, from which masters are made after the cast
    fixed = _tensors_of(model, modules)
    values = {} if optimizer is None else _values(model, dtype, fixed, optimizer)

    # by id, buffers that are cast with what they became, so that no other tensor gets their ids
    buffers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) in fixed or not _is_cast(tensor, dtype):
            return tensor
        if isinstance(tensor, nn.Parameter):  # the same object again, where it is tied
            return tensor.to(dtype)
        if id(tensor) not in buffers:
            buffers[id(tensor)] = (tensor, tensor.to(dtype))
        return buffers[id(tensor)][1]

    # model.to's own walk: parameters, gradients and buffers, in place
    untyped_model: Any = model  # torch's method has no types
    untyped_model._apply(cast)
    # masters get the bits that weights lose
    if optimizer is not None:
        owned = owned_of(optimizer)
        with torch.no_grad():
            for param in list(values):  # no value outlives its master
                set_value(optimizer, owned, view_of(param), values.pop(param))
    # a kept module gets 16-bit inputs from its neighbours
    # those that others call, once each: lists and dicts of modules are never called, so that their
    # members count as outermost
    called = {name: m for name, m in modules.items() if not isinstance(m, CONTAINERS)}
    tops = [n for n in called if not any(n != top and _is_in(n, top) for top in called)]
    outermost = {id(called[name]): called[name] for name in tops} if recast else {}
    for module in outermost.values():
        compute_in_fp32(module, dtype)
    return model


def _is_cast(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    return tensor.dtype in CAST and tensor.dtype != dtype


# --- what is kept


def _is_in(name: str, top: str) -> bool:
    return top in ("", name) or name.startswith(f"{top}.")


def _kept_modules(model: nn.Module, keep: Any) -> dict[str, nn.Module]:
    """The modules that stay, with all modules in them, by name."""
    # tied modules have several names: each counts
    named = list(model.named_modules(remove_duplicate=False))
    if isinstance(keep, nn.Module):
        refuse("keep", "a function, or classes and names of modules", keep)
    if callable(keep) and not inspect.isclass(keep):
        tops = [name for name, module in named if keep(name, module)]
        return {name: module for name, module in named if any(_is_in(name, top) for top in tops)}
    # one entry or several; classes are callable, too
    is_one = isinstance(keep, str) or inspect.isclass(keep)
    entries = (keep,) if is_one else tuple(keep) if isinstance(keep, Iterable) else (keep,)
    classes = tuple(entry for entry in entries if inspect.isclass(entry))
    patterns = [entry for entry in entries if isinstance(entry, str)]
    if len(classes) + len(patterns) != len(entries):
        refuse("keep", "a function, or classes and names of modules", keep)
    # names in the model without parts of wrappers match as well
    plain = plain_names(name for name, _ in named)
    tops = [name for name, module in named if isinstance(module, classes)]
    for pattern in patterns:
        fitting = [n for n, _ in named if fnmatchcase(n, pattern) or fnmatchcase(plain[n], pattern)]
        if not fitting:
            raise ValueError(f"keep must name modules of the model, got {shown(pattern)}")
        tops += fitting
    return {name: module for name, module in named if any(_is_in(name, top) for top in tops)}


def _tensors_of(model: nn.Module, modules: Mapping[str, nn.Module]) -> dict[int, torch.Tensor]:
    """Parameters, gradients and buffers that stay as they are, by id."""
    # what kept modules hold themselves; their inner modules are in `modules`, too
    tensors = [tensor for module in modules.values() for tensor in _direct(module)]
    # fp8 weights, whose dtype is one that would be cast
    tensors += [param for param in model.parameters() if view_of(param).weight is not None]
    grads = [tensor.grad for tensor in tensors if tensor.is_leaf and tensor.grad is not None]
    return {id(tensor): tensor for tensor in (*tensors, *grads)}


def _direct(module: nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)


# --- masters


def _values(
    model: nn.Module,
    dtype: torch.dtype,
    fixed: Mapping[int, torch.Tensor],
    optimizer: FusedOptimizer,
) -> dict[torch.Tensor, torch.Tensor]:
    """The fp32 values of the optimizer's parameters that are cast; the tensors of fp32 weights."""
    owned = owned_of(optimizer)
    mine = set(owned.params)
    params = [param for param in model.parameters() if param in mine]
    if not params:
        raise ValueError("optimizer must have parameters of the model, got one that has none")
    # parameters that the cast changes: masters or, without any, the weights of fp32
    cast = [p for p in params if id(p) not in fixed and _is_cast(p, dtype)]
    _check_masters(owned, dtype, cast, optimizer.state)
    has_master = {p: optimizer.state.get(p, {}).get(MASTER) is not None for p in cast}
    return {
        param: optimizer.get_unscaled_state(param, MASTER) if has_master[param] else param.detach()
        for param in cast
    }


def _check_masters(
    owned: Owned, dtype: torch.dtype, params: Iterable[torch.Tensor], state: Mapping[Any, State]
) -> None:
    if owned.has_external_masters:
        raise ValueError(
            "optimizer must make its masters itself, got one with a list of master_weights"
        )
    # the format that masters have beside weights of the new dtype
    form = owned.options.master_format(dtype, owned.wants_masters)
    if not form.present:
        raise ValueError(
            "optimizer must keep masters (master_weights=True, or dtype=torch.float32), got one "
            "without: leave it out to round the weights"
        )
    if form.requires_weight not in (None, dtype):
        raise ValueError(
            f"dtype must be {form.requires_weight} for masters stored as {form.name}, got {dtype}"
        )
    for param in params:
        view, label = owned.view(param), owned.labels[owned.index(param)]
        check_master(state.get(param, {}), form, view, label)
        # ranks would each have a scale
        if form.scaled and view.is_sharded:
            raise ValueError(
                f"{label}: a DTensor's master must have no scale, got "
                f"master_weight_dtype={owned.options.master_weight_dtype}"
            )


# --- kept modules among others


def compute_in_fp32(module: nn.Module, dtype: torch.dtype | None) -> None:
    """Makes a module get 16-bit inputs as fp32, and give fp32 outputs as dtype, from now on.

    Args:
        module: its parameters are fp32.
        dtype: of the outputs; None: they stay fp32.
    """
    module.register_forward_pre_hook(_inputs_in_fp32, with_kwargs=True)
    if dtype is not None:
        module.register_forward_hook(functools.partial(_outputs_as, dtype))


def _inputs_in_fp32(module: nn.Module, args: Any, kwargs: Any) -> Any:
    def widened(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.float() if is_dense(tensor) and tensor.dtype in SHORT else tensor

    return tree_map_only(torch.Tensor, widened, (args, kwargs))


def _outputs_as(dtype: torch.dtype, module: nn.Module, args: Any, output: Any) -> Any:
    def narrowed(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.dtype == torch.float32 else tensor

    return tree_map_only(torch.Tensor, narrowed, output)
