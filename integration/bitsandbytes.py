"""bitsandbytes 0.50's Adam, AdamW, Lion and SGD under their names, over this package's.

Changing the import keeps a script; the bits are this package's, and not bitsandbytes': 8-bit
moments are rounded stochastically, and one launch steps all parameters, where bitsandbytes waits
for the GPU after each. bitsandbytes itself is not needed. GlobalOptimManager has no counterpart:
parameters for which it asks for 32 bits go to an optimizer of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from inspect import Parameter
from typing import Any, ClassVar, TypeVar

import torch
from typing_extensions import Unpack

import megaopt
from megaopt.integration.drop_in import IN_BLOCKS, DropIn, DropInOptions
from megaopt.options.checks import one_of, refuse
from megaopt.params import view_of
from megaopt.saving.parse import with_states

Class = TypeVar("Class", bound=type)

BITS = {"optim_bits": 32}
LAST = {"args": None, "min_8bit_size": 4096, "is_paged": False}
LAST |= {"percentile_clipping": 100, "block_wise": True, "seed": 0}
ADAM = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0, "amsgrad": False}
ADAMW = {**ADAM, "weight_decay": 1e-2}
LION = {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0}
MOMENTUM = {"lr": Parameter.empty, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0}
MOMENTUM |= {"nesterov": False}
UNPAGED = {name: LAST[name] for name in LAST if name != "is_paged"}
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


class BitsandbytesOptions(DropInOptions, total=False):
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

    amsgrad: bool
    momentum: float
    dampening: float
    nesterov: bool
    optim_bits: int
    args: Any
    min_8bit_size: int
    is_paged: bool
    percentile_clipping: int
    block_wise: bool


class _Base(DropIn):
    _library: ClassVar[Any] = BitsandbytesOptions
    _keywords: ClassVar[tuple[str, ...]] = ("percentile_clipping", "block_wise", "seed")
    _only: ClassVar = {"amsgrad": (False,), "args": (None,), "is_paged": (False, True)}
    _only |= {"percentile_clipping": (100,), "block_wise": (True,)}
    _bits: ClassVar[int | None] = None
    """Bits of moments, where the name says them."""
    _moment: ClassVar[str] = "exp_avg"
    _is_paged = False
    _min_8bit_size = 0

    def __init__(
        self, params: Iterable[Any], *arguments: Any, **options: Unpack[BitsandbytesOptions]
    ) -> None:
        super().__init__(params, *arguments, **options)

    def _translated(self, arguments: dict[str, Any]) -> dict[str, Any]:
        least, bits = arguments["min_8bit_size"], arguments.get("optim_bits", 32)
        one_of("optim_bits", bits, (32,) if self._bits else (32, 8))
        if type(least) is not int or least < 0:
            refuse("min_8bit_size", "a whole number >= 0", least)
        self._min_8bit_size = least
        is_paged = arguments.get("is_paged") or self._is_paged
        home = {"state_device": "cpu"} if is_paged else {}
        return {**home, **(IN_BLOCKS if 8 in (self._bits, bits) else {})}

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
        super().load_state_dict(state_dict if unpacked is state_dict else _as_sgd(unpacked))


def _as_sgd(unpacked: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict with the names of torch.optim.SGD, which has momentum for the first beta."""
    groups = [dict(group) for group in unpacked["param_groups"]]
    for group in groups:
        group["momentum"], _ = group.pop("betas")
    buffers = {
        key: {"momentum_buffer": state["exp_avg"]} for key, state in unpacked["state"].items()
    }
    return {"state": buffers, "param_groups": groups}


class Adam8bit(Adam):
    """bitsandbytes' Adam8bit: Adam with moments of 8 bits."""

    _bits = 8


class AdamW8bit(AdamW):
    """bitsandbytes' AdamW8bit: AdamW with moments of 8 bits."""

    _bits = 8


class Lion8bit(Lion, takes={**LION, **LAST}):
    """bitsandbytes' Lion8bit: Lion with a moment of 8 bits."""

    _bits = 8


class SGD8bit(SGD, takes={**MOMENTUM, **UNPAGED}):
    """bitsandbytes' SGD8bit: SGD with a momentum buffer of 8 bits."""

    _bits = 8


class Adam32bit(Adam):
    """bitsandbytes' Adam32bit: Adam with fp32 moments."""

    _bits = 32


class AdamW32bit(AdamW):
    """bitsandbytes' AdamW32bit: AdamW with fp32 moments."""

    _bits = 32


class Lion32bit(Lion, takes={**LION, **LAST}):
    """bitsandbytes' Lion32bit: Lion with an fp32 moment."""

    _bits = 32


class SGD32bit(SGD, takes={**MOMENTUM, **UNPAGED}):
    """bitsandbytes' SGD32bit: SGD with an fp32 momentum buffer."""

    _bits = 32


def _paged(base: Class) -> Class:
    """The optimizer whose states bitsandbytes pages to the host; here all of them are there."""
    doc = f"Paged{base.__name__}: {base.__name__}, with its states in pinned host memory."
    members = {"_is_paged": True, "__doc__": doc, "__module__": __name__}
    return type(base)(f"Paged{base.__name__}", (base,), members)


PagedAdam, PagedAdam8bit = _paged(Adam), _paged(Adam8bit)
PagedAdamW, PagedAdamW8bit = _paged(AdamW), _paged(AdamW8bit)
PagedLion, PagedLion8bit = _paged(Lion), _paged(Lion8bit)
PagedAdam32bit, PagedAdamW32bit = _paged(Adam32bit), _paged(AdamW32bit)
PagedLion32bit = _paged(Lion32bit)
