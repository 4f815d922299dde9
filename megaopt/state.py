"""A parameter's optimizer state: which tensors it has, how they are made, their fp32 values."""

from __future__ import annotations

from typing import Any

import torch

from megaopt.batches import MASTER, SCALE
from megaopt.dtensor import local_of
from megaopt.float8.batch import cast_of, dequantized, first_master
from megaopt.float8.parts import weight_and_codes, weight_of
from megaopt.kernels.formats import GRADS, WEIGHTS, Format
from megaopt.kernels.step.batch import Formats
from megaopt.kernels.step.reference import store_scaled
from megaopt.memory import Named
from megaopt.options import Options

State = dict[str, Any]


def formats_of(
    weight: torch.Tensor,
    grad_dtype: torch.dtype,
    moments: tuple[str, ...],
    options: Options,
    masters: bool,
) -> Formats:
    """The formats of a parameter's buffers under these options; moments: their names."""
    cast = cast_of(weight, options.direct_cast)
    return Formats(
        GRADS[grad_dtype],
        WEIGHTS[weight.dtype] if cast is None else cast.recipe.format,
        options.master_format(weight.dtype, masters, cast is not None),
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
    weight: torch.Tensor,
    formats: Formats,
    external: torch.Tensor | None,
) -> None:
    """Adds to `state` what is missing: zero moments, and the master, external or made here.

    A master made here starts as the weight's own value, which every format holds exactly or, fp16
    with a scale, to its precision; that of fp8 as what the weight was made from, if that is kept.
    """
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
        value = first_master(weight) if formats.cast else value_of(weight, formats)
        if formats.master.joined:  # the weight stays as it is
            state[MASTER] = formats.master.encode_reference(value)[1]
        else:
            state.update(encoded(MASTER, value, formats.master, weight)[0])


def value_of(weight: torch.Tensor, formats: Formats) -> torch.Tensor:
    """The fp32 value of a weight without a master; of fp8 what its codes stand for."""
    return dequantized(weight) if formats.cast else formats.weight.decode_reference(weight)


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


def written_tensors(param: torch.Tensor, state: State, where: str) -> list[Named]:
    """The tensors of a parameter that a step writes: weight or codes, and the state's."""
    local = local_of(param)
    codes = local if weight_of(local) is None else weight_and_codes(local)[1]
    tensors = {"weight": codes, **{f"state {name!r}": local_of(v) for name, v in state.items()}}
    own = tensors.items()
    return [Named(where, name, t) for name, t in own if isinstance(t, torch.Tensor)]


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
