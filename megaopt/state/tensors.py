"""A parameter's optimizer state: which tensors it has, how they are made, their fp32 values."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from megaopt.kernels.chunks.batch import Formats
from megaopt.kernels.formats import (
    Format,
)
from megaopt.kernels.shards import local_of
from megaopt.kernels.step.reference import decoded, store_scaled
from megaopt.options.placement import MASTER as MASTER
from megaopt.params import ParamView
from megaopt.params.codes import decoded_blocks, encode_blocks
from megaopt.params.dtensor import check_sharding, locals_of
from megaopt.params.view import SCALE
from megaopt.state.masters import check_cast
from megaopt.state.memory import NamedTensor

State = dict[str, Any]


def state_name(slot: str) -> str:
    """Returns the name of a slot's tensor in a parameter's state; moments have their own."""
    return {"master": MASTER, "master" + SCALE: MASTER + SCALE}.get(slot, slot)


def complete(
    state: State, view: ParamView, formats: Formats, external: torch.Tensor | None
) -> None:
    """Adds to `state` what is missing: moments, and the master, external or made here.

    A master made here starts as the weight's own value, which every format holds exactly or, fp16
    with a scale, to its precision; that of fp8 as what the weight was made from, if that is kept.
    """
    # moments first: zeros, or the weight's own value, each in its format
    weight = view.local
    for name, form in zip(formats.moment_names, formats.moments, strict=True):
        if name not in state and name in formats.from_param:
            new, _ = encoded(name, view.value(formats, initial=True), form, view)
            state.update({key: view.keep(key, tensor) for key, tensor in new.items()})
        elif name not in state:
            shape = shape_of(name, formats, view)
            assert form.dtype is not None
            state[name] = view.empty_state(name, shape, form.dtype).zero_()
        # scales of moments that have none yet
        if form.has_scale and name + SCALE not in state:
            state[name + SCALE] = _new_scale(form, view)
    # what a matrix rule keeps: fp32 zeros on the weights' device
    for name, shape in view.kept.items():
        if state.get(name) is None:
            state[name] = torch.zeros(shape, dtype=torch.float32, device=weight.device)
    # the caller's tensor itself; None where weights have no master; else one made of the weight
    if external is not None:
        state[MASTER] = external
    elif not formats.master.present:
        state[MASTER] = None
    elif state.get(MASTER) is None:
        # the weight stays as it is, beside a joined master too
        new, _ = encoded(MASTER, view.value(formats, initial=True), formats.master, view)
        state.update({name: view.keep(name, tensor) for name, tensor in new.items()})


def clear_moments(state: State, view: ParamView, formats: Formats) -> None:
    """Gives moments, and what a matrix rule keeps, the values that `complete` gives new ones.

    state: of this rank's tensors, which are written in place. Those that it lacks stay away.
    """
    for name, form in zip(formats.moment_names, formats.moments, strict=True):
        if name in state and name in formats.from_param:
            new, _ = encoded(name, view.value(formats, initial=True), form, view)
            for key, tensor in new.items():
                state[key].copy_(tensor)
        elif name in state:
            state[name].zero_()
            if form.has_scale:
                state[name + SCALE].fill_(1)
    for name in view.kept:
        if state.get(name) is not None:
            state[name].zero_()


def get_unscaled(state: State, name: str, form: Format, view: ParamView) -> torch.Tensor:
    """The fp32 value of a state tensor: the tensor itself where it is stored as fp32."""
    # joined with the weight, in blocks of one scale each, or with one scale for all
    code, scale = state[name], state.get(name + SCALE)
    if form.joined:
        return view.joined_value(form, code)
    if form.block:
        assert scale is not None
        return decoded_blocks(form, code, scale, view.state_shape(name), view.first_of(name))
    return decoded(form, code, None if scale is None else scale.to(code.device))


def encoded(
    name: str, value: torch.Tensor, form: Format, view: ParamView
) -> tuple[State, torch.Tensor | None]:
    """New state tensors that hold an fp32 value in its format, by name.

    On the weight's device; where the state is in host memory, wherever the value is: `keep` puts
    them there. Also what the weight becomes with a joined master, as only together they say the
    value; None otherwise.
    """
    # where it is encoded: beside the weight, or where the value is
    device = value.device if view.is_apart(name) else view.local.device
    value = value.to(device, torch.float32).reshape(view.state_shape(name))
    shape = form.stored_shape(value.shape)
    code = torch.empty(shape, dtype=form.dtype, device=device)
    # weight and code are the value together: the code is filled, the new weight returned
    if form.joined:
        return {name: code}, view.join(form, value, code)
    if not form.has_scale:
        return {name: code.copy_(form.encode_by_hand(value))}, None
    # the scale is found by the largest number, of a block or of all
    scale = _new_scale(form, view)
    if form.block:
        encode_blocks(code, scale, value, form, view.first_of(name))
    elif value.numel():
        near = scale.to(device)
        # moments without a sign have no code for -0
        store_scaled(code, near, value + 0.0 if form.unsigned else value, form)
        scale.copy_(near)
    return {name: code, name + SCALE: scale}, None


def _new_scale(form: Format, view: ParamView) -> torch.Tensor:
    """The scale of a tensor, or of its blocks, that is all 0: 1, the smallest byte there is."""
    dtype = torch.uint8 if form.block else torch.float32
    shape = view.block_scales_shape(form.block) if form.block else (1,)
    return torch.ones(shape, dtype=dtype, device=view.local.device)


def completed_state(
    view: ParamView, old_state: State, formats: Formats, external: torch.Tensor | None, label: str
) -> State:
    """Returns what a parameter's state becomes; the state itself stays as it is.

    Raises ValueError where a tensor of it is not what the formats ask for.
    """
    # old tensors are split as the parameter is, and the caller's master fits the weight
    names = {slot: state_name(slot) for slot in formats.state_slots}
    for name in names.values():
        check_sharding(old_state.get(name), view.param, f"{label}: state {name!r}")
    if external is not None and old_state.get(MASTER) is None:
        check_cast(view, external, formats, label)
    # a new dict of shards: the optimizer's own state is not touched
    state = locals_of(old_state)
    # a step within inference mode makes no such tensors
    with torch.inference_mode(False), torch.no_grad():
        complete(state, view, formats, local_of(external))
    # what was there before may be of other formats
    for slot, name in names.items():
        where = f"{label}: state {name!r}"
        kind = (formats.dtype(slot), shape_of(slot, formats, view), view.state_device(name))
        check_state_tensor(state[name], kind, where)
        if view.home is not None and name in view.home.placement:
            view.home.check(state[name], where)
    for name, shape in view.kept.items():
        if name not in state:
            continue
        kind = (torch.float32, shape, view.local.device)
        check_state_tensor(state[name], kind, f"{label}: state {name!r}")
    return view.wrap_state(state, [*old_state.values(), external])


def written_tensors(
    view: ParamView, state: State, names: Iterable[str], where: str
) -> list[NamedTensor]:
    """The tensors of a parameter that a step writes: weight or codes, and the state's.

    names: that a state may have; what is under others no step writes.
    """
    tensors = {
        "weight": view.codes,
        **{f"state {name!r}": local_of(state[name]) for name in names if name in state},
    }
    pairs = tensors.items()
    return [(f"{where}: {name}", t) for name, t in pairs if isinstance(t, torch.Tensor)]


def shape_of(slot: str, formats: Formats, view: ParamView) -> tuple[int, ...]:
    """The shape of a slot's tensor in the state of a parameter."""
    if slot.endswith(SCALE):
        block = formats.by_slot[slot.removesuffix(SCALE)].block
        return view.block_scales_shape(block) if block else (1,)
    return formats.by_slot[slot].stored_shape(view.state_shape(state_name(slot)))


