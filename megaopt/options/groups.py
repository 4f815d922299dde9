"""The groups that an optimizer is given: what may be in them."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch

from megaopt.options.checks import refuse, shown
from megaopt.options.names import check_keys
from megaopt.options.options import Options, check_group, check_group_options


class States(defaultdict[torch.Tensor, Any]):
    """`state`: false until one has content.

    torch.distributed.checkpoint leaves out the step that makes the states where `if state`, and all
    ranks have to take that step together: an entry that one rank made by looking is no state.
    """

    def __bool__(self) -> bool:
        return any(self.values())


def entries_of(name: str, values: Any) -> Any:
    """What torch takes as parameters, in a list of its own; groups are copied.

    Raises TypeError where torch would fail without a message.
    """
    if isinstance(values, (torch.Tensor, set)):
        return values  # torch takes or refuses it
    try:
        each = iter(values)
    except TypeError:
        raise TypeError(
            f"{name} must be tensors, (name, tensor) pairs or groups, got {shown(values)}"
        ) from None
    entries = [dict(entry) if isinstance(entry, dict) else entry for entry in each]
    for index, entry in enumerate(entries):
        if isinstance(entry, tuple) and (len(entry) != 2 or not isinstance(entry[0], str)):
            raise TypeError(
                f"{name}[{index}] must be a tensor or a (name, tensor) pair, got {shown(entry)}"
            )
    return entries


def new_group(param_group: Any) -> dict[str, Any]:
    """A copy of a group to be added, for torch to write into."""
    if not isinstance(param_group, dict) or "params" not in param_group:
        raise TypeError(f"param_group must be a dict with 'params', got {shown(param_group)}")
    return {**param_group, "params": entries_of("params", param_group["params"])}


def _check_duplicates(params: list[torch.Tensor], where: str) -> None:
    """Raises ValueError where a parameter stands in a group twice, which would step it twice."""
    places: dict[int, int] = {}
    for place, param in enumerate(params):
        first = places.setdefault(id(param), place)
        if first != place:
            raise ValueError(
                f"{where}: each parameter must be there once, got one at {first} and {place}"
            )


def check_names(names: Any, count: int, where: str) -> None:
    """Raises ValueError unless they are the names of so many parameters, or None."""
    if names is None:
        return
    is_list = isinstance(names, (list, tuple)) and all(isinstance(name, str) for name in names)
    if not is_list or len(names) != count:
        refuse(f"{where}: param_names", f"a list of {count} names", names)


def check_new_group(group: dict[str, Any], options: Options, where: str) -> None:
    """Raises ValueError for a group that the optimizer cannot have; its parameters apart."""
    _check_duplicates(group["params"], where)
    check_names(group.get("param_names"), len(group["params"]), where)
    check_keys(group, options, where)
    check_group(group, options, where, lr_is_needed=False)
    check_group_options(group, options, where)
