"""bitsandbytes 0.50's Adam, AdamW, Lion and SGD under their names, over this package's.

Changing the import keeps a script; the bits are this package's, and not bitsandbytes': 8-bit
moments are rounded stochastically, and one launch steps all parameters, where bitsandbytes waits
for the GPU after each. bitsandbytes itself is not needed. GlobalOptimManager has no counterpart:
parameters for which it asks for 32 bits go to an optimizer of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from inspect import Parameter
from typing import Any

import torch

import megaopt
from megaopt.integration.drop_in import ADAM, ADAMW, IN_BLOCKS, DropIn, Meanings
from megaopt.kernels.refusals import refuse
from megaopt.params import view_of
from megaopt.saving.parse import with_states

MOMENTUM = {"lr": Parameter.empty, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0}
MOMENTUM |= {"nesterov": False}
LION = {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0}
BITS = {"optim_bits": 32}
CLIPPED: dict[str, Any] = {"*": None, "percentile_clipping": 100, "block_wise": True, "seed": 0}
UNPAGED: dict[str, Any] = {"args": None, "min_8bit_size": 4096, **CLIPPED}
LAST: dict[str, Any] = {"args": None, "min_8bit_size": 4096, "is_paged": False, **CLIPPED}
ONLY_32: Meanings = {"optim_bits": {32: {}}}
MEANS: Meanings = {
    "amsgrad": {False: {}},
    "args": {None: {}},
    "is_paged": {False: {}, True: {"state_device": "cpu"}},
    "percentile_clipping": {100: {}},
    "block_wise": {True: {}},
    "optim_bits": {32: {}, 8: IN_BLOCKS},
}
MOMENTS = {"exp_avg": "1", "exp_avg_sq": "2"}
"""The endings of bitsandbytes' names of each moment's tensors."""
INNER = "__bnb_optimizer_quant_state__"
"""The name under which newer releases hide all of a state's tensors from FSDP."""
TENSORS = ("state", "qmap", "absmax", "max", "new_max")
STORED = {INNER, "gnorm_vec", "unorm_vec", *(f"{name}{i}" for name in TENSORS for i in (1, 2))}
"""Names that bitsandbytes keeps in a state, beside the step count; other names are their users'."""
OTHER_KEYS = ("alpha", "t_alpha", "t_beta3")
"""Keys of AdEMAMix, which all groups have."""
BLOCK, OLDER_BLOCK = 256, 2048


class _Base(DropIn, means=MEANS):
    """Arguments are bitsandbytes', with its order and defaults.

    Moments of 8 bits are "block_e4m3" and "block_e5m3", in blocks of 128 elements; bitsandbytes has
    codes of its own in blocks of 256, rounded to nearest. Small ones, and where rows are no whole
    blocks, are fp32 (docs/how-to/low_memory.md). An infinity or NaN among gradients goes through
    the arithmetic, where bitsandbytes' 8-bit kernels pass over it.

    Args:
        params, lr, betas, eps: as megaopt.FusedAdam takes them; Lion, as megaopt.FusedLion.
        weight_decay: decoupled, also of Adam, as in bitsandbytes; of SGD L2. At least 0.
        momentum: of SGD, as megaopt.FusedSGD; bitsandbytes refuses 0.
        dampening, nesterov: as megaopt.FusedSGD; bitsandbytes ignores them in silence.
        amsgrad, args: only False, and None; bitsandbytes ignores them in silence.
        optim_bits: of a moment, 32 or 8; only 32, and not used, where the name says 8bit or 32bit.
        min_8bit_size: parameters with fewer elements keep moments in fp32. Refused where that is
            more than what a parameter has that would get 8 bits here.
        is_paged: True, and the Paged optimizers, keep moments in pinned host memory all the time,
            as state_device="cpu" does; bitsandbytes moves them there when the GPU's memory is full.
        percentile_clipping, block_wise: only 100, and True. `step(clip_norm=...)` clips by the norm
            of all gradients.
        seed: of the random bits, from 0 to `2**64 - 1`.

    Raises:
        ValueError: as megaopt.FusedAdam; an argument that has to have one value has another.
    """

    _moment, _min_8bit_size = "exp_avg", 0

    def _translated(self, arguments: dict[str, Any]) -> dict[str, Any]:
        least = arguments["min_8bit_size"]
        if type(least) is not int or least < 0:
            refuse("min_8bit_size", "a whole number >= 0", least)
        self._min_8bit_size = least
        return {}

    def _check_param(self, param: torch.Tensor, label: str) -> None:
        super()._check_param(param, label)
        numel, form = param.numel(), self.options.moment_format(self._moment)
        if form.block and numel < self._min_8bit_size and view_of(param).keeps_blocks(form):
            allowed = f"at most {numel}, its number of elements, as it would have 8-bit moments"
            refuse(f"{label}: min_8bit_size", allowed, self._min_8bit_size)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads as this package's optimizer, also state dicts of bitsandbytes, by their values.

        Raises ValueError for codes without their map or amaxes; nothing has changed then.
        """
        super().load_state_dict(unpacked_state_dict(state_dict))

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state for pickle and deepcopy."""
        return {**super().__getstate__(), "_min_8bit_size": self._min_8bit_size}


def unpacked_state_dict(state_dict: Any) -> Any:
    """A state dict of bitsandbytes with fp32 exp_avg and exp_avg_sq; the given one stays.

    megaopt.FusedAdam, or FusedLion, and torch.optim.AdamW load it. What has no state1 is passed on
    as it is. Raises ValueError for 8-bit states that are not block-wise.
    """
    flat = with_states(state_dict, lambda state, _: {**state, **state.get(INNER, {})})
    states = [] if flat is state_dict else [*filter(None, flat["state"].values())]
    if not any("state1" in state for state in states):
        return state_dict
    left_out = (*OTHER_KEYS, *(() if any("state2" in state for state in states) else ("eps",)))
    groups = [{k: group[k] for k in group if k not in left_out} for group in flat["param_groups"]]
    return {**with_states(flat, _unpacked), "param_groups": groups}


