"""How a kernel is run, on a GPU or interpreted."""

from __future__ import annotations

from typing import Any

import numpy
import torch

from megaopt.kernels.optional_triton import INTERPRETED, CompiledKernel

# By everything that Triton specialised a kernel for: what it compiled, and the constants that go
# behind the arguments. Its own way to find it takes 0.16 ms of each launch on an H200's host.
_compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}


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
    first = next(argument for argument in arguments if isinstance(argument, torch.Tensor))
    device = first.device
    if INTERPRETED:
        # numpy, which the interpreter computes with, warns of what IEEE 754 defines
        with numpy.errstate(all="ignore"):
            function[(programs,)](*arguments, **options, enable_fp_fusion=False)
    elif device.type != "cuda" or device.index == torch.cuda.current_device():
        _launch(function, programs, arguments, options, device.index)
    else:
        with torch.cuda.device(device):
            _launch(function, programs, arguments, options, device.index)


def _launch(
    function: Any,
    programs: int,
    arguments: tuple[object, ...],
    options: dict[str, object],
    device: int | None,
) -> None:
    # on AMD's GPUs Triton also looks at how much memory lies behind a pointer
    if function.pre_run_hooks or torch.version.hip is not None:
        function[(programs,)](*arguments, **options, enable_fp_fusion=False)
        return
    key = (id(function), device, *options, *options.values(), *_kinds(arguments))
    known = _compiled.get(key)
    if known is not None:
        kernel, constants = known
        kernel[programs, 1, 1](*arguments, *constants)
        return
    kernel = function[(programs,)](*arguments, **options, enable_fp_fusion=False)
    if isinstance(kernel, CompiledKernel) and _is_free_of_values(function, arguments):
        _compiled[key] = kernel, _constants(function, len(arguments), options)


def _kinds(arguments: tuple[object, ...]) -> list[object]:
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


def _is_free_of_values(function: Any, arguments: tuple[object, ...]) -> bool:
    """Whether Triton looks at no number's value."""
    pairs = zip(function.params, arguments, strict=False)
    return all(
        param.do_not_specialize or argument is None or isinstance(argument, torch.Tensor)
        for param, argument in pairs
    )


def _constants(function: Any, given: int, options: dict[str, object]) -> tuple[Any, ...]:
    """The parameters behind the arguments, in their order."""
    rest = list(function.signature.parameters.values())[given:]
    return tuple(options.get(param.name, param.default) for param in rest)
