"""The external master weights: a list that the caller owns, an entry for each parameter.

Or, as Megatron chains its groups of 16-bit parameters, an entry for each parameter that has a
master: of 16 bits, or in fp8.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megaopt.kernels.chunks.batch import Formats
from megaopt.kernels.host_memory import HostMemory
from megaopt.kernels.refusals import is_dense, refuse
from megaopt.kernels.shards import local_of
from megaopt.options.choices import MasterWeights
from megaopt.options.options import Options
from megaopt.options.placement import MASTER
from megaopt.params import ParamView, view_of
from megaopt.params.dtensor import check_sharding
from megaopt.state.memory import check_memory, check_writable


def check_master_weights(
    masters: MasterWeights, views: Sequence[ParamView], labels: Sequence[str], options: Options
) -> None:
    """Raises ValueError unless `masters` can serve the parameters, which are in group order."""
    if masters is False and options.dtype is not None:
        raise ValueError(
            f"master_weights must be True, None or a list with dtype={options.dtype}, which asks "
            "for masters, got False"
        )
    if masters is None or isinstance(masters, bool):
        return
    if not isinstance(masters, (list, tuple)):
        raise ValueError(
            "master_weights must be a bool, None, or a list with one tensor for each parameter "
            "that is not fp32, in group order, or one for each parameter (None for an fp32 "
            f"weight), got a value of type {type(masters).__name__}"
        )
    if options.master_weight_dtype != torch.float32:
        raise ValueError(
            "master_weight_dtype must be torch.float32, whose values need nothing beside them, "
            f"with a list of master_weights, got {options.master_weight_dtype}"
        )
    # one entry for each parameter, or for each that has a master
    chosen = places_of(masters, views, options)
    if chosen is None:
        count = sum(has_master(view, options) for view in views)
        raise ValueError(
            f"master_weights must have one entry for each of the {len(views)} parameters, or for "
            f"each of the {count} that are not fp32, in group order, got {len(masters)} entries"
        )
    # each entry by itself, then all of them: no element may be in two masters
    entries = []
    for index, (master, place) in enumerate(zip(masters, chosen, strict=True)):
        where = f"master_weights[{index}] for {labels[place]}"
        _check_master(master, views[place], where, options)
        if master is not None:
            entries.append((f"{where}: the master", local_of(master)))
    check_memory(entries)


def has_master(view: ParamView, options: Options) -> bool:
    """Whether a parameter has a master where masters are asked for: fp32 weights are their own."""
    return options.master_format(view.param.dtype, True, view.code_dtype).present


def places_of(
    masters: Sequence[torch.Tensor | None], views: Sequence[ParamView], options: Options
) -> list[int] | None:
    """The parameter's place that each entry is for; None where the list fits in neither way."""
    if len(masters) == len(views):
        return list(range(len(views)))
    places = [place for place, view in enumerate(views) if has_master(view, options)]
    return places if len(masters) == len(places) else None


def check_cast(view: ParamView, master: torch.Tensor, formats: Formats, where: str) -> None:
    """Raises ValueError unless a weight is what a caller's master is rounded to.

    By one unit in the weight's last place it may differ, as masters may have been rounded to it in
    other ways: ties away from zero, or stochastically. Weights in fp8 are not looked at, nor
    what lies beside a weight, which has no value of its own.
    """
    if formats.cast is not None or formats.master.joined:
        return
    weight = view.local.detach()
    # as whole numbers in the order of 16-bit numbers neighbours, one apart, are allowed, and NaN at
    # NaN
    cast = formats.weight.encode_by_hand(local_of(master).to(weight.device))
    bits = [code.view(torch.int16).int() for code in (weight, cast)]
    orders = [torch.where(number < 0, -(number & 0x7FFF), number) for number in bits]
    far = (orders[0] - orders[1]).abs() > 1
    count = int((far & ~(weight.isnan() & cast.isnan())).sum())
    if count:
        raise ValueError(
            f"{where}: the entry of master_weights must have the values that the weight is rounded "
            f"from, got one that is another in {count} of {weight.numel()} elements; for weights "
            "that were written since, copy them into it"
        )


def _check_master(
    master: torch.Tensor | None, view: ParamView, where: str, options: Options
) -> None:
    # the master's format for this weight; None where it is fp32 itself
    param = view.param
    dtype = options.master_format(param.dtype, True, view.code_dtype).dtype
    if dtype is None:
        # the weight itself, or a view of the very same memory, is its own master
        is_weight = (
            isinstance(master, torch.Tensor)
            and is_dense(local_of(master))
            and master.dtype == param.dtype
            and master.shape == param.shape
            and master.device == param.device
            and local_of(master).data_ptr() == local_of(param).data_ptr()
        )
        if master is not None and not is_weight:
            refuse(where, "None, as an fp32 weight is its own master", master)
        return
    if not isinstance(master, torch.Tensor) or master.is_nested:
        refuse(where, f"a tensor of dtype {dtype}", master)
    # shape and layout as the parameter's, the device as the state's
    facts = {"dtype": dtype, "layout": torch.strided, "device": view.state_device(MASTER)}
    for name in ("shape", "dtype", "device", "layout"):
        fact = facts.get(name, getattr(param, name))
        if getattr(master, name) != fact:
            raise ValueError(f"{where}: {name} must be {fact}, got {getattr(master, name)}")
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
        memory = HostMemory(torch.device(device)).empty(shape, dtype)
        return view.wrap(memory.copy_(view.local.detach()))
