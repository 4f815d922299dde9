"""State dicts for torch's own optimizers: values as torch keeps them, and its names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import compress
from typing import Any

import torch

from megaopt.kernels.refusals import one_of, refuse
from megaopt.options.checks import NOT_NEGATIVE, errors_of, number
from megaopt.options.choices import SteppedBy
from megaopt.options.options import BESIDE, FORMATS, Options, check_group
from megaopt.params import ParamView
from megaopt.params.view import SCALE, STEP
from megaopt.saving.parse import NOT_MADE, WRITTEN
from megaopt.state.owned import Owned
from megaopt.state.tensors import MASTER

OURS = ("contract", "adam_w_mode", "step", "bias_correction", FORMATS)
"""Keys of our groups that torch's have not."""
MOST_STEPS = 2**24
"""torch counts in fp32, which holds every whole number up to here."""

TORCHS = {
    "muon": ("lr", "weight_decay", "momentum", "nesterov", "eps", "ns_steps", "adjust_lr_fn"),
    "adamw": ("lr", "betas", "eps", "weight_decay"),
}
"""Numbers of torch's groups that are ours, by rule."""
BOTH = "both"
BY_PLACE = ("params", "param_names", "param_numbers")
"""Keys of groups with a value for each parameter."""

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


def muon_state_dict(
    optimizer: Any, owned: Owned, rule: SteppedBy | None, drop_masters: bool
) -> dict[str, Any]:
    """See FusedMuon.to_torch_state_dict; owned: the optimizer's."""
    options = optimizer.options
    rules = ["adamw" if view.matrix is None else "muon" for view in owned.views]
    one_of("rule", rule, (None, *TORCHS, BOTH))
    if rule is None and len({*rules}) > 1:
        raise ValueError(
            "rule must be 'muon', for torch.optim.Muon, and in a second call 'adamw', for "
            "torch.optim.AdamW, as each steps some of the parameters, or 'both', for another "
            "FusedMuon; got None"
        )
    target: str = rule or (rules[0] if rules else "muon")
    packed = optimizer.state_dict()
    chosen = [place for place, stepped_by in enumerate(rules) if target in (stepped_by, BOTH)]
    numbers = {place: number for number, place in enumerate(chosen)}
    packed_states = {place: packed["state"][place] for place in chosen if place in packed["state"]}
    groups = []
    for index, group in enumerate(packed["param_groups"]):
        # the parameters that have numbers, under these
        mask = [place in numbers for place in group["params"]]
        lists = {key: group[key] for key in BY_PLACE if group.get(key) is not None}
        lists["params"] = [numbers.get(place) for place in group["params"]]
        subgroup = {**group, **{key: [*compress(values, mask)] for key, values in lists.items()}}
        if target == BOTH:  # without formats and contracts
            entries = {
                key: subgroup[key] for key in subgroup if key not in ("contract", FORMATS, BESIDE)
            }
            groups.append({**entries, "maximize": options.maximize})
        elif subgroup["params"]:
            views = [owned.views[chosen[number]] for number in subgroup["params"]]
            groups.append(_torch_group(subgroup, target, options, views, f"group {index}"))
    states = plain_states(optimizer, owned, packed_states, drop_masters)
    if target == "adamw":
        states = with_counts(states, owned, packed_states)
    elif target == BOTH:
        for place, state in states.items():
            state.update({STEP: packed_states[place][STEP]} if STEP in packed_states[place] else {})
    rest = {name: value for name, value in packed.items() if name not in (NOT_MADE, WRITTEN)}
    numbered_states = {numbers[place]: state for place, state in states.items()}
    return {**rest, "state": numbered_states, "param_groups": groups}


def _torch_group(
    group: Mapping[str, Any], rule: str, options: Any, views: Sequence[ParamView], where: str
) -> dict[str, Any]:
    """Returns a group of torch's optimizer; raises ValueError for what that does not have."""
    left_out = (*options.names_but_step, *OURS, BESIDE, "seed", "param_numbers")
    rest = {key: value for key, value in group.items() if key not in left_out}
    if rule == "adamw":
        check_counted({**group, "params": [view.param for view in views]}, options, where)
        numbers = {key: group[key] for key in TORCHS[rule]}
        numbers["eps"] = group["eps" if group["use_muon"] is False else "adam_eps"]
        return adam_group({**rest, **numbers}, options)
    if options.maximize:
        refuse("maximize", "False for torch.optim.Muon", True)
    for view in views:
        if view.param.dim() != 2:
            refuse(f"{where}: its parameters", "of two dimensions for torch.optim.Muon", view.param)
    with errors_of(f"{where}, for torch.optim.Muon"):
        how = replace(options.how(group), contract="torch", method="auto", precision="bf16")
    numbers = {key: group[key] for key in TORCHS[rule]}
    numbers["lr"] = number(f"{where}: lr", group["lr"], NOT_NEGATIVE)
    return {**rest, **numbers, "ns_coefficients": how.coefficients[0]}
