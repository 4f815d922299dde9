"""What torch.compile leaves as it is, without torch's compiler where nobody compiles."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

Given = ParamSpec("Given")
Result = TypeVar("Result")


def untraced(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """A function that torch.compile calls as it is, and does not trace.

    torch's own decorators import its compiler at the first call: a second, also where nobody
    compiles.
    """
    plain = disabled = function

    @functools.wraps(function)
    def called(*args: Given.args, **named: Given.kwargs) -> Result:
        nonlocal disabled
        if disabled is plain and "torch._dynamo" in sys.modules:
            disabled = sys.modules["torch._dynamo"].disable(plain)
        return disabled(*args, **named)

    return called
