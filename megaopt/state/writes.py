"""Writes to weights that the optimizer did not do, and 16-bit weights without masters."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from megaopt.options.placement import STEP
from megaopt.params.dtensor import locals_of
from megaopt.state.owned import Owned
from megaopt.state.ownership import Versions, refreshed
from megaopt.state.tensors import MASTER


class MissingMastersWarning(UserWarning):
    """16-bit weights are stepped without fp32 masters, and nobody asked for that."""


@dataclass(eq=False)
class ExternalWrites:
    """Notices weights that were written between steps, and warns once of what that means."""

    warning_keys: set[str]
    """The keys of the warnings that were given, to share with others."""
    versions: Versions = field(default_factory=lambda: Versions([]))
    unstepped: set[int] = field(default_factory=set)
    """Ids of parameters whose masters were made here: until a step is counted, they follow."""

    def reset(
        self, params: Iterable[torch.Tensor], state: Mapping[Any, Any], written: Iterable[int] = ()
    ) -> None:
        """Notes that weights and masters are as they should be, but for those at `written`."""
        param_list = list(params)
        self.versions = Versions(param_list)
        self.versions.match(param_list, state)
        # these have to be compared with their masters
        self.versions.unmatched.update(param_list[place] for place in written)

    def take_over(self, owned: Owned, state: Mapping[Any, Any], places: list[int]) -> None:
        """Gives masters the values that others wrote into the weights at these places.

        Raises RuntimeError instead with on_external_write="error". Masters that no step has
        written yet, as those that torch.distributed.checkpoint asks for, follow their weights
        without a word.
        """
        # "ignore" leaves masters alone, which put old values back in this step
        policy = owned.options.on_external_write
        if policy == "ignore":
            return
        for place in places:
            view, label = owned.views[place], owned.labels[place]
            param_state = locals_of(state.get(view.param, {}))
            if param_state.get(MASTER) is None:
                continue
            # a master made here that no step has counted: it follows without a word
            if id(view.param) in self.unstepped and not owned.options.capturable:
                count: Any = param_state.get(STEP)
                if count is None:
                    count = owned.groups[owned.group_numbers[place]][STEP]
                if not int(count):
                    with torch.no_grad():
                        refreshed(view, param_state, owned.formats(view))
                    continue
            with torch.no_grad():
                # with "error" it only looks
                is_written = refreshed(
                    view, param_state, owned.formats(view), only_look=policy == "error"
                )
            if policy == "error" and bool(is_written):
                raise RuntimeError(
                    f"{label} must not be written between steps with "
                    "on_external_write='error', got elements that are no cast of their master; "
                    "refresh_masters() takes them over"
                )
            # under capturable the host does not wait to know
            if not ("written" in self.warning_keys or owned.options.capturable) and bool(
                is_written
            ):
                self.warning_keys.add("written")
                warn_caller(
                    f"{label} was written outside the optimizer: its master takes the "
                    "written values. on_external_write='error' refuses such writes, 'ignore' puts "
                    "the old values back"
                )

    def warn_of_lost_masters(self, owned: Owned, params: Iterable[torch.Tensor]) -> None:
        """Warns once where states were deleted with their masters, and new ones are made."""
        # those that had been compared with a master, and come without one
        lost = [param for param in params if param in self.versions.compared]
        if lost and "lost masters" not in self.warning_keys:
            self.warning_keys.add("lost masters")
            warn_caller(
                f"{len(lost)} parameters ({owned.labels[owned.index(lost[0])]} the first) have no "
                "master any more, which was in the state: a new one starts from the weight as it "
                "is rounded, and the group's step count goes on. optimizer.reset_moments() begins "
                "anew with moments and counts, and keeps masters"
            )

    def warn_without_masters(self, owned: Owned, params: Iterable[torch.Tensor]) -> None:
        """Warns once where nobody said whether 16-bit weights are to have masters."""
        is_chosen = owned.options.dtype is not None or owned.masters is not None
        drawn = owned.options.weight_rounding == "stochastic"  # then no update is lost
        if is_chosen or drawn or "no masters" in self.warning_keys:
            return
        labels = dict(zip(owned.params, owned.labels, strict=True))
        short = [labels[p] for p in params if p.dtype in (torch.bfloat16, torch.float16)]
        if short:
            self.warning_keys.add("no masters")
            warn_caller(
                f"{len(short)} parameters ({short[0]} the first) are 16-bit and have no fp32 "
                "master: updates smaller than half a unit in a weight's last place are lost, and "
                "at common learning rates weights stand still. Pass dtype=torch.float32 for fp32 "
                "masters (or set optimizer.master_weights = True before the first step), "
                "weight_rounding='stochastic' to lose none in the mean, or master_weights=False to "
                "train without",
                MissingMastersWarning,
            )

    def hint(self, messages: Mapping[str, str]) -> None:
        """Warns of what may be a mistake, once for each key.

        messages: by key.
        """
        for key, message in messages.items():
            if f"key {key}" not in self.warning_keys:
                self.warning_keys.add(f"key {key}")
                warn_caller(message)


def warn_caller(message: str, category: type[Warning] = UserWarning) -> None:
    """Warns at the line that called into this package, past torch's wrappers of step()."""
    # up the stack to the first frame outside
    level, frame = 1, sys._getframe()
    while frame.f_back and frame.f_globals.get("__name__", "").split(".")[0] in (
        "megaopt",
        "torch",
    ):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)
