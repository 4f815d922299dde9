"""Codes in a state dict are read in the format in which they were saved, or refused."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from megaopt.checks import refuse
from megaopt.kernels.formats import BESIDE, MASTERS, MOMENTS, Format
from megaopt.options import BLOCKS, FORMATS
from megaopt.owned import Owned
from megaopt.params import ParamView
from megaopt.params.view import FEWEST_IN_ROWS, SCALE
from megaopt.pieces import decoded_blocks
from megaopt.state import state_name

MASTERS_KEPT = "masters"
"""In a state dict's FORMATS: whether 16-bit and fp8 weights have masters. Not in older ones."""


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


def mark_of(owned: Owned) -> str:
    """What a state dict's groups say under FORMATS: formats, and whether weights have masters."""
    return f"{owned.options.formats_mark}, {MASTERS_KEPT}={owned.wants_masters}"


def check_masters(mark: Any, owned: Owned, view: ParamView, where: str) -> None:
    """Raises ValueError where only one side has masters beside such a weight.

    torch.distributed.checkpoint reads what the optimizer has, and leaves out the rest unsaid.
    """
    saved, own = _names_of(mark, where).get(MASTERS_KEPT), str(owned.wants_masters)
    is_float8 = view.code_dtype
    if saved in (None, own):
        return
    if owned.options.master_format(view.param.dtype, True, is_float8).present:
        refuse(f"{where}: {MASTERS_KEPT} of the state dict", f"this optimizer's, {own}", saved)


def in_our_blocks(
    mark: Any, state: Mapping[str, Any], owned: Owned, view: ParamView, where: str
) -> dict[str, Any]:
    """The state as the rule of today has it, by which moments are kept in blocks or fp32.

    Older versions decided otherwise for plain tensors and for DTensors, and mark nothing. Values
    stay as they are. Raises ValueError where torch.distributed.checkpoint may have cast codes.

    mark: a group's FORMATS. state: of one parameter, as saved: this rank's tensors.
    """
    formats, found, saved = owned.formats(view), dict(state), _names_of(mark, where)
    if BLOCKS in saved:
        return found
    for name, held in zip(formats.moment_names, formats.moments, strict=True):
        asked = MOMENTS.get(saved.get(name)) or owned.options.moment_format(name)
        code, scale = state.get(name), name + SCALE
        if not asked.block or held.block or not _had_blocks(asked, view):
            continue
        shape = view.state_shape(name)
        if not isinstance(code, torch.Tensor) or not isinstance(state.get(scale), torch.Tensor):
            if code is not None:
                raise ValueError(
                    f"{where}: {name!r} of the state dict must be {asked.name!r} with scales, as "
                    "an older version kept it in plain tensors, got none: load what "
                    "optimizer.state_dict() gave there, not through "
                    "torch.distributed.checkpoint"
                )
            continue
        codes = (code.dtype, tuple(code.shape), state[scale].dtype, state[scale].numel())
        count = -(-math.prod(shape) // asked.block)
        if codes == (asked.dtype, asked.stored_shape(shape), torch.uint8, count):
            found[name] = decoded_blocks(asked, code, found.pop(scale), shape, 0)
    return found


def _had_blocks(form: Format, view: ParamView) -> bool:
    """Whether an older version kept a plain tensor's moments in blocks, where none are now."""
    shape = view.whole_state_shape("")
    return math.prod(shape) >= FEWEST_IN_ROWS and form.packed == 1 and len(shape) > 1


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
