"""Codes in a state dict are read in the format in which they were saved, or refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from megaopt.checks import refuse
from megaopt.kernels.formats import BESIDE, MASTERS, MOMENTS, Format
from megaopt.options import FORMATS
from megaopt.owned import Owned
from megaopt.params import ParamView
from megaopt.state import state_name


def check_formats(
    mark: Any, state: Mapping[str, Any], owned: Owned, view: ParamView, where: str
) -> None:
    """Raises ValueError for a moment or master whose codes are other values in our format.

    mark: a group's FORMATS. None in older state dicts: dtypes and shapes are all there is then.
    state: of one parameter, as saved.
    """
    formats, saved = owned.formats(view), _names_of(mark, where)
    for slot, own in owned.options.format_names.items():
        name, theirs, held = state_name(slot), saved.get(slot, own), formats.by_slot.get(slot)
        if theirs == own or held is None or not held.present or state.get(name) is None:
            continue  # the rule has no such moment (SGD without momentum), or there is no master
        form = _format_of(theirs, slot, view)
        if form is None or not held.reads_as(form):
            refuse(f"{where}: the format of {name!r} in the state dict", repr(own), theirs)


def _names_of(mark: Any, where: str) -> dict[str, str]:
    """The formats' names by slot."""
    if mark is None:
        return {}
    parts = [each.split("=", 1) for each in mark.split(", ")] if isinstance(mark, str) else [[]]
    if not all(len(part) == 2 for part in parts):
        refuse(f"{where}: {FORMATS!r} of the state dict", "as in 'exp_avg=float32, ...'", mark)
    return {part[0]: part[1] for part in parts}


def _format_of(name: str, slot: str, view: ParamView) -> Format | None:
    """The format that this parameter had under an option of this name; None if there is none."""
    if slot != "master":
        form = MOMENTS.get(name)
        keeps = form is None or not form.block or view.keeps_blocks(form)
        return form if keeps else MOMENTS[torch.float32]
    beside = BESIDE.get(view.code_dtype or view.param.dtype, {})
    return beside.get(name) or MASTERS.get(name)
