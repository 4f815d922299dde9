"""A state dict that torch.optim.AdamW and Adam load."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from megaopt.options.checks import NOT_NEGATIVE, number
from megaopt.options.options import FORMATS, Options, check_group
from megaopt.params import view_of
from megaopt.params.view import SCALE, STEP
from megaopt.saving.parse import NOT_MADE, WRITTEN
from megaopt.state.tensors import MASTER

if TYPE_CHECKING:
    from megaopt.optimizer import FusedOptimizer

OURS = ("contract", "adam_w_mode", "step", "bias_correction", FORMATS)
"""Keys of our groups that torch's have not."""
MOST_STEPS = 2**24
"""torch counts in fp32, which holds every whole number up to here."""


def torch_state_dict(optimizer: FusedOptimizer, drop_masters: bool) -> dict[str, Any]:
    """See FusedAdam.to_torch_state_dict."""
    owned = optimizer._owned
    params, groups, labels = owned.params, owned.group_numbers, owned.labels
    for index, group in enumerate(optimizer.param_groups):
        _check(group, optimizer.options, f"group {index}")
    packed = optimizer.state_dict()
    states = {}
    for key, state in packed["state"].items():
        param, where = params[key], labels[key]
        if not state:
            continue  # someone looked: optimizer.state makes an empty entry for whom it lacks
        _check_state(param, state, optimizer.rule.moments, where, drop_masters)
        # a format with a scale as fp32 numbers, others as they are stored
        states[key] = {
            name: optimizer.get_unscaled_state(param, name)
            if name + SCALE in state
            else state[name]
            for name in optimizer.rule.moments
        }
        count = float(state.get(STEP, optimizer.param_groups[groups[key]][STEP]))
        states[key][STEP] = torch.tensor(count, dtype=torch.float32, device="cpu")
    own = [_group(group, optimizer.options) for group in packed["param_groups"]]
    kept = {name: value for name, value in packed.items() if name not in (NOT_MADE, WRITTEN)}
    return {**kept, "state": states, "param_groups": own}


def _check(group: Mapping[str, Any], options: Options, where: str) -> None:
    step = int(group["step"])
    check_group({**group, "step": step}, options, where)
    if not group["bias_correction"]:
        raise ValueError(f"{where}: bias_correction must be True, as torch's always is, got False")
    if step > MOST_STEPS:
        raise ValueError(
            f"{where}: step must be <= {MOST_STEPS}, as torch counts in fp32, got {step}"
        )


def _check_state(
    param: torch.Tensor,
    state: Mapping[str, Any],
    moments: tuple[str, ...],
    where: str,
    drop_masters: bool,
) -> None:
    if view_of(param).weight is not None:
        raise ValueError(f"{where}: the weight must not be in fp8, which torch cannot step")
    missing = [name for name in moments if name not in state]
    if missing:
        raise ValueError(f"{where}: its state must have {', '.join(moments)}, got no {missing[0]}")
    if MASTER in state and not drop_masters:
        raise ValueError(
            f"{where}: drop_masters must be True, as torch keeps no master beside a weight, got "
            "False; get_unscaled_state(param, 'master_param') has its numbers"
        )


def _group(group: Mapping[str, Any], options: Any) -> dict[str, Any]:
    """A group of a state dict with torch's keys in the place of ours."""
    kept = {name: value for name, value in group.items() if name not in OURS}
    lr = group["lr"] if options.capturable else number("lr", group["lr"], NOT_NEGATIVE)
    torchs = {
        "lr": lr,
        "amsgrad": options.amsgrad,
        "maximize": options.maximize,
        "foreach": None,
        "capturable": options.capturable,
        "differentiable": False,
        "fused": True if options.contract == "torch" else None,
        "decoupled_weight_decay": options.adam_w_mode,
    }
    return {**kept, **torchs}