def _unpacked(state: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Codes become fp32 values: of the code's place in the map, times the block's amax."""
    entries = {name: value for name, value in state.items() if name not in STORED}
    for name, number in MOMENTS.items():
        code = state.get(f"state{number}")
        if isinstance(code, torch.Tensor) and code.dtype == torch.uint8:
            table, amax = state.get(f"qmap{number}"), state.get(f"absmax{number}")
            if not isinstance(table, torch.Tensor) or table.shape != (256,):
                refuse(f"{where}: qmap{number}", "a tensor of 256 values", table)
            counts = {-(-code.numel() // size): size for size in (OLDER_BLOCK, BLOCK)}
            if not (isinstance(amax, torch.Tensor) and amax.dim() == 1 and len(amax) in counts):
                allowed = f"a number for each block of {BLOCK} elements"
                refuse(f"{where}: absmax{number}", allowed, amax)
            scale = amax.repeat_interleave(counts[len(amax)])[: code.numel()].view(code.shape)
            code = table[code.long()].float() * scale
        if code is not None:
            entries[name] = code
    return entries


class Adam(_Base, megaopt.FusedAdam, takes={**ADAM, **BITS, **LAST}, makes_states="stepped"):
    """bitsandbytes' Adam: megaopt.FusedAdam, with decoupled weight decay of 0 by default."""


class AdamW(_Base, megaopt.FusedAdam, takes={**ADAMW, **BITS, **LAST}, makes_states="stepped"):
    """bitsandbytes' AdamW: megaopt.FusedAdam, with a weight_decay of 0.01 by default."""


class Lion(_Base, megaopt.FusedLion, takes={**LION, **BITS, **LAST}):
    """bitsandbytes' Lion: megaopt.FusedLion."""


class SGD(_Base, megaopt.FusedSGD, takes={**MOMENTUM, **BITS, **UNPAGED}):
    """bitsandbytes' SGD: megaopt.FusedSGD, with L2 weight decay."""

    _moment = "momentum_buffer"

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads as megaopt.FusedSGD, also state dicts of bitsandbytes, by their values.

        Raises ValueError for codes without their map or amaxes; nothing has changed then.
        """
        unpacked = unpacked_state_dict(state_dict)
        if unpacked is not state_dict:
            # momentum is bitsandbytes' first beta, and the buffer its first moment
            groups = [dict(group) for group in unpacked["param_groups"]]
            for group in groups:
                group["momentum"], _ = group.pop("betas")
            buffers = {
                key: {"momentum_buffer": state["exp_avg"]}
                for key, state in unpacked["state"].items()
            }
            unpacked = {"state": buffers, "param_groups": groups}
        super().load_state_dict(unpacked)


class Adam8bit(Adam, means=ONLY_32, **IN_BLOCKS):
    """bitsandbytes' Adam8bit: Adam with moments of 8 bits."""


class AdamW8bit(AdamW, means=ONLY_32, **IN_BLOCKS):
    """bitsandbytes' AdamW8bit: AdamW with moments of 8 bits."""


class Lion8bit(Lion, takes={**LION, **LAST}, **IN_BLOCKS):
    """bitsandbytes' Lion8bit: Lion with a moment of 8 bits."""


class SGD8bit(SGD, takes={**MOMENTUM, **UNPAGED}, **IN_BLOCKS):
    """bitsandbytes' SGD8bit: SGD with a momentum buffer of 8 bits."""


class Adam32bit(Adam, means=ONLY_32):
    """bitsandbytes' Adam32bit: Adam with fp32 moments."""


class AdamW32bit(AdamW, means=ONLY_32):
    """bitsandbytes' AdamW32bit: AdamW with fp32 moments."""


class Lion32bit(Lion, takes={**LION, **LAST}):
    """bitsandbytes' Lion32bit: Lion with an fp32 moment."""


class SGD32bit(SGD, takes={**MOMENTUM, **UNPAGED}):
    """bitsandbytes' SGD32bit: SGD with an fp32 momentum buffer."""


class PagedAdam(Adam, state_device="cpu"):
    """PagedAdam: Adam, with its states in pinned host memory."""


class PagedAdam8bit(Adam8bit, state_device="cpu"):
    """PagedAdam8bit: Adam8bit, with its states in pinned host memory."""


class PagedAdamW(AdamW, state_device="cpu"):
    """PagedAdamW: AdamW, with its states in pinned host memory."""


class PagedAdamW8bit(AdamW8bit, state_device="cpu"):
    """PagedAdamW8bit: AdamW8bit, with its states in pinned host memory."""


class PagedLion(Lion, state_device="cpu"):
    """PagedLion: Lion, with its states in pinned host memory."""


class PagedLion8bit(Lion8bit, state_device="cpu"):
    """PagedLion8bit: Lion8bit, with its states in pinned host memory."""


class PagedAdam32bit(Adam32bit, state_device="cpu"):
    """PagedAdam32bit: Adam32bit, with its states in pinned host memory."""


class PagedAdamW32bit(AdamW32bit, state_device="cpu"):
    """PagedAdamW32bit: AdamW32bit, with its states in pinned host memory."""


class PagedLion32bit(Lion32bit, state_device="cpu"):
    """PagedLion32bit: Lion32bit, with its states in pinned host memory."""
