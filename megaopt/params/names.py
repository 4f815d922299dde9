"""Names of parameters without what wrappers of a model put there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

ANYWHERE = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Parts that torch.compile, FSDP1 and activation checkpointing put before a module's own names."""
IN_FRONT = "module"
"""The part that DDP and DataParallel put before all names; elsewhere a module may be called so."""


def plain_names(names: Iterable[str]) -> dict[str, str]:
    """Each name without the parts of wrappers; as it is where two would become one.

    Args:
        names: of all parameters of a model, or of an optimizer.
    """
    found = {name: _plain(name) for name in names}
    counts = Counter(found.values())
    return {name: own if counts[own] == 1 else name for name, own in found.items()}


def _plain(name: str) -> str:
    *modules, last = name.split(".")
    kept = [part for part in modules if part not in ANYWHERE]
    while kept and kept[0] == IN_FRONT:
        kept = kept[1:]
    return ".".join((*kept, last))
