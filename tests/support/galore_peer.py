"""galore_torch's AdamW, without what its package imports and AdamW does not need."""

import importlib
import sys
import types
from importlib.util import find_spec

import pytest

_missing = [
    name
    for name in ("galore_torch", "transformers")
    if name not in sys.modules and find_spec(name) is None
]
needs_galore_torch = pytest.mark.skipif(bool(_missing), reason=f"needs {', '.join(_missing)}")


def adamw():
    """The module galore_torch.adamw; the package's own __init__ wants bitsandbytes."""
    if "galore_torch" not in sys.modules:
        package, spec = types.ModuleType("galore_torch"), find_spec("galore_torch")
        package.__path__, package.__spec__ = list(spec.submodule_search_locations), spec
        sys.modules["galore_torch"] = package
    return importlib.import_module("galore_torch.adamw")
