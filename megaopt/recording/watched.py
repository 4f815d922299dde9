"""What recorders hear of a training loop without a change of it: calls of torch's functions."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

Listener = Callable[[tuple[Any, ...], dict[str, Any], Any], None]
"""Gets positional arguments, named arguments and the result."""


class Watched:
    """A function whose calls are listened to after they are made; put back when nobody listens.

    Args:
        places: where it stands, as "module:name" or "module:class.name".
    """

    def __init__(self, *places: str) -> None:
        self._places = places
        self._listeners: list[Listener] = []
        self._put_back: list[tuple[Any, str, Any]] = []

    def listen(self, listener: Listener) -> Callable[[], None]:
        """Calls the listener after each call, until what this returns is called."""
        if not self._listeners:
            self._wrap()
        self._listeners.append(listener)
        return lambda: self._forget(listener)

    def _forget(self, listener: Listener) -> None:
        if listener in self._listeners:
            self._listeners.remove(listener)
        if not self._listeners:
            for owner, name, own in self._put_back:
                setattr(owner, name, own)
            self._put_back.clear()

    def _wrap(self) -> None:
        for place in self._places:
            module, _, path = place.partition(":")
            owner: Any = importlib.import_module(module)
            *classes, name = path.split(".")
            for each in classes:
                owner = getattr(owner, each)
            self._put_back.append((owner, name, getattr(owner, name)))
            setattr(owner, name, self._wrapped(getattr(owner, name)))

    def _wrapped(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            for listener in tuple(self._listeners):
                listener(args, kwargs, result)
            return result

        return wrapped


BACKWARD = Watched("torch.autograd:backward")
"""Tensor.backward calls it too."""
CLIP = Watched("torch.nn.utils:clip_grad_norm_", "torch.nn.utils.clip_grad:clip_grad_norm_")
SCALER = Watched("torch.amp.grad_scaler:GradScaler.step")
