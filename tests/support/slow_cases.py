"""Cases of a test of which some are quick."""

import pytest


def slow_but(cases, quick):
    """Cases by their names, as parameters; all but the quick ones are slow."""
    marks = {name: [] if name in quick else [pytest.mark.slow] for name in cases}
    return [pytest.param(*case, id=name, marks=marks[name]) for name, case in cases.items()]


def names_but(names, quick):
    """The same of names, which are the parameters."""
    return slow_but({name: (name,) for name in names}, quick)
