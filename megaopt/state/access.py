"""The fp32 values of states, whatever their format: read, and set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from megaopt.kernels.formats import Format
from megaopt.kernels.formats.float8_drawn import encode_pair_reference
from megaopt.kernels.refusals import is_dense, one_of, refuse, same
from megaopt.kernels.shards import local_of
from megaopt.options.overwriting import overwrite
from megaopt.params import ParamView
from megaopt.params.dtensor import check_sharding, locals_of
from megaopt.params.float8 import Float8View
from megaopt.params.view import SCALE
from megaopt.state.memory import check_writable
from megaopt.state.owned import Owned
from megaopt.state.ownership import widened
from megaopt.state.tensors import MASTER, State, encoded, get_unscaled, state_name


def _slot(owned: Owned, view: ParamView, name: str) -> str:
    slots = {state_name(slot): slot for slot in (*owned.moments(view), "master")}
    one_of("state_name", name, slots)
    return slots[name]


def unscaled(
    owned: Owned, state: Mapping[Any, State], param: torch.Tensor, name: str
) -> torch.Tensor:
    """See FusedOptimizer.get_unscaled_state."""
    owned.homes.wait()
    view = owned.view(param)
    param_state: State = state.get(param, {})
    # a scale is given as it is stored
    if name.endswith(SCALE) and name in param_state:
        scale: torch.Tensor = param_state[name]
        return scale
    formats = owned.formats(view)
    form = formats.by_slot[_slot(owned, view, name)]
    if name == MASTER and not form.present:
        wide = widened(view.local, locals_of(param_state))  # as the next step takes it
        value = view.value(formats) if wide is None else wide
    elif param_state.get(name) is None:
        # what makes a state
        when = {"all": "any step", "trainable": "any step, where the parameter requires gradients,"}
        step = when.get(owned.options.makes_states or "", "the first step with a gradient")
        raise ValueError(
            f"{owned.labels[owned.index(view.param)]}: state {name!r} must be there, got none: "
            f"{step} makes it, or initialize_state"
        )
    else:
        value = get_unscaled(locals_of(param_state), name, form, view)
    # an fp32 state is given itself, in its DTensor; anything else is wrapped anew
    originals = [entry for entry in param_state.values() if local_of(entry) is value]
    tensor: torch.Tensor = originals[0] if originals else view.wrap_state({name: value})[name]
    return tensor


def set_scaled(owned: Owned, state: Any, view: ParamView, name: str, value: torch.Tensor) -> None:
    """See FusedOptimizer.set_scaled_state."""
    param_state, local = state.get(view.param, {}), view.local
    owned.homes.wait()
    # a scale is set as it is, one fp32 number
    is_real = is_dense(value) and not value.is_meta and not value.is_complex()
    if any(same(name, key) for key in param_state if key.endswith(SCALE)):
        if not is_real or value.numel() != 1:
            refuse(name, "one real number", value)
        scale = value.detach().to(local.device, torch.float32, copy=True).reshape(1)
        _store(state, view, param_state, {name: scale})
        return
    formats, slot = owned.formats(view), _slot(owned, view, name)
    shape = torch.Size(view.whole_state_shape(name))
    # a plain parameter's may have any shape of as many elements
    fits = is_real and (
        value.shape == shape or (not view.is_sharded and value.numel() == shape.numel())
    )
    if not fits:
        refuse(name, f"real numbers of the parameter's shape, {tuple(shape)}", value)
    check_sharding(value, view.param, name)
    value = local_of(value.detach())
    # no master: the value goes into the weight itself
    if name == MASTER and not formats.master.present:
        value = value.to(local.device, torch.float32).reshape(local.shape)
        if view.weight is not None:
            _set_codes(owned, view, value)
            state[view.param][MASTER] = None
            return
        check_writable(local, "the parameter")
        # all or nothing: the state loses its master once the weight is written
        code = formats.weight.encode_by_hand(value).clone()
        overwrite([(local, code)], lambda: state[view.param].update({MASTER: None}))
        return
    # fp8 codes are half of the value, and are made first
    if name == MASTER and formats.master.joined and view.weight is not None:
        _set_codes(owned, view, value)
    # the caller's master, which no state has yet, is written where it is
    if name == MASTER and param_state.get(MASTER) is None and owned.has_external_masters:
        param_state = {**param_state, MASTER: owned.external_masters()[owned.index(view.param)]}
    _store(state, view, param_state, *encoded(name, value, formats.by_slot[slot], view))


def _store(
    state: Any, view: ParamView, param_state: State, new: State, weight: torch.Tensor | None = None
) -> None:
    """Writes new tensors over those of a state, or adds them, and the weight: all or none."""
    # pairs of a tensor and what it becomes; new tensors are added behind all copies
    stored, pairs = locals_of(param_state), []
    if weight is not None:
        check_writable(view.local, "the parameter")
        pairs.append((view.local, weight.to(view.local.device)))
    for name, tensor in new.items():
        if stored.get(name) is None:
            stored[name] = view.keep(name, tensor)
        else:
            kind = (tensor.dtype, tuple(tensor.shape), view.state_device(name))
            _check_like(stored[name], kind, f"state {name!r}")
            pairs.append((stored[name], tensor.to(kind[2])))
    completed = view.wrap_state(stored, list(param_state.values()))
    overwrite(pairs, lambda: state[view.param].update(completed))


def _set_codes(owned: Owned, view: ParamView, value: torch.Tensor) -> None:
    """Sets a whole fp8 weight to an fp32 value; raises ValueError for a rank's part of one."""
    if view.extent.shared:
        raise ValueError(
            f"{owned.labels[owned.index(view.param)]}: {MASTER!r} must be of a whole weight, or of "
            "one with an fp32 master, got that of a Float8Shard without one: its codes go by the "
            "values of all ranks; quantize_ sets the whole weight"
        )
    formats = owned.formats(view)
    exact = formats.cast is not None and formats.cast.exact
    view.weight.quantize_(value, torch.float32 if exact else None)
    # with a remainder beside each code these are nearest in two roundings, ties away from zero, as
    # a step stores them; the weight's own are to even
    if isinstance(view, Float8View) and formats.master.joined:
        code, _ = encode_pair_reference(value * (1.0 / view.scale_inv()))
        view.codes.copy_(code.view(-1))


def check_master(param_state: State, form: Format, view: ParamView, label: str) -> None:
    """Raises ValueError where a state has a master that a value in this format cannot go into."""
    stored = locals_of(param_state)
    kinds = {MASTER: (form.dtype, view.local.shape), MASTER + SCALE: (torch.float32, (1,))}
    for name, (dtype, shape) in kinds.items():
        if dtype is not None and stored.get(name) is not None:
            kind = (dtype, tuple(shape), view.state_device(name))
            _check_like(stored[name], kind, f"{label}: state {name!r}")


def _check_like(
    tensor: Any, kind: tuple[torch.dtype, tuple[int, ...], torch.device], where: str
) -> None:
    """Raises ValueError unless a state's tensor takes content of this dtype and shape there."""
    if not is_dense(tensor) or (tensor.dtype, tuple(tensor.shape), tensor.device) != kind:
        refuse(where, f"{kind[0]} of shape {kind[1]} on {kind[2]}", tensor)
    check_writable(tensor, where)
