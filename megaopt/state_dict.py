"""State dicts: ours, exact to the bit, and those of TransformerEngine and torch."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from megaopt.batches import MASTER, SCALE, state_name
from megaopt.dtensor import check_sharding, local_of, locals_of, sharded_state
from megaopt.kernels.step.batch import Formats
from megaopt.options import MARKS, Options, check_group, number
from megaopt.state import State, set_unscaled

if TYPE_CHECKING:
    from megaopt.stateful import StatefulOptimizer

# Keys of a group in a state dict, by policy, beside MARKS.
# torch's and TransformerEngine's groups: implementation choices that move no number.
IGNORED = ("foreach", "fused", "capturable", "differentiable")
# torch's: features that must be off.
UNSUPPORTED = ("amsgrad", "maximize")


@dataclass
class Loaded:
    """A state dict, checked and converted, ready to be taken over."""

    states: dict[torch.Tensor, State]
    groups: list[dict[str, Any]]


def mark(packed: dict[str, Any], options: Options) -> dict[str, Any]:
    """Adds to every group of a state dict what a load compares; leaves out masters that are none.

    torch.distributed.checkpoint flattens tensors and numbers, but no None.
    """
    state = {
        key: {name: value for name, value in own.items() if value is not None}
        for key, own in packed["state"].items()
    }
    groups = [{**group, **options.marks} for group in packed["param_groups"]]
    return {**packed, "state": state, "param_groups": groups}


def read(
    state_dict: Mapping[str, Any],
    optimizer: StatefulOptimizer,
    params: list[torch.Tensor],
    wheres: list[str],
) -> Loaded:
    """Checks and converts a state dict for an optimizer, which it leaves as it is.

    Raises:
        ValueError: see FusedAdam.load_state_dict.
    """
    for key in ("state", "param_groups"):
        if key not in state_dict:
            raise ValueError(f"the state dict has no {key!r}: found {', '.join(state_dict)}")
    saved_groups = state_dict["param_groups"]
    order = _saved_order(saved_groups, optimizer.param_groups)
    steps = _torch_steps(state_dict["state"], saved_groups)
    groups = [
        _group(saved, own, optimizer.options, steps[index], f"group {index}")
        for index, (saved, own) in enumerate(zip(saved_groups, optimizer.param_groups, strict=True))
    ]
    ours = all("contract" in group for group in saved_groups)
    positions = {key: position for position, key in enumerate(order)}
    states: dict[torch.Tensor, State] = {}
    for key, saved in state_dict["state"].items():
        if key not in positions:
            raise ValueError(
                f"state {key!r} of the state dict belongs to no parameter of its groups"
            )
        if not saved:
            continue  # someone looked: optimizer.state makes an empty entry for whom it lacks
        # unflattened by torch.distributed.checkpoint, what was None comes back as {}
        saved = {name: value for name, value in saved.items() if not _is_empty(value)}
        param, where = params[positions[key]], wheres[positions[key]]
        take = _ours if ours else _foreign
        for name in (*optimizer.rule.moments, MASTER):
            check_sharding(saved.get(name), param, f"{where}: {name!r} in the state dict")
        state = take(locals_of(saved), optimizer, local_of(param), where)
        states[param] = sharded_state(param, state)
    return Loaded(states, groups)


def _is_empty(value: object) -> bool:
    return isinstance(value, dict) and not value


def _saved_order(saved: list[dict[str, Any]], own: list[dict[str, Any]]) -> list[Any]:
    sizes = [[len(group["params"]) for group in groups] for groups in (saved, own)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"the state dict has groups of {sizes[0]} parameters: allowed are this optimizer's, "
            f"{sizes[1]}"
        )
    return [key for group in saved for key in group["params"]]


def _torch_steps(states: Mapping[Any, State], groups: list[dict[str, Any]]) -> list[int | None]:
    """For each group the step count that torch keeps with every parameter, None without one.

    Raises ValueError where the parameters of a group were stepped unequally often.
    """
    found: list[int | None] = []
    for index, group in enumerate(groups):
        steps = {int(states[k]["step"]) for k in group["params"] if "step" in states.get(k, {})}
        if len(steps) > 1:
            raise ValueError(
                f"group {index}: its parameters have step counts {sorted(steps)}; allowed is one "
                "for all, which this optimizer keeps with the group"
            )
        found.append(steps.pop() if steps else None)
    return found


def _group(
    saved: dict[str, Any], own: dict[str, Any], options: Options, step: int | None, where: str
) -> dict[str, Any]:
    """The group after the load: what was saved, over what was there; checked."""
    for name in UNSUPPORTED:
        if saved.get(name):
            raise ValueError(f"{where}: {name}={saved[name]!r} in the state dict; allowed: False")
    marks = {name: saved[name] for name in MARKS if name in saved}
    if "decoupled_weight_decay" in saved:
        marks["adam_w_mode"] = saved["decoupled_weight_decay"]
    for name, value in marks.items():
        if value != getattr(options, name):
            raise ValueError(
                f"{where}: the state dict was saved under {name}={value!r}; allowed is this "
                f"optimizer's, {getattr(options, name)!r}"
            )
    left_out = {*MARKS, *IGNORED, *UNSUPPORTED, "decoupled_weight_decay", "params"}
    kept = {key: deepcopy(value) for key, value in saved.items() if key not in left_out}
    group = {**own, **kept}
    if step is not None:
        group["step"] = step
    if isinstance(group["step"], torch.Tensor):  # capturable: numbers, until the load is over
        group["step"] = int(number(group["step"], f"{where}: step"))
        group["lr"] = number(group["lr"], f"{where}: lr")
    check_group(group, where, lr_is_needed=options.capturable)
    return group


def _ours(saved: State, optimizer: StatefulOptimizer, param: torch.Tensor, where: str) -> State:
    """A copy of a state of ours on the parameter's device, which must be in our formats."""
    formats = optimizer._formats(param)
    names = {state_name(s, optimizer.rule.moments): s for s in (*formats.state_slots, "master")}
    state: State = {}
    for name, slot in names.items():
        present = slot in formats.slots
        if name not in saved and present:
            raise ValueError(f"{where}: the state dict has no {name!r}")
        state[name] = None
        if present:
            state[name] = _code(saved[name], formats, slot, param, f"{where}: {name!r}")
        elif saved.get(name) is not None:
            raise ValueError(
                f"{where}: {name!r} is {saved[name].dtype} in the state dict; allowed here: None"
            )
    unknown = [name for name in saved if name not in names]
    if unknown:
        raise ValueError(
            f"{where}: {', '.join(unknown)} in the state dict; allowed: {', '.join(names)}"
        )
    return state


