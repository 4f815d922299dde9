"""Triton where it is installed; elsewhere a stand-in under which the kernels' modules import.

Triton decides at decoration time whether a kernel is compiled or interpreted: TRITON_INTERPRET=1
counts only when it is set before this module is imported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

try:
    import triton
    import triton.language as tl
    from triton.compiler import CompiledKernel
    from triton.language.extra.cuda import libdevice
    from triton.language.target_info import cuda_capability_geq
except ImportError as error:
    MISSING: str | None = f"Triton cannot be imported ({error})"
    INTERPRETED = False

    class _Names:
        """Answers the names that module bodies and signatures use; nothing here is ever run."""

        @staticmethod
        def constexpr(value: Any) -> Any:
            return value

        def __getattr__(self, name: str) -> str:
            return name

    class CompiledKernel:  # type: ignore[no-redef]
        """A class without instances."""

    AsyncCompileMode: Any = None

    tl: Any = _Names()  # type: ignore[no-redef]
    libdevice: Any = _Names()  # type: ignore[no-redef]

    def cuda_capability_geq(major: int, minor: int = 0) -> bool:
        """There is no GPU to speak of."""
        return False

    def cache_folder() -> str:
        """No one compiles."""
        return ""

    def set_allocator(allocator: Callable[..., Any]) -> None:
        """No one launches what would need memory."""

    def jit(function: Callable[..., Any] | None = None, **_: Any) -> Any:
        """Leaves the function as it is: no one launches it without Triton."""
        return function if function is not None else lambda inner: inner

    def helper(function: Callable[..., Any]) -> Any:
        """Leaves the function as it is, as jit does."""
        return function
else:
    MISSING = None
    INTERPRETED = bool(triton.knobs.runtime.interpret)
    jit = triton.jit

    def cache_folder() -> str:
        """The folder in which Triton keeps what it has compiled."""
        return str(triton.knobs.cache.dir)

    AsyncCompileMode = triton.AsyncCompileMode
    set_allocator = triton.set_allocator

    def helper(function: Callable[..., Any]) -> Any:
        """Decorates a function that only kernels call.

        The interpreter patches all of triton.language anew at every call of a jit function, 0.4 ms
        each. What a kernel calls runs under the kernel's own patch: interpreted, it stays plain.
        """
        return function if INTERPRETED else triton.jit(function)


if INTERPRETED:

    def cuda_capability_geq(major: int, minor: int = 0) -> bool:
        """The interpreter runs no instructions of a GPU, even on a machine that has one."""
        return False

    def loop_bound(value: Any) -> int:
        """A number that a kernel loaded, for `range`, which under the interpreter wants an int."""
        return int(value.handle.data.item())

else:

    @helper
    def loop_bound(value):  # type: ignore[no-untyped-def]
        return value


__all__ = [
    "INTERPRETED",
    "MISSING",
    "CompiledKernel",
    "cache_folder",
    "cuda_capability_geq",
    "helper",
    "jit",
    "libdevice",
    "loop_bound",
    "set_allocator",
    "tl",
]
