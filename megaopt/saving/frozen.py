"""Refuses loads that would lose the state of a frozen parameter without a word.

torch.distributed.checkpoint saves such states, and leaves them out when it loads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from megaopt.params.dtensor import local_of
from megaopt.saving.formats import FROZEN, frozen_of
from megaopt.state.owned import Owned
from megaopt.step.collect import completed_states
from megaopt.step.probing import is_asked_by_torch, loads_frozen, on_any_rank

States = Mapping[Any, Mapping[str, Any]]


def marked_frozen(owned: Owned, state: States) -> list[str]:
    """For each group what stands under FORMATS behind its formats, of frozen parameters.

    The places in the group of those whose states are to be kept; nothing where there are none.
    """
    firsts = [owned.group_numbers.index(g) if owned.groups[g]["params"] else 0 for g in _all(owned)]
    found: dict[int, list[str]] = {}
    for place in _with_news(owned, state, range(len(owned.params))):
        group = owned.group_numbers[place]
        found.setdefault(group, []).append(str(place - firsts[group]))
    return [f", {FROZEN}={' '.join(found[g])}" if g in found else "" for g in _all(owned)]


def check_frozen(groups: Sequence[Mapping[str, Any]], owned: Owned, state: States) -> None:
    """Raises ValueError where torch leaves out, or has replaced, the state of a frozen parameter.

    groups: of the state dict, as saved. state: the optimizer's, as it is before the load.
    """
    if not is_asked_by_torch() or not _go_by_names(groups):
        return
    frozen = [place for place, param in enumerate(owned.params) if not param.requires_grad]
    marked = _marked(groups, owned)
    lost = [place for place in frozen if place in marked]
    held = [place for place in frozen if state.get(owned.params[place])]
    lost = lost or _with_news(owned, state, held)
    if lost and not loads_frozen():
        who = "the checkpoint" if lost[0] in marked else "this optimizer"
        raise ValueError(
            f"{owned.labels[lost[0]]}: requires_grad must be True before get_optimizer_state_dict "
            "and until set_optimizer_state_dict is done, got False: torch.distributed.checkpoint "
            f"loads no state of a frozen parameter, and {who} has one; or load_state_dict of what "
            "state_dict() gave"
        )


def _all(owned: Owned) -> range:
    return range(len(owned.groups))


def _go_by_names(groups: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a framework has put the state dict together; by places it is whole."""
    return any(isinstance(key, str) for group in groups for key in group["params"])


def _marked(groups: Sequence[Mapping[str, Any]], owned: Owned) -> set[int]:
    """Places of parameters that were frozen, and had a state to keep, when they were saved."""
    found, first = set(), 0
    for saved, own in zip(groups, owned.groups, strict=True):
        found |= {first + place for place in frozen_of(saved)}
        first += len(own["params"])
    return found


def _with_news(owned: Owned, state: States, places: Iterable[int]) -> list[int]:
    """Finds the frozen ones of these places whose states a step would not make anew as they are.

    Ranks with shards of them ask each other, as a checkpoint has what one of them says.
    """
    params = owned.params
    chosen = [i for i in places if not params[i].requires_grad and state.get(params[i])]
    flags = [not _is_new(owned, state[params[place]], place) for place in chosen]
    found = on_any_rank(flags, [owned.views[place] for place in chosen])
    return [place for place, has in zip(chosen, found, strict=True) if has]


def _is_new(owned: Owned, own: Mapping[str, Any], place: int) -> bool:
    """Whether a state is as one that is made now, on this rank."""
    try:
        (made,) = completed_states(owned, {}, [place]).values()
    except ValueError:  # a master of the caller's that is not its weight's
        return False
    return all(_same(value, made.get(name)) for name, value in own.items())


def _same(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return one is None and other is None
    parts = [local_of(each).detach() for each in (one, other)]
    if parts[0].dtype != parts[1].dtype or parts[0].shape != parts[1].shape:
        return False
    # as bytes, which torch compares in all dtypes
    codes = [part.contiguous().reshape(-1).view(torch.uint8) for part in parts]
    return torch.equal(codes[0], codes[1].to(codes[0].device))
