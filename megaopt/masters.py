"""The external master weights: a list that the caller owns, one entry per parameter."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megaopt.checks import is_dense, refuse
from megaopt.host_state import MASTER
from megaopt.kernels.host_memory import HostMemory
from megaopt.memory import Named, check_memory, check_writable
from megaopt.options import Options
from megaopt.params import ParamView, view_of
from megaopt.params.dtensor import check_sharding, local_of

MasterWeights = bool | list[torch.Tensor | None] | None


def check_master_weights(
    masters: MasterWeights, views: Sequence[ParamView], labels: Sequence[str], options: Options
) -> None:
    """Raises ValueError unless `masters` can serve the parameters, which are in group order."""
    if masters is False and options.dtype is not None:
        raise ValueError(
            f"master_weights=False is not allowed with dtype={options.dtype}: it asks for masters"
        )
    if masters is None or isinstance(masters, bool):
        return
    if not isinstance(masters, (list, tuple)):
        raise ValueError(
            f"master_weights={type(masters).__name__} is not allowed: a bool, None, or a list with "
            "one tensor per parameter in group order (None for an fp32 weight)"
        )
    if options.master_weight_dtype != torch.float32:
        raise ValueError(
            "a list of master_weights is not allowed with master_weight_dtype="
            f"{options.master_weight_dtype}: torch.float32, whose values need nothing beside them"
        )
    if len(masters) != len(views):
        raise ValueError(
            f"master_weights has {len(masters)} entries: allowed is one for each of the "
            f"{len(views)} parameters, in group order"
        )
    for index, (master, view, label) in enumerate(zip(masters, views, labels, strict=True)):
        _check_master(master, view, f"master_weights[{index}] for {label}", options)
    own = [
        Named(f"master_weights[{index}] for {label}", "the master", local_of(master))
        for index, (master, label) in enumerate(zip(masters, labels, strict=True))
        if master is not None
    ]
    check_memory(own)


def _check_master(
    master: torch.Tensor | None, view: ParamView, where: str, options: Options
) -> None:
    param = view.param
    dtype = options.master_format(param.dtype, True, view.code_dtype).dtype
    if dtype is None:
        if master is not None and not is_own_master(master, param):
            raise ValueError(f"{where}: an fp32 weight is its own master: None is allowed")
        return
    if not isinstance(master, torch.Tensor) or master.is_nested:
        refuse(where, f"a tensor of dtype {dtype}", master)
    own = {"dtype": dtype, "layout": torch.strided, "device": view.state_device(MASTER)}
    for name in ("shape", "dtype", "device", "layout"):
        wanted = own.get(name, getattr(param, name))
        if getattr(master, name) != wanted:
            raise ValueError(f"{where}: {name} {getattr(master, name)} is not allowed: {wanted}")
    check_sharding(master, param, where)
    check_writable(local_of(master), where)
    if view.home is not None and MASTER in view.home.placement:
        view.home.check(local_of(master), where)


def pinned(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """A copy in pinned host memory, which the step of weights on `device` can read and write.

    For a list of master_weights where state_device has the masters on the CPU.

    Args:
        tensor: of any dtype, dense, on any device; of a DTensor this rank's shard is copied.
        device: of the weights.

    Raises:
        HostMemoryError (a RuntimeError): the memory cannot be pinned.
    """
    view = view_of(tensor)
    with torch.no_grad():
        shape, dtype = tuple(view.local.shape), view.local.dtype
        made = HostMemory(torch.device(device)).empty(shape, dtype)
        return view.wrap(made.copy_(view.local.detach()))


def is_own_master(master: object, param: torch.Tensor) -> bool:
    """Whether the entry for an fp32 weight is that weight, or a view of the very same memory."""
    return (
        isinstance(master, torch.Tensor)
        and is_dense(local_of(master))
        and master.dtype == param.dtype
        and master.shape == param.shape
        and master.device == param.device
        and local_of(master).data_ptr() == local_of(param).data_ptr()
    )
