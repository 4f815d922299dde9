"""The groups' numbers at the last check: most steps find the very same objects."""

from __future__ import annotations

from typing import Any

from megaopt.options.checks import LAST_STEP
from megaopt.options.groups import given_numbers
from megaopt.state.owned import Owned

FIXED = (float, int, bool, str, type(None))
"""Types whose objects keep their value."""


class CheckedNumbers:
    """Checks all groups, unless that would find what the last check found.

    A check takes some 20 us a group, this 1 us.
    """

    def __init__(self) -> None:
        self._seen: list[list[Any]] = []
        self._given: list[Any] = []
        """The groups' param_numbers, where something draws."""

    def check(self, owned: Owned) -> None:
        """Raises ValueError for a number of a group that the coming step cannot use."""
        if not self._are_those_checked(owned):
            owned.check_groups()
            self._note(owned)

    def _are_those_checked(self, owned: Owned) -> bool:
        """Whether the groups have the objects that were noted, and step counts in range."""
        seen = self._seen
        if len(seen) != len(owned.groups):
            return False
        names = _noted(owned)
        for group, values in zip(owned.groups, seen, strict=True):
            step = group.get("step")
            if type(step) is not int or not 0 <= step <= LAST_STEP:
                return False
            for name, value in zip(names, values, strict=True):
                if group.get(name) is not value:
                    return False
        return not owned.options.draws or given_numbers(owned.groups) == self._given

    def _note(self, owned: Owned) -> None:
        """Keeps the objects that were just checked; none where one could change its value."""
        names = _noted(owned)
        seen = [[group.get(name) for name in names] for group in owned.groups]
        is_fixed = all(_is_fixed(value) for values in seen for value in values)
        self._given = given_numbers(owned.groups) if owned.options.draws else []
        self._seen = seen if is_fixed and not owned.options.capturable else []


def _noted(owned: Owned) -> tuple[str, ...]:
    return (*owned.options.names_but_step, *owned.options.OF_ALL)


def _is_fixed(value: Any) -> bool:
    if type(value) is tuple:
        return all(type(each) in FIXED for each in value)
    return type(value) in FIXED
