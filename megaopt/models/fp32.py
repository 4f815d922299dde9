"""State dicts of models whose weights have all the bits that the optimizer's masters have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from megaopt.kernels.refusals import is_dense, listed, one_of, refuse
from megaopt.kernels.shards import local_of
from megaopt.params import ParamView
from megaopt.params.dtensor import check_sharding
from megaopt.params.names import plain_names
from megaopt.state.access import check_master
from megaopt.state.memory import check_writable
from megaopt.state.owned import Owned, owned_of
from megaopt.state.tensors import MASTER, State, get_unscaled

if TYPE_CHECKING:
    from megaopt.optimizer import FusedOptimizer

EXACT = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of which fp32 holds every number."""


@torch.no_grad()
def get_fp32_model_state_dict(model: nn.Module, optimizer: FusedOptimizer) -> dict[str, Any]:
    """model.state_dict(), with fp32 values in the place of the optimizer's weights.

    They are the masters' values, in whatever format these are, as the next step starts from them:
    a weight that somebody else has written sets its master first, as on_external_write says. A
    weight without a master gives its own value; one that became fp32 since the last step
    (model.float()) that of the master it had. Of DTensors the values are DTensors of the
    parameter's mesh and placements. Buffers, and parameters of others, are what model.state_dict()
    has. Tied names have the same tensor.

    As in model.state_dict(), tensors may be the model's or the optimizer's own (fp32 masters are):
    clone what is to outlive the next step.

    Args:
        model: has parameters of the optimizer; in model.state_dict() these are under their names.
        optimizer: of this package. It may have no state yet.

    Raises:
        ValueError: the model has no parameter of the optimizer, or its state dict lacks one.
        RuntimeError: a weight was written, and on_external_write is "error".
    """
    owned = owned_of(optimizer)
    # keep_vars: the parameters themselves, so that they are found among the optimizer's
    state_dict = model.state_dict(keep_vars=True)
    places = _places(model, state_dict, owned)

    # weights that somebody wrote set their masters first, on all ranks that share them
    writes = optimizer.stepper.writes
    moved = writes.moved_anywhere(owned.params, optimizer.state)
    writes.take_over(owned, optimizer.state, moved)

    # a step may still write masters that are in host memory
    external = owned.external_masters()
    owned.homes.wait()
    values: dict[int, torch.Tensor] = {}
    for name, value in state_dict.items():
        place = places.get(name)
        if place is not None:
            # one value for all tied names
            if place not in values:
                values[place] = _value(optimizer, owned, place, external[place])
            state_dict[name] = values[place]
        elif isinstance(value, torch.Tensor):
            state_dict[name] = value.detach()
    return state_dict


def _value(
    optimizer: FusedOptimizer, owned: Owned, place: int, external: torch.Tensor | None
) -> torch.Tensor:
    """The fp32 value of a weight: of its master, made or yet to be made, or its own."""
    view = owned.views[place]
    formats = owned.formats(view)
    is_made = optimizer.state.get(view.param, {}).get(MASTER) is not None
    # a master, or a weight that is its own value
    if is_made or not formats.master.present:
        return optimizer.get_unscaled_state(view.param, MASTER)
    # no step has made the master yet: of the weight, or as the caller gave it
    if external is None:
        return view.wrap(view.value(formats, initial=True))
    state = {MASTER: local_of(external)}
    return view.wrap(get_unscaled(state, MASTER, formats.master, view))


def _places(model: nn.Module, state_dict: Mapping[str, Any], owned: Owned) -> dict[str, int]:
    """The places among the optimizer's parameters of those that a state dict has, by name.

    Frozen ones of a kind that nothing steps are left out: they have no fp32 values.
    """
    places = {id(param): place for place, param in enumerate(owned.params)}
    places_by_name = {
        name: places[id(value)] for name, value in state_dict.items() if id(value) in places
    }
    named_places = [(n, places[id(p)]) for n, p in model.named_parameters() if id(p) in places]
    if not named_places:
        raise ValueError("model must have parameters of the optimizer, got one that has none")
    missing = [name for name, place in named_places if place not in places_by_name.values()]
    if missing:
        raise ValueError(
            f"model.state_dict() must have the optimizer's parameters, got none for "
            f"{listed(missing)}: a hook leaves them out, or copies them"
        )
    return {name: place for name, place in places_by_name.items() if not owned.views[place].is_idle}


# --- set


