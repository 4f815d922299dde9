"""State dicts for torch's own optimizers: values as torch keeps them, and its names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from megaopt.options.checks import NOT_NEGATIVE, number
from megaopt.options.options import FORMATS, Options, check_group
from megaopt.params.view import SCALE, STEP
from megaopt.saving.parse import NOT_MADE, WRITTEN
from megaopt.state.owned import Owned
from megaopt.state.tensors import MASTER

OURS = ("contract", "adam_w_mode", "step", "bias_correction", FORMATS)
"""Keys of our groups that torch's have not."""
MOST_STEPS = 2**24
"""torch counts in fp32, which holds every whole number up to here."""

States = dict[int, dict[str, Any]]


def plain_states(
    optimizer: Any, owned: Owned, packed: Mapping[int, Any], drop_masters: bool
) -> States:
    """The states that an optimizer's state dict has, without masters, counts and scales.

    What has a scale is given as its fp32 numbers, all else as it is stored. owned: the optimizer's.
    packed: states by the parameters' places. Raises ValueError for what torch cannot go on from.
    """
    states: States = {}
    for place, state in packed.items():
        if not state:
            continue  # someone looked: optimizer.state makes an empty entry for whom it lacks
        view, where = owned.views[place], owned.labels[place]
        if view.weight is not None:
            raise ValueError(f"{where}: the weight must not be in fp8, which torch cannot step")
        # moments and what rules keep; masters and scales are left behind
        names = (*owned.moments(view), *view.kept)
        missing = [name for name in names if name not in state]
        if missing:
            words = ", ".join(names)
            raise ValueError(f"{where}: its state must have {words}, got no {missing[0]}")
        if MASTER in state and not drop_masters:
            raise ValueError(
                f"{where}: drop_masters must be True, as torch keeps no master beside a weight, "
                "got False; get_unscaled_state(param, 'master_param') has its numbers"
            )
        states[place] = {
            name: optimizer.get_unscaled_state(view.param, name)
            if name + SCALE in state
            else state[name]
            for name in names
        }
    return states


def with_counts(states: States, owned: Owned, packed: Mapping[int, Any]) -> States:
    """The same with the step counts of parameters, or of their groups, as torch keeps them."""
    for place, state in states.items():
        count = packed[place].get(STEP, owned.groups[owned.group_numbers[place]][STEP])
        state[STEP] = torch.tensor(float(count), dtype=torch.float32, device="cpu")
    return states


def check_counted(group: Mapping[str, Any], options: Options, where: str) -> None:
    """Raises ValueError for a group's numbers, and for more steps than torch counts."""
    step = int(group["step"])
    check_group({**group, "step": step}, options, where)
    if step > MOST_STEPS:
        raise ValueError(
            f"{where}: step must be <= {MOST_STEPS}, as torch counts in fp32, got {step}"
        )


def adam_group(group: Mapping[str, Any], options: Any) -> dict[str, Any]:
    """Returns a group of torch's Adam or AdamW. group: of ours, without OURS."""
    lr = group["lr"] if options.capturable else number("lr", group["lr"], NOT_NEGATIVE)
    return {
        **group,
        "lr": lr,
        "amsgrad": getattr(options, "amsgrad", False),
        "maximize": options.maximize,
        "foreach": None,
        "capturable": options.capturable,
        "differentiable": False,
        "fused": True if options.contract == "torch" else None,
        "decoupled_weight_decay": getattr(options, "adam_w_mode", True),
    }


def adam_state_dict(optimizer: Any, owned: Owned, drop_masters: bool) -> dict[str, Any]:
    """See FusedAdam.to_torch_state_dict; owned: the optimizer's."""
    for index, group in enumerate(optimizer.param_groups):
        where = f"group {index}"
        check_counted(group, optimizer.options, where)
        if not group["bias_correction"]:
            raise ValueError(
                f"{where}: bias_correction must be True, as torch's always is, got False"
            )
    packed = optimizer.state_dict()
    plain = plain_states(optimizer, owned, packed["state"], drop_masters)
    groups = [
        adam_group({key: group[key] for key in group if key not in OURS}, optimizer.options)
        for group in packed["param_groups"]
    ]
    entries = {name: value for name, value in packed.items() if name not in (NOT_MADE, WRITTEN)}
    states = with_counts(plain, owned, packed["state"])
    return {**entries, "state": states, "param_groups": groups}