def check_state_tensor(
    tensor: object, kind: tuple[torch.dtype, tuple[int, ...], torch.device], where: str
) -> None:
    """Raises ValueError unless it is a tensor of this dtype and shape on this device."""
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{where} is {tensor!r}; allowed: a torch.Tensor")
    tensor_kind = (tensor.dtype, tuple(tensor.shape), tensor.device)
    if tensor_kind != kind:
        raise ValueError(
            f"{where} is {tensor_kind[0]} of shape {tensor_kind[1]} on {tensor_kind[2]}; "
            f"allowed: {kind[0]} of shape {kind[1]} on {kind[2]}"
        )


# --- pickled


def picklable(state: Any) -> Any:
    """The state with fp8 codes as pickle can write them; what is unpickled is tensors again.

    What is no parameter's state, and so may be anything, is given as it is.
    """
    if not isinstance(state, dict):
        return state
    new_state = dict(state)
    for name, value in state.items():
        dtype = value.dtype if isinstance(value, torch.Tensor) else torch.uint8
        if dtype.is_floating_point and dtype.itemsize == 1:
            new_state[name] = _Codes(value)
    return new_state


class _Codes:
    """Stands for fp8 codes, whose storages plain pickle cannot write."""

    def __init__(self, codes: torch.Tensor) -> None:
        self.codes = codes

    def __reduce__(self) -> tuple[Any, ...]:
        return _view, (self.codes.view(torch.uint8), self.codes.dtype)


def _view(codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return codes.view(dtype)
