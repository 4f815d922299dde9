"""Builds and loads native.cpp where a C++ compiler is at hand."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from torch.utils import cpp_extension

# Building takes some 30 s, once on a machine; it saves 3 ms a step at 4,000 tensors and less than
# the launch itself below this many.
WORTH_BUILDING = 1000


@functools.cache
def build() -> tuple[Any, str | None]:
    """The extension module, or None and why it could not be built."""
    source = Path(__file__).with_name("native.cpp")
    try:
        module = cpp_extension.load(
            name="megaopt_native", sources=[str(source)], extra_cflags=["-O2"], with_cuda=False
        )
    except Exception as error:  # no compiler, no ninja, no writable cache: the Python twin serves
        return None, f"{type(error).__name__}: {error}"
    return module, None
