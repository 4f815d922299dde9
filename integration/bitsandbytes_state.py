"""State dicts of bitsandbytes' optimizers: read as fp32 values, and written."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch

from megaopt.optimizer import FusedOptimizer
from megaopt.options.checks import refuse
from megaopt.params import view_of

MOMENTS = {"exp_avg": "1", "exp_avg_sq": "2"}
"""What bitsandbytes' names of each moment's tensors end in."""
INNER = "__bnb_optimizer_quant_state__"
"""Under which name newer releases hide all of a state's tensors from FSDP."""
OTHER_GROUP_KEYS = ("alpha", "t_alpha", "t_beta3")
"""Of AdEMAMix, in the groups of all."""
BLOCK, OLDER_BLOCK = 256, 2048


def unpacked_state_dict(state_dict: Any) -> Any:
    """A state dict of bitsandbytes with fp32 exp_avg and exp_avg_sq; the given one stays.

    megaopt.FusedAdam, or FusedLion, and torch.optim.AdamW load it. What has no state1 is passed on
    as it is.

    Raises ValueError for 8-bit states that are not block-wise.
    """
    states = state_dict.get("state") if isinstance(state_dict, Mapping) else None
    groups = state_dict.get("param_groups") if isinstance(state_dict, Mapping) else None
    if not isinstance(states, Mapping) or not isinstance(groups, (list, tuple)):
        return state_dict
    flat = {key: _flat(state) for key, state in states.items()}
    if not any(isinstance(state, Mapping) and "state1" in state for state in flat.values()):
        return state_dict
    has_two = any("state2" in state for state in flat.values())
    dropped = OTHER_GROUP_KEYS if has_two else (*OTHER_GROUP_KEYS, "eps")
    return {
        **state_dict,
        "state": {key: _unpacked(state, f"state {key}") for key, state in flat.items()},
        "param_groups": [{k: v for k, v in g.items() if k not in dropped} for g in groups],
    }


def _flat(state: Any) -> Any:
    if not isinstance(state, Mapping) or not isinstance(state.get(INNER), Mapping):
        return state
    return {**{name: value for name, value in state.items() if name != INNER}, **state[INNER]}


def _unpacked(state: Mapping[str, Any], where: str) -> dict[str, Any]:
    # galore_torch keeps its projector beside the codes
    found = {name: state[name] for name in ("step", "projector") if name in state}
    for name, number in MOMENTS.items():
        code = state.get(f"state{number}")
        if code is not None:
            is_coded = isinstance(code, torch.Tensor) and code.dtype == torch.uint8
            found[name] = _values(state, number, where) if is_coded else code
    return found


def _values(state: Mapping[str, Any], number: str, where: str) -> torch.Tensor:
    """The fp32 values of 8-bit codes: of the code's place in the map, times the block's amax."""
    code: torch.Tensor = state[f"state{number}"]
    table: Any = state.get(f"qmap{number}")
    amax: Any = state.get(f"absmax{number}")
    if not isinstance(table, torch.Tensor) or table.shape != (256,):
        refuse(f"{where}: qmap{number}", "a tensor of 256 values", table)
    sizes = [s for s in (BLOCK, OLDER_BLOCK) if _is_amax(amax, -(-code.numel() // s))]
    if not sizes:
        refuse(f"{where}: absmax{number}", f"a number for each block of {BLOCK} elements", amax)
    scale = amax.repeat_interleave(sizes[0])[: code.numel()].view(code.shape)
    values: torch.Tensor = table[code.long()].float() * scale
    return values


def _is_amax(amax: Any, blocks: int) -> bool:
    return isinstance(amax, torch.Tensor) and amax.shape == (blocks,)


def packed_state_dict(optimizer: FusedOptimizer) -> dict[str, Any]:
    """See megaopt.integration.bitsandbytes.AdamW8bit.to_bitsandbytes_state_dict."""
    packed, states = optimizer.state_dict(), {}
    params = [param for group in optimizer.param_groups for param in group["params"]]
    steps = [int(g["step"]) for g in optimizer.param_groups for _ in g["params"]]
    for key, (param, step) in enumerate(zip(params, steps, strict=True)):
        if view_of(param).is_sharded:
            refuse(f"parameter {key}", "a plain tensor", param)
        if optimizer.state.get(param):
            states[key] = {"step": step, **_packed(optimizer, param)}
    groups = [_group(group, optimizer) for group in packed["param_groups"]]
    return {"state": states, "param_groups": groups}


def _packed(optimizer: FusedOptimizer, param: torch.Tensor) -> dict[str, torch.Tensor]:
    found = {}
    for name in optimizer.rule.moments:
        number, value = MOMENTS[name], optimizer.get_unscaled_state(param, name)
        found[f"state{number}"] = value
        if optimizer.state[param][name].dtype == torch.uint8:
            functional = import_module("bitsandbytes.functional")
            table = functional.create_dynamic_map(signed=name == "exp_avg").to(param.device)
            code, rest = functional.quantize_blockwise(value, code=table, blocksize=BLOCK)
            own = {"state": code, "qmap": table, "absmax": rest.absmax}
            found.update({f"{kind}{number}": tensor for kind, tensor in own.items()})
    return found


def _group(group: Mapping[str, Any], optimizer: FusedOptimizer) -> dict[str, Any]:
    """With bitsandbytes' keys alone: Lion's eps is 0 there."""
    names = ("lr", "betas", "weight_decay", "params")
    numbers = {name: group[name] for name in names}
    theirs = {"alpha": 0.0, "t_alpha": None, "t_beta3": None} if "eps" in group else {}
    return {**numbers, "eps": group.get("eps", 0.0), **theirs}
