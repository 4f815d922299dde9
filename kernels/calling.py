"""Launches of kernels, on a GPU or interpreted."""

from __future__ import annotations

import functools
import gc
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy
import torch

from megaopt.kernels.optional_triton import (
    INTERPRETED,
    AsyncCompileMode,
    CompiledKernel,
    cache_folder,
)

PATIENCE = 2.0
"""Seconds of compiling a kernel after which a line tells of it, once for each card."""

# By everything that Triton specialised a kernel for: what it compiled, and the constants that go
# behind the arguments; None where Triton has to look at values. Its own way to find it takes
# 0.16 ms of each launch on an H200's host.
_compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]] | None] = {}

MOST_CAPTURES = 8
"""Graphs that a `Replayed` makes: one takes as long as some ten steps, and keeps its tables."""


def call(
    function: Any, programs: int, arguments: tuple[object, ...], options: dict[str, object]
) -> None:
    """Runs a kernel on the device of its first argument that is a tensor.

    That is a CUDA device, or the CPU under Triton's interpreter. Products and sums are not
    contracted: contracts round every operation.

    A kernel that was launched before is launched again without Triton's look at it, on the current
    stream, under Triton's launch hooks. What the environment and triton.knobs asked for when it was
    compiled holds: TRITON_DEBUG, say.
    """
    first = next(value for value in arguments if isinstance(value, torch.Tensor))
    device = first.device
    if INTERPRETED:
        # numpy, which the interpreter computes with, warns of what IEEE 754 defines
        with numpy.errstate(all="ignore"):
            function[(programs,)](*arguments, **options, enable_fp_fusion=False)
    # Triton launches on the current device: another one is made current for the launch
    elif device.type != "cuda" or device.index == torch.cuda.current_device():
        _launch(function, programs, arguments, options, device.index)
    else:
        with torch.cuda.device(device):
            _launch(function, programs, arguments, options, device.index)


class Again:
    """A launch that is made again and again, with arguments of the same kinds on one device.

    As `call`, without a look at the arguments.
    """

    def __init__(self, function: Any, programs: int, options: dict[str, object]) -> None:
        self._configuration = (function, programs, options)
        self._entry: tuple[Any, tuple[Any, ...]] | None = None
        self._device: int | None = None

    def __call__(self, arguments: tuple[object, ...]) -> None:
        """Launches the kernel; arguments: as those of the first call."""
        function, programs, options = self._configuration
        # first call, or one under hooks or on another current device: the whole way
        if self._entry is None or function.pre_run_hooks or self._is_elsewhere():
            call(function, programs, arguments, options)
            if not INTERPRETED:
                first = next(value for value in arguments if isinstance(value, torch.Tensor))
                self._device = first.device.index
                key = _key(function, self._device, options, arguments)
                self._entry = _compiled.get(key)
        else:
            kernel, constants = self._entry
            kernel[programs, 1, 1](*arguments, *constants)

    def compile(self, arguments: tuple[object, ...]) -> None:
        """Compiles the kernel for such arguments, within `compiling_together`."""
        function, programs, options = self._configuration
        if not INTERPRETED:
            function.warmup(*arguments, grid=(programs,), **options, enable_fp_fusion=False)

    def _is_elsewhere(self) -> bool:
        return self._device is not None and self._device != torch.cuda.current_device()


