"""Builds and loads native.cpp where a C++ compiler is at hand."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import Any

import torch
from torch.utils import cpp_extension

# Building takes some 30 s, once on a machine; it saves 6 ms a step at 4,000 tensors and less than
# the launch itself below this many.
WORTH_BUILDING = 1000


@functools.cache
def build() -> tuple[Any, str | None]:
    """The extension module, or None and why it could not be built."""
    source = Path(__file__).with_name("native.cpp")
    # torch keeps what is built by its name alone: another source or another torch is another name
    digest = hashlib.sha256(source.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    try:
        module = cpp_extension.load(
            name=f"megaopt_native_{digest}",
            sources=[str(source)],
            extra_cflags=["-O2"],
            with_cuda=False,
        )
    except Exception as error:  # no compiler, no ninja, no writable cache: the Python twin serves
        return None, f"{type(error).__name__}: {error}"
    return module, None