def _code(saved: Any, formats: Formats, slot: str, param: torch.Tensor, where: str) -> torch.Tensor:
    dtype = formats.dtype(slot)
    shape = (1,) if slot.endswith(SCALE) else tuple(param.shape)
    if not isinstance(saved, torch.Tensor) or saved.dtype != dtype or tuple(saved.shape) != shape:
        found = type(saved).__name__
        if isinstance(saved, torch.Tensor):
            found = f"{saved.dtype} of shape {tuple(saved.shape)}"
        raise ValueError(f"{where} is {found} in the state dict; allowed: {dtype} of shape {shape}")
    return saved.detach().to(param.device, copy=True).contiguous()


def _foreign(saved: State, optimizer: StatefulOptimizer, param: torch.Tensor, where: str) -> State:
    """Another optimizer's state, its values stored in our formats."""
    formats = optimizer._formats(param)
    moments = optimizer.rule.moments
    state: State = {}
    for slot in ("first", "second", "master"):
        name, form = state_name(slot, moments), getattr(formats, slot)
        value = saved.get(name)
        if name == MASTER and not form.present:
            state[name] = None  # TransformerEngine keeps a dead one for fp32 weights
            continue
        if name == MASTER and value is None:
            continue  # made at the next step
        if not isinstance(value, torch.Tensor) or value.shape != param.shape:
            found = tuple(value.shape) if isinstance(value, torch.Tensor) else value
            raise ValueError(
                f"{where}: {name!r} is {found} in the state dict; allowed: a tensor of shape "
                f"{tuple(param.shape)}"
            )
        if value.dtype == form.dtype and not form.scaled:
            state[name] = value.detach().to(param.device, copy=True).contiguous()
        elif form.joined or not value.is_floating_point():
            raise ValueError(
                f"{where}: {name!r} is {value.dtype} in the state dict; allowed: {form.dtype}"
            )
        else:
            set_unscaled(state, name, value.detach(), form, param)
    return state
