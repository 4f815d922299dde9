"""What torch.compile leaves as it is, without torch's compiler where nobody compiles."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import _compile

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


def torchs(name: str) -> Callable[..., Any]:
    """A method of torch.optim.Optimizer as it is now, whoever put it there.

    torch's own comes without its decorator, which imports the compiler.
    """
    method: Any = getattr(torch.optim.Optimizer, name)
    code = getattr(method, "__code__", None)
    is_decorated = code is not None and code.co_filename == _compile.__file__
    return method.__wrapped__ if is_decorated else method  # type: ignore[no-any-return]
