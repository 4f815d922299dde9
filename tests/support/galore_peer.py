"""galore_torch's AdamW, without what its package imports and AdamW does not need."""

import importlib.util
import sys
import types

import pytest

MISSING = [
    name for name in ("galore_torch", "transformers") if importlib.util.find_spec(name) is None
]
needs_galore_torch = pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}")


def adamw():
    """The module galore_torch.adamw; the package's own __init__ wants bitsandbytes."""
    if "galore_torch" not in sys.modules:
        package = types.ModuleType("galore_torch")
        spec = importlib.util.find_spec("galore_torch")
        package.__path__ = list(spec.submodule_search_locations)
        sys.modules["galore_torch"] = package
    return importlib.import_module("galore_torch.adamw")