class Replayed:
    """Many launches that are the same in each step: from the third on one launch of a CUDA graph.

    On an H200's host a launch takes 33 us, those of 28 of Llama-3-8B's matrices 10 ms.

    A step that a graph of the user's captures, launches them one by one, and so does another GPU
    than NVIDIA's. Triton's launch hooks do not hear of replays.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._left = device, 0
        if device.type == "cuda" and torch.version.hip is None:
            self._left = MOST_CAPTURES
            stream: Any = torch.cuda.Stream  # which has no types
            self._stream = stream(device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._key: object = None

    def __call__(self, key: object, launches: Callable[[], None]) -> None:
        """Makes the launches.

        key: all that they depend on, which `==` compares: addresses, and the current stream. Among
        them are those of all memory that they take from outside and do not keep.
        """
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            self._key = None  # the graph stays until later: dropped here it would end the capture
            launches()
        # something has changed: launched one by one, and remembered
        elif key != self._key:
            self._graph, self._key = None, key
            launches()
        # no graphs here, or as many as are allowed
        elif self._graph is None and not self._left:
            launches()
        else:
            # the same as the time before: captured now, and replayed from now on
            if self._graph is None:
                self._left -= 1
                self._graph = self._captured(launches)
            self._graph.replay()

    def _captured(self, launches: Callable[[], None]) -> torch.cuda.CUDAGraph:
        graph, collects = torch.cuda.CUDAGraph(), gc.isenabled()
        gc.disable()  # what is collected within a capture, as another graph, may end the process
        try:
            # the stream of its own is for the capture alone; the replay goes to the current one
            with torch.cuda.stream(self._stream):
                # torch.cuda.graph would wait for the device and give its unused memory back
                graph.capture_begin(capture_error_mode="relaxed")
                try:
                    launches()
                finally:
                    graph.capture_end()
        finally:
            if collects:
                gc.enable()
        return graph


def _key(
    function: Any, device: int | None, options: dict[str, object], arguments: tuple[object, ...]
) -> tuple[Any, ...]:
    return (id(function), device, *options, *options.values(), *kinds_of(arguments))


def _launch(
    function: Any,
    programs: int,
    arguments: tuple[object, ...],
    options: dict[str, object],
    device: int | None,
) -> None:
    key = _key(function, device, options, arguments)
    entry = _compiled.get(key)
    # on AMD's GPUs Triton also looks at how much memory lies behind a pointer
    if function.pre_run_hooks or torch.version.hip is not None or (not entry and key in _compiled):
        function[(programs,)](*arguments, **options, enable_fp_fusion=False)
        return
    # compiled before for arguments of these kinds: straight to the launcher
    if entry is not None:
        kernel, constants = entry
        kernel[programs, 1, 1](*arguments, *constants)
        return
    # first time: Triton compiles, and what it compiled is kept if no value went into it
    with _telling(device):
        kernel = function[(programs,)](*arguments, **options, enable_fp_fusion=False)
    is_known = isinstance(kernel, CompiledKernel) and all(
        param.do_not_specialize or argument is None or isinstance(argument, torch.Tensor)
        for param, argument in zip(function.params, arguments, strict=False)
    )
    # with the parameters behind the arguments, in their order
    rest = list(function.signature.parameters.values())[len(arguments) :]
    constants = tuple(options.get(param.name, param.default) for param in rest)
    _compiled[key] = (kernel, constants) if is_known else None


@contextmanager
def compiling_together(device: torch.device) -> Iterator[None]:
    """Compiles all kernels that `Again.compile` asks for within it at once, in threads.

    One that cannot be compiled raises its error when it is launched.
    """
    if INTERPRETED:
        yield
        return
    with (
        _telling(device.index),
        ThreadPoolExecutor() as threads,
        AsyncCompileMode(threads, ignore_errors=True),
    ):
        yield


@contextmanager
def _telling(device: int | None) -> Iterator[None]:
    """Says what a first step waits for, where it waits long."""
    timer = threading.Timer(PATIENCE, _tell, (device,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@functools.cache
def _tell(device: int | None) -> None:
    """Says what a first step waits for."""
    card = "the CPU" if device is None else torch.cuda.get_device_name(device)
    words = "compiling kernels for %s, cached in %s for later processes"
    logging.getLogger("megaopt").warning(words, card, cache_folder())


def kinds_of(arguments: tuple[object, ...]) -> list[object]:
    """The kinds of arguments for which Triton specialises a kernel, the values of numbers apart."""
    kinds: list[object] = []
    for argument in arguments:
        if argument is None:
            kinds.append(None)
        elif isinstance(argument, torch.Tensor):
            kinds += argument.dtype, argument.data_ptr() % 16 == 0
        elif type(argument) is not int:
            kinds.append(type(argument))
        elif -(2**31) <= argument < 2**31:
            kinds.append("narrow")
        else:
            kinds.append("wide" if argument < 2**63 else "huge")
    return kinds
