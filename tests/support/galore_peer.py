"""tools/galore_torch_peer.py for tests."""

import importlib.util
from pathlib import Path

import pytest

PATH = Path(__file__).resolve().parents[2] / "tools" / "galore_torch_peer.py"
_spec = importlib.util.spec_from_file_location("galore_torch_peer", PATH)
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)
adamw = _module.adamw
needs_galore_torch = pytest.mark.skipif(
    _module.why_not() is not None, reason=_module.why_not() or ""
)
