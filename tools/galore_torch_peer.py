"""galore_torch's AdamW, without what its package imports and AdamW does not need."""

from __future__ import annotations

import importlib
import sys
import types
from importlib.util import find_spec
from typing import Any


def why_not() -> str | None:
    """None where it is there, else what is missing."""
    names = ("galore_torch", "transformers")
    missing = [name for name in names if name not in sys.modules and find_spec(name) is None]
    return f"needs {', '.join(missing)}" if missing else None


def adamw() -> Any:
    """The module galore_torch.adamw; the package's own __init__ wants bitsandbytes."""
    if "galore_torch" not in sys.modules:
        package, spec = types.ModuleType("galore_torch"), find_spec("galore_torch")
        assert spec is not None
        package.__path__, package.__spec__ = list(spec.submodule_search_locations or ()), spec
        sys.modules["galore_torch"] = package
    return importlib.import_module("galore_torch.adamw")
