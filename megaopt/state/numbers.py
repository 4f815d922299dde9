"""The groups' numbers: checked where they changed, made into rows, or put on the device."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import repeat
from typing import Any

import torch

from megaopt.kernels.refusals import is_dense, shown
from megaopt.kernels.rules import Rule
from megaopt.options.checks import COUNT, LAST_STEP, NOT_NEGATIVE, number
from megaopt.options.options import MISSING, Options, check_there
from megaopt.state.memory import check_writable

FIXED = {float, int, bool, str, type(None)}
"""Types whose objects keep their value."""
Row = tuple[float, ...]


class GroupScalars:
    """The scalars that a step takes from the groups.

    A check takes some 20 us a group; where a step finds the very objects of the last one, 1 us.
    """

    def __init__(self, options: Options, rule: Rule) -> None:
        self.options, self.rule = options, rule
        self._names = (*options.names_but_step, *options.MARKS, *options.OF_ALL)
        self._seen: list[list[Any]] = []
        self._sizes: list[int] = []
        """The number of keys of each group."""
        self._given: list[Any] = []
        """The groups' param_numbers."""
        self._is_given = False
        """Whether a group had any."""

    def rows(
        self, groups: Sequence[Mapping[str, Any]], check: Callable[[], None]
    ) -> list[Row] | None:
        """The rule's scalars of each group for the coming step; None with capturable=True.

        check: raises ValueError for a number that the step cannot use.
        """
        # [] before the first check, and where a group has values that can be edited
        seen, is_given = self._seen, self._is_given
        is_known = not self.options.capturable and len(seen) == len(groups)
        for group, size, values in zip(groups, self._sizes, seen, strict=True) if is_known else ():
            # an int goes up at each step: it is checked by itself
            step = group.get("step")
            if (
                len(group) != size
                or type(step) is not int
                or not 0 <= step <= LAST_STEP
                # without a line of Python for each of some 20 names, which takes 1 us
                or not all(map(operator.is_, map(group.get, self._names, repeat(MISSING)), values))
            ):
                is_known = False
                break
            is_given = is_given or "param_numbers" in group
        if not is_known or (is_given and given_numbers(groups) != self._given):
            # only what was checked is remembered
            check()
            if self.options.capturable:
                return None
            # the very objects: floats, ints and strings keep their value as long as they are the
            # same, and so does a tuple of these
            seen = [[group.get(name, MISSING) for name in self._names] for group in groups]
            entries = [value for values in seen for value in values if value is not MISSING]
            # tuples may hold tuples, as coefficients do
            while any(type(entry) is tuple for entry in entries):
                entries = [e for v in entries for e in (v if type(v) is tuple else (v,))]
            kinds = {*map(type, entries)}
            self._given = given_numbers(groups)
            self._is_given = any(numbers is not None for numbers in self._given)
            self._seen, self._sizes = (seen if kinds <= FIXED else []), [*map(len, groups)]
        # for the update after the last one
        return [self.rule.row({**group, "step": int(group["step"]) + 1}) for group in groups]


def given_numbers(groups: Iterable[Mapping[str, Any]]) -> list[Any]:
    """Returns each group's param_numbers, or None, in lists that no group can edit."""
    lists = [group.get("param_numbers") for group in groups]
    return [list(numbers) if isinstance(numbers, (list, tuple)) else numbers for numbers in lists]


# --- on the device

DTYPES = {"lr": torch.float32, "step": torch.int32}
SHAPES = {"lr": (), "step": (1,)}
RANGES = {"lr": NOT_NEGATIVE, "step": COUNT}


def on_device(group: Mapping[str, Any], device: torch.device, where: str) -> dict[str, Any]:
    """A group's lr and step as tensors on the device, without those that are so already.

    Also where inference mode is on: later steps and schedules write them. The group
    stays as it is. Raises ValueError for numbers out of range.
    """
    tensors = {}
    for name, dtype in DTYPES.items():
        if not _fits(group[name], name, device) or group[name].is_inference():
            value = number(f"{where}: {name}", group[name], RANGES[name])
            with torch.inference_mode(False):
                tensors[name] = torch.full(SHAPES[name], value, dtype=dtype, device=device)
    return tensors


def check_device_numbers(group: Mapping[str, Any], device: torch.device, where: str) -> None:
    """Raises ValueError unless lr and step are what `on_device` makes, and step can be written."""
    check_there(group, DTYPES, where)
    for name, dtype in DTYPES.items():
        if not _fits(group[name], name, device):
            raise ValueError(
                f"{where}: {name} must be a {dtype} tensor of shape {SHAPES[name]} on {device} "
                f"with capturable=True, got {shown(group[name])}; to change it, use "
                f"group[{name!r}].fill_(...)"
            )
    check_writable(group["step"], f"{where}: step")


def _fits(value: Any, name: str, device: torch.device) -> bool:
    return (
        is_dense(value)
        and value.dtype == DTYPES[name]
        and value.numel() == 1
        and value.device == device
    )
