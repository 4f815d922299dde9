"""Leaves out what torch puts around methods, its compiler and hooks, where they do nothing."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import _compile
from torch.optim import optimizer as torch_optimizer

from megaopt.kernels import native

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
        # somebody has imported the compiler meanwhile: from now on its decorator counts
        nonlocal disabled
        if disabled is plain and "torch._dynamo" in sys.modules:
            disabled = sys.modules["torch._dynamo"].disable(plain)
        return disabled(*args, **named)

    vars(called)["plain"] = function
    return called


def torchs(name: str) -> Callable[..., Any]:
    """A method of torch.optim.Optimizer as it is now, whoever put it there.

    torch's own comes without its decorator, which imports the compiler.
    """
    method: Any = getattr(torch.optim.Optimizer, name)
    code = getattr(method, "__code__", None)
    is_decorated = code is not None and code.co_filename == _compile.__file__
    return method.__wrapped__ if is_decorated else method  # type: ignore[no-any-return]


def unless_heard(step: Callable[..., Any], hooked: Callable[..., Any]) -> Callable[..., Any]:
    """A step() with torch's hooks and range for profiles, or without where nobody hears of them."""
    # as long as nobody has imported the compiler the function that `untraced` was given serves;
    # other decorators copy its attribute, and wrap something else
    plain: Any = getattr(step, "plain", step)
    plain = plain if getattr(step, "__wrapped__", None) is plain else step

    @functools.wraps(hooked)
    def called(optimizer: Any, *args: Any, **named: Any) -> Any:
        # they take a fifth of a step of few tensors; the extension alone knows who hears of ranges
        module = None if torch.compiler.is_compiling() else native.get(False)
        monitor = sys.modules.get("torch.profiler._cupti_monitor")
        is_heard = (
            (module is None or module.has_callbacks() or args or "closure" in named)
            or (optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)
            or (
                torch_optimizer._global_optimizer_pre_hooks
                or torch_optimizer._global_optimizer_post_hooks
            )
            or getattr(monitor, "_monitor_singleton", None) is not None
        )
        if is_heard:
            return hooked(optimizer, *args, **named)
        return (step if "torch._dynamo" in sys.modules else plain)(optimizer, **named)

    return called
