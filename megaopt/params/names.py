"""Names of parameters without what wrappers of a model put there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

ANYWHERE = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Parts that torch.compile, FSDP1 and activation checkpointing put before a module's own names."""
IN_FRONT = "module"
"""The part that DDP and DataParallel put before all names; elsewhere a module may be called so."""


def plain_names(names: Iterable[str]) -> dict[str, str]:
    """Returns each name without the parts of wrappers; as it is where two would become one.

    Args:
        names: of all parameters of a model, or of an optimizer.
    """
    plain_by_name = {}
    for name in names:
        *modules, last = name.split(".")
        parts = [part for part in modules if part not in ANYWHERE]
        while parts and parts[0] == IN_FRONT:
            parts = parts[1:]
        plain_by_name[name] = ".".join((*parts, last))
    # a name that would become another's stays as it is
    counts = Counter(plain_by_name.values())
    return {name: plain if counts[plain] == 1 else name for name, plain in plain_by_name.items()}
