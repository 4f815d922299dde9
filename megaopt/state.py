"""A parameter's optimizer state: which tensors it has, how they are made, their fp32 values."""

from __future__ import annotations

from typing import Any

import torch

from megaopt.kernels.formats import GRADS, WEIGHTS, Format
from megaopt.kernels.step.batch import Formats
from megaopt.kernels.step.reference import store_scaled
from megaopt.memory import Named
from megaopt.options import Options
from megaopt.params import ParamView
from megaopt.params.dtensor import check_sharding, local_of, locals_of

State = dict[str, Any]
MASTER = "master_param"
SCALE = "_scale"


def state_name(slot: str) -> str:
    """Under which name a parameter's state holds the tensor of a slot: moments under their own."""
    return {"master": MASTER, "master" + SCALE: MASTER + SCALE}.get(slot, slot)


def formats_of(
    view: ParamView,
    grad_dtype: torch.dtype,
    moments: tuple[str, ...],
    options: Options,
    masters: bool,
) -> Formats:
    """The formats of a parameter's buffers under these options; moments: their names."""
    cast, dtype = view.cast(options.direct_cast), view.param.dtype
    return Formats(
        GRADS[grad_dtype],
        WEIGHTS[dtype] if cast is None else cast.recipe.format,
        options.master_format(dtype, masters, cast is not None),
        tuple(map(options.moment_format, moments)),
        moments,
        cast,
        # of fp32 it is no other kernel
        options.round_scaled_grads and grad_dtype != torch.float32,
        options.write_unscaled_grads,
        options.maximize,
    )


def complete(
    state: State,
    view: ParamView,
    formats: Formats,
    external: torch.Tensor | None,
) -> None:
    """Adds to `state` what is missing: zero moments, and the master, external or made here.

    A master made here starts as the weight's own value, which every format holds exactly or, fp16
    with a scale, to its precision; that of fp8 as what the weight was made from, if that is kept.
    """
    weight = view.local
    for name, form in zip(formats.moment_names, formats.moments, strict=True):
        if name not in state:
            state[name] = torch.zeros(weight.shape, dtype=form.dtype, device=weight.device)
        if form.scaled:
            state.setdefault(name + SCALE, torch.ones(1, device=weight.device))
    if external is not None:
        state[MASTER] = external
    elif not formats.master.present:
        state[MASTER] = None
    elif state.get(MASTER) is None:
        value = view.initial_value(formats)
        if formats.master.joined:  # the weight stays as it is
            state[MASTER] = formats.master.encode_reference(value)[1]
        else:
            state.update(encoded(MASTER, value, formats.master, weight)[0])


def get_unscaled(state: State, name: str, form: Format, weight: torch.Tensor) -> torch.Tensor:
    """The fp32 value of a state tensor: the tensor itself where it is stored as fp32."""
    if form.joined:
        return form.decode_reference(weight, state[name])
    return form.decode_reference(state[name], state.get(name + SCALE))


def encoded(
    name: str, value: torch.Tensor, form: Format, weight: torch.Tensor
) -> tuple[State, torch.Tensor | None]:
    """New state tensors that hold an fp32 value in its format, by name.

    Also what the weight becomes with a joined master, as only together they say the value; None
    otherwise.
    """
    value = value.to(weight.device, torch.float32).reshape(weight.shape)
    code = torch.empty(weight.shape, dtype=form.dtype, device=weight.device)
    if form.joined:
        upper, lower = form.encode_reference(value)
        return {name: code.copy_(lower)}, upper
    if not form.scaled:
        return {name: code.copy_(form.encode_reference(value))}, None
    scale = torch.ones(1, device=weight.device)
    if value.numel():
        store_scaled(code, scale, value, form)
    return {name: code, name + SCALE: scale}, None


def completed_state(
    view: ParamView, own: State, formats: Formats, external: torch.Tensor | None, label: str
) -> State:
    """What a parameter's state becomes; the state itself stays as it is.

    Raises ValueError where a tensor of it is not what the formats ask for.
    """
    names = {slot: state_name(slot) for slot in formats.state_slots}
    for name in names.values():
        check_sharding(own.get(name), view.param, f"{label}: state {name!r}")
    state = locals_of(own)
    # a step within inference mode makes no such tensors
    with torch.inference_mode(False), torch.no_grad():
        complete(state, view, formats, local_of(external))
    check_state(state, formats, view.local, names, label)
    return view.wrap_state(state, [*own.values(), external])


def written_tensors(view: ParamView, state: State, where: str) -> list[Named]:
    """The tensors of a parameter that a step writes: weight or codes, and the state's."""
    tensors = {
        "weight": view.codes,
        **{f"state {name!r}": local_of(v) for name, v in state.items()},
    }
    own = tensors.items()
    return [Named(where, name, t) for name, t in own if isinstance(t, torch.Tensor)]


def check_state(
    state: dict[str, Any], formats: Formats, param: torch.Tensor, names: dict[str, str], where: str
) -> None:
    """Raises ValueError where a state tensor is not what the formats ask for."""
    for slot in formats.state_slots:
        tensor = state[names[slot]]
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(
                f"{where}: state {names[slot]!r} is {tensor!r}; allowed: a torch.Tensor"
            )
        shape = (1,) if slot.endswith(SCALE) else tuple(param.shape)
        wanted = (formats.dtype(slot), shape, param.device)
        found = (tensor.dtype, tuple(tensor.shape), tensor.device)
        if found != wanted:
            raise ValueError(
                f"{where}: state {names[slot]!r} is {found[0]} of shape {found[1]} on {found[2]}; "
                f"allowed: {wanted[0]} of shape {wanted[1]} on {wanted[2]}"
            )


# --- pickled


def picklable(state: State) -> State:
    """The state with fp8 codes as pickle can write them; what is unpickled is tensors again."""
    return {name: _Codes(value) if _is_float8(value) else value for name, value in state.items()}


def _is_float8(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.dtype.is_floating_point
        and value.dtype.itemsize == 1
    )


class _Codes:
    """Stands for fp8 codes, whose storages plain pickle cannot write."""

    def __init__(self, codes: torch.Tensor) -> None:
        self.codes = codes

    def __reduce__(self) -> tuple[Any, ...]:
        return _view, (self.codes.view(torch.uint8), self.codes.dtype)


def _view(codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return codes.view(dtype)
