"""Codes in a state dict are read in the format in which they were saved, or refused."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megaopt.kernels.formats import BESIDE as BESIDE_WEIGHTS
from megaopt.kernels.formats import MASTERS, MOMENTS, NONE, Format
from megaopt.kernels.refusals import refuse
from megaopt.options.options import BESIDE, BLOCKS, FORMATS, VARIANTS
from megaopt.params import ParamView
from megaopt.params.codes import decoded_blocks
from megaopt.params.view import FEWEST_IN_ROWS, SCALE, STEP
from megaopt.state.owned import Owned
from megaopt.state.tensors import MASTER, state_name

MASTERS_KEPT = "masters"
"""Name in state dicts' FORMATS: whether 16-bit and fp8 weights have masters. Not in older ones."""

COUNTS, MAXIMIZE = "step_counts", "maximize"
"""Names in the same: whether states have step counts; the sign of updates. Not in older ones."""

FROZEN = "frozen"
"""Name in the same, for torch.distributed.checkpoint: the places in the group of frozen parameters
whose states are to be kept. Not in older ones, nor where there are none."""

Marks = Mapping[str, str]
"""The marks of a group in a state dict: what it says under FORMATS, by name."""

ROOM, LENGTHS = 64, 4093
"""Room for the name of a contract as bytes; and how many lengths there are."""


def check_formats(
    group: Mapping[str, Any],
    marks: Marks,
    state: Mapping[str, Any],
    owned: Owned,
    view: ParamView,
    where: str,
) -> None:
    """Raises ValueError for a moment or master whose codes are other values in our format.

    Dtypes and shapes are all there is in state dicts without marks.

    group: as saved; marks: its. state: of one parameter, as saved.
    """
    # a compensation that was saved beside a weight of another dtype
    dtypes, dtype = group.get(BESIDE), str(view.param.dtype).removeprefix("torch.")
    has_beside = BESIDE in owned.options.group_keys and dtypes not in (None, "")
    fits = isinstance(dtypes, str) and dtype in dtypes.split(", ")
    if has_beside and state.get(MASTER) is not None and not fits:
        refuse(f"{where}: {BESIDE!r} of the state dict", f"{dtype!r}, its dtype", dtypes)
    formats = owned.formats(view)
    for slot, format_name in owned.options.format_names.items():
        # saved_name: what the group says of this slot; without a mark it is taken for ours
        name, saved_name = state_name(slot), marks.get(slot, format_name)
        held = formats.by_slot.get(slot)
        if saved_name == format_name or held is None or not held.present or state.get(name) is None:
            continue  # the rule has no such moment (SGD without momentum), or there is no master
        # another name may still read the same values (another rounding of one dtype)
        joined_forms = BESIDE_WEIGHTS.get(view.code_dtype or view.param.dtype, {})
        form = joined_forms.get(saved_name) or MASTERS.get(saved_name)
        if slot != "master":
            form = MOMENTS.get(saved_name)
            # small moments are not in blocks, whatever the option says
            if form is not None and form.block and not view.keeps_blocks(form):
                form = MOMENTS[torch.float32]
        if form is None or not held.reads_as(form):
            refuse(
                f"{where}: the format of {name!r} in the state dict", repr(format_name), saved_name
            )


def marks_of(owned: Owned, params: Sequence[torch.Tensor], frozen: str) -> dict[str, str]:
    """Returns what a group of a state dict says of formats, and what else a load compares.

    params: the group's. frozen: what stands behind of its frozen ones.
    """
    options = owned.options
    marks = {
        MASTERS_KEPT: owned.wants_masters,
        MAXIMIZE: options.maximize,
        COUNTS: "parameter" if options.counts_apart else "group",
    }
    formats_mark = options.group_keys[FORMATS]
    texts = [formats_mark, *(f"{name}={value}" for name, value in marks.items())]
    mark = {FORMATS: ", ".join(texts) + frozen}
    if BESIDE in options.group_keys:
        # the dtypes of weights that have compensations
        short = {param.dtype for param in params if param.dtype in (torch.bfloat16, torch.float16)}
        mark[BESIDE] = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in short))
    return mark


