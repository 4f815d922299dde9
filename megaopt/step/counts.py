"""Step counts of parameters, each with its own as torch's optimizers count: state[p]["step"]."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy
import torch

from megaopt.options.placement import STEP

if TYPE_CHECKING:
    from megaopt.state.owned import Owned

Count = dict[str, Any]
"""A number under "step" that goes up by one in place, as a group's does."""


@dataclass
class StepRows:
    """The row of scalars of each parameter: its group's, or one for another count.

    Parameters of one row share the tensor of their count: a step counts rows, not parameters.
    """

    by_place: dict[int, int] = field(default_factory=dict)
    """The rows of parameters that do not take their group's."""
    apart: list[tuple[int, Count]] = field(default_factory=list)
    """The group and the count of each row behind those of the groups."""
    with_group: list[tuple[int, Count]] = field(default_factory=list)
    """The count of parameters that take their group's row; none on the device, where it is the
    group's own tensor."""

    def groups(self, groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """A group with a count of its own for each row behind those of the groups."""
        return [{**groups[index], **count} for index, count in self.apart]

    def fit(self, groups: Sequence[Mapping[str, Any]]) -> bool:
        """Whether the groups' counts are still those of the parameters that take their rows."""
        return all(groups[index]["step"] == int(count["step"]) for index, count in self.with_group)


@dataclass(eq=False)
class GivenCounts:
    """Step counts in state dicts: they go on with the optimizer's, as the moments there do.

    torch's are in the states, as tensors. Whoever keeps a state dict (TorchFT does) would otherwise
    have moments of now beside a count of then.
    """

    remaining: list[tuple[weakref.ref[Any], int | torch.Tensor]] = field(default_factory=list)
    """The number of each that somebody may still have, and whose it is."""

    def new(
        self,
        count: Any,
        owner: int | torch.Tensor,
        shape: Sequence[int] = (),
        device: torch.device | str = "cpu",
    ) -> torch.Tensor:
        """A count for a state dict: int32.

        owner: the group's place, or the parameter.
        """
        with torch.inference_mode(False):  # a load of a checkpoint may write it
            if torch.device(device).type != "cpu":
                tensor = torch.full(shape, int(count), dtype=torch.int32, device=device)
                self.remaining.append((weakref.ref(tensor), owner))
                return tensor
            # weak references to numpy's arrays, as tensors that share memory are other objects
            number = numpy.full(shape, int(count), dtype=numpy.int32)
            self.remaining.append((weakref.ref(number), owner))  # views of the tensor have it, too
            return torch.from_numpy(number)

    def follow(self, groups: Sequence[Mapping[str, Any]], state: Mapping[Any, Any]) -> None:
        """Sets all counts that somebody still has to the optimizer's, after a step."""
        # who is gone has let go of its count
        entries = [(entry, entry[0]()) for entry in self.remaining]
        for (_, owner), number in entries:
            if number is None:
                continue
            # a parameter's own count, or its group's
            if isinstance(owner, torch.Tensor):
                count = state.get(owner, {}).get(STEP)
            else:
                count = groups[owner][STEP] if owner < len(groups) else None
            # in place: tensors in state dicts are views of this memory
            if count is not None:
                number[...] = int(count)
        self.remaining = [entry for entry, number in entries if number is not None]


def new_count(owned: Owned, value: int = 0) -> torch.Tensor:
    """int32, on the CPU, of shape (); with capturable=True as a group's, on the device, (1,)."""
    on_device = owned.options.capturable
    shape, device = ((1,), owned.device) if on_device else ((), torch.device("cpu"))
    with torch.inference_mode(False):
        return torch.full(shape, value, dtype=torch.int32, device=device)


def rows_of(owned: Owned, state: Mapping[Any, dict[str, Any]], places: Iterable[int]) -> StepRows:
    """The rows of the parameters at these places, whose states are complete and have counts.

    With capturable=True the host waits for the counts.
    """
    rows, chosen = StepRows(), list(places)
    # parameters that rest get a copy of their count where the group's own tensor goes on with this
    # step, which they do not take
    stepped, group_counts = set(chosen), {id(group["step"]) for group in owned.groups}
    for place, param in enumerate(owned.params):
        param_state = state.get(param, {})
        if place not in stepped and id(param_state.get(STEP)) in group_counts:
            with torch.inference_mode(False):
                param_state[STEP] = param_state[STEP].clone()
    # one row for each pair of group and count, whatever parameters have it
    of_groups = [int(group["step"]) for group in owned.groups]
    shared: dict[tuple[int, int], tuple[int, torch.Tensor]] = {}
    states = [state[owned.params[place]] for place in chosen]
    # parameters of one row get one tensor: the same object in each state
    for place, param_state, count in zip(chosen, states, _numbers(states), strict=True):
        group = owned.group_numbers[place]
        if (group, count) not in shared:
            is_with_group, on_device = count == of_groups[group], owned.options.capturable
            # on the device the group's own tensor counts for them
            if is_with_group and on_device:
                shared[group, count] = group, owned.groups[group]["step"]
            else:
                tensor = new_count(owned, count)
                # numpy's array shares the tensor's memory: the host raises it without torch
                entry = (group, {"step": tensor if on_device else tensor.numpy()})
                # rows apart come behind those of the groups
                (rows.with_group if is_with_group else rows.apart).append(entry)
                row = group if is_with_group else len(owned.groups) + len(rows.apart) - 1
                shared[group, count] = row, tensor
        row, param_state[STEP] = shared[group, count]
        if row != group:
            rows.by_place[place] = row
    return rows


def restart(owned: Owned, state: Mapping[Any, dict[str, Any]], places: Iterable[int]) -> None:
    """Restarts the counts of the parameters at these places, and of groups of these alone.

    Raises ValueError, before anything changes, where others have a state and share a group's count.
    """
    # parameters with a state that go on, and the groups of both sorts
    chosen, numbers = set(places), owned.group_numbers
    unchosen = [i for i, p in enumerate(owned.params) if i not in chosen and state.get(p)]
    groups, shared = {numbers[i] for i in chosen}, {numbers[i] for i in unchosen}
    if groups & shared and not owned.options.counts_apart:
        index = min(groups & shared)
        raise ValueError(
            f"params must have all parameters of group {index} that have a state, or none, as they "
            "share a step count, which corrects moments, got "
            f"{sum(numbers[i] == index for i in chosen)} of {numbers.count(index)}: give them a "
            "group of their own, or the optimizer step_counts='parameter', where it takes that"
        )
    # tensors that others count by: these are left alone
    rest = {id(state[owned.params[i]].get(STEP)) for i in unchosen}
    rest |= {id(group["step"]) for i, group in enumerate(owned.groups) if i not in groups - shared}
    # a count of one's own is set to 0 in place, a shared one is left for a new one
    for param_state in [state.get(owned.params[i], {}) for i in chosen]:
        if STEP in param_state and id(param_state[STEP]) in rest:
            param_state[STEP] = new_count(owned)
        elif STEP in param_state:  # which a CUDA graph may read
            param_state[STEP].zero_()
    # groups all of whose parameters begin anew
    for index in groups - shared:
        group = owned.groups[index]
        group["step"] = group["step"].zero_() if owned.options.capturable else 0


def _numbers(states: Sequence[Mapping[str, Any]]) -> list[int]:
    # one copy from the device for all of them, for which the host waits
    counts = [state[STEP].reshape(()) for state in states]
    numbers: list[int] = torch.stack(counts).tolist() if counts else []
    return numbers