@torch.no_grad()
def set_fp32_model_state_dict(
    model: nn.Module,
    optimizer: FusedOptimizer,
    state_dict: Mapping[str, Any],
    *,
    strict: bool = True,
) -> None:
    """Takes a state dict over into weights and masters at once: the inverse of get.

    A master keeps of an fp32 value what its format holds: fp32 masters and remainders
    (store_param_remainders) all of it. Weights become its casts, to nearest; those without a master
    keep no more than that. Moments and step counts stay. Everything else goes through
    model.load_state_dict.

    Args:
        model: as for get_fp32_model_state_dict.
        optimizer: of this package. It may have no state yet: masters are made.
        state_dict: by the names of model.state_dict(), apart from parts of wrappers (`_orig_mod.`,
            `module.` in front, ...). Values of weights are of their shape, fp32,
            bf16 or fp16, on any device; DTensors for DTensors, of their mesh and placements. Of
            tied names one is enough.
        strict: every name has to be there, and no others; False takes what is there.

    Raises:
        ValueError: names, shapes, dtypes or placements are others, tied names have different
            values, or a weight cannot be set (a rank's part of an fp8 weight). Nothing has changed
            then.
    """
    one_of("strict", strict, (True, False))
    if not isinstance(state_dict, Mapping):
        refuse("state_dict", "a dict of tensors by name", state_dict)
    owned, model_dict = owned_of(optimizer), model.state_dict(keep_vars=True)
    # names, then values, then everything that is not the optimizer's: nothing has changed so far
    places = _places(model, model_dict, owned)
    state_dict = _renamed(state_dict, model_dict, strict)
    owned.external_masters()
    # by place the first name and its value; further names have to have the same bits
    named_values: dict[int, tuple[str, torch.Tensor]] = {}
    for name, place in places.items():
        if name not in state_dict:
            continue
        value = state_dict[name]
        _check_value(name, value, owned, place, optimizer.state)
        first, first_value = named_values.setdefault(place, (name, value))
        if value is first_value:
            continue
        bits = [local_of(v).float().view(torch.int32) for v in (first_value, value)]
        if not torch.equal(bits[0], bits[1].to(bits[0].device)):
            raise ValueError(
                f"state_dict[{name!r}] must be state_dict[{first!r}], as these names are tied, got "
                "another"
            )
    rest = {name: v for name, v in state_dict.items() if name in model_dict and name not in places}
    for name, value in rest.items():
        _check_like(name, value, model_dict[name])

    # buffers, and parameters of others
    model.load_state_dict(rest, strict=False)
    for place, (_, value) in named_values.items():
        set_value(optimizer, owned, owned.views[place], value)


def _renamed(
    state_dict: Mapping[str, Any], model_dict: Mapping[str, Any], strict: bool
) -> dict[str, Any]:
    """The values by the model's own names, which differ from those given by parts of wrappers.

    strict: raises ValueError where names are missing, or others are there.
    """
    # names without parts of wrappers, of what is given and of the model
    plain = plain_names(name for name in state_dict if isinstance(name, str))
    names = {name: model_name for model_name, name in plain_names(model_dict).items()}
    free = {model_name for model_name in model_dict if model_name not in state_dict}
    new_dict = {}
    for name, value in state_dict.items():
        # a name that the model has counts for itself; others go to names that nobody gave
        meant = names.get(plain.get(name, name))
        new_dict[meant if name not in model_dict and meant in free else name] = value
    # tied names are one tensor: one of them is enough
    tensors = {name: id(v) for name, v in model_dict.items() if isinstance(v, torch.Tensor)}
    tensor_ids = {tensor for name, tensor in tensors.items() if name in new_dict}
    missing = [n for n in model_dict if n not in new_dict and tensors.get(n) not in tensor_ids]
    unexpected = [name for name in new_dict if name not in model_dict]
    if strict and (missing or unexpected):
        lacks = f"lacks {listed(missing)}" if missing else ""
        has = f"has {listed(unexpected)}" if unexpected else ""
        raise ValueError(
            "state_dict must have the names of model.state_dict(), got one that "
            f"{' and '.join(filter(None, (lacks, has)))}; strict=False takes what fits"
        )
    return new_dict


def _check_value(
    name: str, value: Any, owned: Owned, place: int, state: Mapping[Any, State]
) -> None:
    """Raises ValueError for what is no fp32 value of a weight, or cannot go into it."""
    where, view = f"state_dict[{name!r}]", owned.views[place]
    shape = tuple(view.param.shape)
    fits = is_dense(value) and not value.is_meta and value.dtype in EXACT
    if not fits or tuple(value.shape) != shape:
        refuse(where, f"{', '.join(map(str, EXACT))} of shape {shape}", value)
    check_sharding(value, view.param, where)
    # what it goes into
    label = owned.labels[place]
    owned.check_param(view.param, label)
    check_master(state.get(view.param, {}), owned.formats(view).master, view, label)
    if view.weight is None:
        check_writable(view.local, label)
    elif view.extent.shared or view.weight.columnwise is not None:
        raise ValueError(f"{label} must be a whole fp8 weight without columnwise data, got another")


def _check_like(name: str, value: Any, model_value: Any) -> None:
    if not isinstance(model_value, torch.Tensor):
        return  # extra state: its module knows
    if not is_dense(value) or value.shape != model_value.shape:
        refuse(f"state_dict[{name!r}]", f"a tensor of shape {tuple(model_value.shape)}", value)
    check_sharding(value, model_value, f"state_dict[{name!r}]")


def set_value(
    optimizer: FusedOptimizer, owned: Owned, view: ParamView, value: torch.Tensor
) -> None:
    """Sets weight and master to an fp32 value, of the parameter's shape and placements."""
    formats = owned.formats(view)
    # joined masters, and none, set the weight themselves
    if formats.master.present and not formats.master.joined:
        # fp32 on the weight's device; weights become casts to nearest
        shard = local_of(value).to(view.local.device, torch.float32)
        if view.weight is not None:
            view.weight.quantize_(shard)
        else:
            view.local.copy_(formats.weight.encode_by_hand(shard))
    # the master: encoded from the fp32 value in its own format
    optimizer.set_scaled_state(view.param, MASTER, value)