def sized_contract(owned: Owned, device: torch.device) -> torch.Tensor:
    """The contract's name as uint8 of shape (length,), the length that of the state's meaning.

    Before it writes anything, torch.distributed.checkpoint.load compares the sizes of tensors, but
    neither their dtypes nor text: so it refuses other formats while the state is as it was. Lengths
    of different formats are seldom the same (1 of 4,093), and other planners may pass over them:
    the load itself compares texts then.
    """
    options = owned.options

    def first_like(form: Format, table: Mapping[Any, Format]) -> str:
        """The first format that reads the same values, whichever way it rounds."""
        alike = (candidate.name for candidate in table.values() if candidate.reads_as(form))
        return next(alike, form.name)

    # what a state's numbers mean, as a load takes no state of another meaning: by moment the name
    # of the first format that reads the same values
    moments = {name: options.moment_format(name) for name in owned.all_moments}
    meanings = {name: first_like(form, MOMENTS) for name, form in moments.items()}
    # masters count only where some weight may have one
    keys = {(view.param.dtype, view.code_dtype) for view in owned.views}
    if any(options.master_format(dtype, True, code).present for dtype, code in keys):
        form = MASTERS[options.format_names["master"]]
        meanings["master"] = first_like(form, MASTERS) if owned.wants_masters else NONE.name
    marks = {name: getattr(options, name) for name in options.MARKS}
    meaning = [meanings, marks, [getattr(options, name, False) for name in VARIANTS]]
    # lengths of the default are those of older checkpoints
    if options.counts_apart != (options.contract == "torch"):
        meaning.append("parameter" if options.counts_apart else "group")
    length = ROOM + zlib.crc32(repr(meaning).encode()) % LENGTHS
    text = options.contract.encode().ljust(length, b"\0")
    return torch.tensor([*text], dtype=torch.uint8).to(device)


def text_of(value: Any) -> Any:
    """The text of bytes in a tensor; anything else as it is."""
    if not isinstance(value, torch.Tensor) or value.dtype != torch.uint8:
        return value
    return bytes(value.flatten().tolist()).rstrip(b"\0").decode(errors="replace")


def check_same(marks: Marks, name: str, value: bool, where: str) -> None:
    """Raises ValueError where a mark says something else than this optimizer has."""
    if marks.get(name) not in (None, str(value)):
        refuse(f"{where}: {name} of the state dict", f"this optimizer's, {value}", marks[name])


def check_count(marks: Marks, state: Mapping[str, Any], any_has: bool, where: str) -> None:
    """Raises ValueError for a state whose step count was lost, or comes from somewhere else.

    torch.distributed.checkpoint reads what the optimizer has, and leaves out the rest unsaid.

    state: of one parameter, as saved. any_has: some state has a count.
    """
    counts, has = marks.get(COUNTS), STEP in state
    # lost by torch.distributed.checkpoint, which reads what is there alone
    if not has and (counts == "parameter" or any_has):
        who = "other states have" if any_has else f"{COUNTS}='parameter' keeps with each"
        raise ValueError(f"{where}: the state dict has no {STEP!r}, which {who}")
    if has and counts == "group":
        raise ValueError(
            f"{where}: {STEP!r} in the state dict; allowed where it was saved under "
            f"{COUNTS}='parameter', got {COUNTS}='group'"
        )


def in_our_blocks(
    marks: Marks, state: Mapping[str, Any], owned: Owned, view: ParamView, where: str
) -> dict[str, Any]:
    """The state as the rule of today has it, by which moments are kept in blocks or fp32.

    Older versions decided otherwise for plain tensors and for DTensors, and mark nothing. Values
    stay as they are. Raises ValueError where torch.distributed.checkpoint may have cast codes.

    state: of one parameter, as saved: this rank's tensors.
    """
    formats, converted, whole = owned.formats(view), dict(state), view.whole_state_shape("")
    # versions with this mark decide as now
    if BLOCKS in marks:
        return converted
    for name, held in zip(formats.moment_names, formats.moments, strict=True):
        form = MOMENTS.get(marks.get(name, "")) or owned.options.moment_format(name)
        # in blocks there, as versions kept moments of plain tensors, and fp32 here
        was_large = math.prod(whole) >= FEWEST_IN_ROWS and form.packed == 1 and len(whole) > 1
        code, scale = converted.get(name), converted.get(name + SCALE)
        if not form.block or held.block or not was_large or code is None:
            continue
        # codes without scales: only whole state dicts brought these along
        if not isinstance(code, torch.Tensor) or not isinstance(scale, torch.Tensor):
            raise ValueError(
                f"{where}: {name!r} of the state dict must be {form.name!r} with scales, as an "
                "older version kept it in plain tensors, got none: load what "
                "optimizer.state_dict() gave there, not through torch.distributed.checkpoint"
            )
        # codes of the blocks' dtype, one uint8 scale for each block, counted over the flat tensor
        shape = view.state_shape(name)
        layout = (code.dtype, tuple(code.shape), scale.dtype, scale.numel())
        count = -(-math.prod(shape) // form.block)
        if layout == (form.dtype, form.stored_shape(shape), torch.uint8, count):
            del converted[name + SCALE]
            converted[name] = decoded_blocks(form, code, scale, shape, 0)
    return converted


def said_by(group: Mapping[str, Any], where: str) -> dict[str, str]:
    """Returns what a group says under FORMATS, by name; nothing in older ones."""
    mark = group.get(FORMATS)
    if mark is None:
        return {}
    parts = [part.split("=", 1) for part in mark.split(", ")] if isinstance(mark, str) else [[]]
    if not all(len(part) == 2 for part in parts):
        refuse(f"{where}: {FORMATS!r} of the state dict", "as in 'exp_avg=float32, ...'", mark)
    return {part[0]: part[1] for part in parts}
