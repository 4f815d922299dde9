"""The recorded inputs of a step: batches, random generators, calls of torch's functions."""

from __future__ import annotations

import functools
import hashlib
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from megaopt.kernels.place import Place
from megaopt.kernels.shards import local_of
from megaopt.recording.digest import of_places
from megaopt.recording.files import LANES

MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
"""The multipliers of the splitmix64 generator."""


RandomStates = dict[str, tuple[Any, ...]]
"""The words of each generator, and what belongs to them."""


def random_states(devices: set[torch.device]) -> RandomStates:
    """Returns the state of each generator: Python's, numpy's, torch's, and each device's."""
    version, words, gauss = random.getstate()
    numpy_state: Any = numpy.random.get_state(legacy=False)
    of_numpy: Any = (b"", repr(numpy_state))
    if numpy_state["bit_generator"] == "MT19937":  # which has more words than repr shows
        of_numpy = (
            numpy_state["state"]["key"].tobytes(),
            (numpy_state["state"]["pos"], numpy_state["gauss"]),
        )
    states: RandomStates = {
        "python": (words, (version, gauss)),
        "numpy": of_numpy,
        "torch": (torch.get_rng_state().numpy().tobytes(),),
    }
    for device in sorted(devices, key=str):
        if device.type == "cuda":
            states[str(device)] = (torch.cuda.get_rng_state(device).numpy().tobytes(),)
    return states


def random_digests(states: RandomStates) -> dict[str, str]:
    """Returns a digest of the state of each generator."""
    return {name: _hash(*state) for name, state in states.items()}


@functools.lru_cache(8)  # most stay as they are from step to step
def _hash(data: bytes | tuple[int, ...], more: object = None) -> str:
    words = data if isinstance(data, bytes) else numpy.array(data, "u4").tobytes()
    return hashlib.blake2b(words + repr(more).encode(), digest_size=16).hexdigest()


def leaves(value: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors in arguments or results whose elements can be read, in order."""
    if isinstance(value, torch.Tensor):
        local = local_of(value)
        unread = value.is_meta or value.is_quantized or value.is_nested
        if (
            local.layout == torch.strided
            and not unread
            and not is_traceable_wrapper_subclass(local)
        ):
            yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from leaves(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from leaves(inner)
    elif hasattr(value, "__dataclass_fields__"):
        yield from leaves(vars(value))


def batch_digest(value: Any) -> torch.Tensor:
    """Returns the digest of a batch, which adds over its samples in any order: int64 (2,).

    Tensors of as many rows as the first has are cut into samples; others belong to all of them.
    """
    shards = (local_of(leaf.detach()) for leaf in leaves(value))
    tensors = [tensor for tensor in shards if tensor.numel()]
    if not tensors:
        return torch.zeros(2, dtype=torch.int64)
    rows = tensors[0].shape[0] if tensors[0].dim() else 1
    total: Any = 0
    for number, tensor in enumerate(tensors):
        is_cut = tensor.dim() and tensor.shape[0] == rows
        parts = tensor.unbind() if is_cut else (tensor,)
        lanes = of_places(parts, [Place(0)] * len(parts))[:, :2].to(tensors[0].device)
        total = total + mixed(lanes + number)  # so that tensors may not be exchanged
    return mixed(total).expand(rows, 2).sum(0)


def mixed(lanes: torch.Tensor) -> torch.Tensor:
    """Returns the last part of the splitmix64 generator, of each number, int64."""
    for shift, multiplier in zip((30, 27), MIX, strict=True):
        lanes = (lanes ^ _shifted(lanes, shift)) * (multiplier - LANES)
    return lanes ^ _shifted(lanes, 31)


def _shifted(lanes: torch.Tensor, bits: int) -> torch.Tensor:
    """Shifts right with zeros: torch's own shift of an int64 repeats the sign."""
    return (lanes >> bits) & ((1 << (64 - bits)) - 1)


Listener = Callable[[tuple[Any, ...], dict[str, Any]], "Callable[[Any], None] | None"]
"""Called before a function, with its arguments; what it returns is called with the result."""


class Watched:
    """A function whose calls are listened to; put back when nobody listens.

    Args:
        places: where it stands, as "module:name" or "module:class.name"; of modules that are
            imported alone.
    """

    def __init__(self, *places: str) -> None:
        self._places = places
        self._listeners: list[Listener] = []
        self._put_back: dict[str, tuple[Any, str, Any]] = {}

    def listen(self, listener: Listener) -> Callable[[], None]:
        """Tells the listener of each call, until what this returns is called."""
        self._listeners.append(listener)
        self.look()
        return lambda: self._forget(listener)

    def _forget(self, listener: Listener) -> None:
        self._listeners.remove(listener)
        while self._put_back and not self._listeners:
            setattr(*self._put_back.popitem()[1])

    def look(self) -> None:
        """Listens in modules that have been imported since, too."""
        for place in self._places if self._listeners else ():
            module, _, path = place.partition(":")
            *classes, name = path.split(".")
            if module not in sys.modules or place in self._put_back:
                continue
            owner: Any = functools.reduce(getattr, classes, sys.modules[module])
            function = getattr(owner, name, None)  # other versions may have other names
            if function is not None:
                self._put_back[place] = owner, name, function
                setattr(owner, name, self._wrapped(function))

    def _wrapped(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            # listeners look at what can be gone through once
            args = tuple(list(value) if isinstance(value, Iterator) else value for value in args)
            callbacks = [listener(args, kwargs) for listener in tuple(self._listeners)]
            result = function(*args, **kwargs)
            for callback in callbacks:
                if callback is not None:
                    callback(result)
            return result

        return wrapped


BACKWARD = Watched("torch.autograd:backward")
"""Tensor.backward calls it too."""
PIPELINE = Watched("megatron.core.pipeline_parallel.schedules:custom_backward")
CLIP = Watched(
    "torch.nn.utils:clip_grad_norm_",
    "torch.nn.utils.clip_grad:clip_grad_norm_",
    "megatron.core.optimizer.optimizer:get_grad_norm_fp32",
)
SCALER = Watched("torch.amp.grad_scaler:GradScaler.step")
CAPTURE_BEGIN = Watched("torch.cuda.graphs:CUDAGraph.capture_begin")
CAPTURE_END = Watched("torch.cuda.graphs:CUDAGraph.capture_end")
REPLAY = Watched("torch.cuda.graphs:CUDAGraph.replay")
