"""bitsandbytes 0.50's Adam, AdamW and Lion under their names, over this package's.

Changing the import keeps a script; the bits are this package's, and not bitsandbytes': 8-bit
moments are rounded stochastically, and one launch steps all parameters, where bitsandbytes waits
for the GPU after each. bitsandbytes itself is needed by `to_bitsandbytes_state_dict` alone.
GlobalOptimManager has no counterpart: parameters for which it asks for 32 bits go to an optimizer
of their own.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch

import megaopt
from megaopt.integration.bitsandbytes_state import packed_state_dict, unpacked_state_dict
from megaopt.optimizer import FusedOptimizer
from megaopt.options.checks import one_of, refuse, same, shown
from megaopt.params import view_of

__all__ = [
    "Adam",
    "Adam8bit",
    "AdamW",
    "AdamW8bit",
    "Lion",
    "Lion8bit",
    "PagedAdam",
    "PagedAdam8bit",
    "PagedAdamW",
    "PagedAdamW8bit",
    "PagedLion",
    "PagedLion8bit",
    "unpacked_state_dict",
]

FORMATS = {"exp_avg": "block_e4m3", "exp_avg_sq": "block_e5m3"}
"""How 8 bits store each moment."""

ONLY: dict[str, Any] = {
    "amsgrad": False,
    "args": None,
    "percentile_clipping": 100,
    "block_wise": True,
}
"""The only values of what bitsandbytes has, or had, and is not here."""
OWN = ("amsgrad", "optim_bits", "args", "min_8bit_size", "is_paged")
OLDER = ("percentile_clipping", "block_wise")
ARGUMENTS = """\
Arguments are bitsandbytes', with its order and defaults. Moments of 8 bits are in blocks of 128
elements, "block_e4m3" and, for exp_avg_sq, "block_e5m3", whose scales are powers of two in a byte;
bitsandbytes has codes of its own in blocks of 256, rounded to nearest. Of parameters with fewer
than 4,096 elements, 65,536 in one dimension, or with rows of no whole blocks, moments are fp32. An
infinity or NaN among the gradients goes through the arithmetic, where bitsandbytes' 8-bit kernels
pass over it.

Args:
    {rule}: as megaopt.{base} takes them; weight decay is
        decoupled, also of Adam, as in bitsandbytes.
    {amsgrad}{bits}args: only None.
    min_8bit_size: parameters with fewer elements keep moments in fp32. Refused where that is more
        than what a parameter has that would get 8 bits here.
    is_paged: True, and the Paged optimizers, keep moments in pinned host memory all the time, as
        megaopt's state_device="cpu" does; bitsandbytes moves pages there when the GPU's memory is
        full. The bits are the same; a step takes as long as the bus needs.
    percentile_clipping: only 100, as in releases that had it: no clipping. `step(clip_norm=...)`
        clips by the norm of all gradients.
    block_wise: only True, as in releases that had it.
    seed: of the random bits, from 0 to 2**64 - 1.

Raises:
    ValueError: as megaopt.{base}; an argument that has to have one value has another.
"""
AMSGRAD = """amsgrad: only False; bitsandbytes' 32-bit optimizers ignore it in silence.
    """


class _Base(FusedOptimizer):
    """What bitsandbytes' optimizers have in common."""

    _moments: tuple[str, ...] = ("exp_avg", "exp_avg_sq")
    _is_8bit = False
    _is_paged = False
    _min_8bit_size = 0

    def __init_subclass__(cls, **arguments: Any) -> None:
        """Gives the optimizers of this file the docstring of all their arguments."""
        super().__init_subclass__(**arguments)
        names = list(inspect.signature(cls).parameters)
        if cls.__module__ != __name__ or "min_8bit_size" not in names:
            return
        bits = (
            "32 or 8: bits of a moment" if "8bit" not in cls.__name__ else "only 32, and not used"
        )
        shared = ARGUMENTS.format(
            rule=", ".join(n for n in names if n not in (*OWN, *OLDER, "seed")),
            base="FusedLion" if issubclass(cls, megaopt.FusedLion) else "FusedAdam",
            amsgrad=AMSGRAD if "amsgrad" in names else "",
            bits=f"optim_bits: {bits}.\n    " if "optim_bits" in names else "",
        )
        cls.__doc__ = f"{inspect.cleandoc(cls.__doc__ or '')}\n\n{shared}"

    def _start(
        self, params: Any, rule: dict[str, Any], bits: Any, min_8bit_size: Any, only: dict[str, Any]
    ) -> None:
        """only: is_paged, and what must have one value; raises ValueError for what is not here."""
        if self._is_8bit:
            _check_8_bits(type(self).__name__, bits)
            bits = 8
        one_of("optim_bits", bits, (32, 8))
        is_paged = only.get("is_paged", False)
        one_of("is_paged", is_paged, (False, True))
        for name, value in ONLY.items():
            one_of(name, only.get(name, value), (value,))
        whole = isinstance(min_8bit_size, int) and not isinstance(min_8bit_size, bool)
        if not whole or min_8bit_size < 0:
            refuse("min_8bit_size", "a whole number >= 0", min_8bit_size)
        self._min_8bit_size = min_8bit_size
        moments: Any = {f"{name}_dtype": FORMATS[name] for name in self._moments if bits == 8}
        if is_paged or self._is_paged:
            moments["state_device"] = "cpu"
        habits: Any = {"makes_states": "stepped"} if isinstance(self, megaopt.FusedAdam) else {}
        super().__init__(params, **rule, **moments, **habits)

    def _check_param(self, param: torch.Tensor, label: str) -> None:
        super()._check_param(param, label)
        numel, asked = param.numel(), self._min_8bit_size
        form = self.options.moment_format("exp_avg")
        if form.block and numel < asked and view_of(param).keeps_blocks(form):
            raise ValueError(
                f"{label}: min_8bit_size must be at most {numel}, its number of elements, got "
                f"{asked}: it would have 8-bit moments here; an optimizer with optim_bits=32 keeps "
                "its moments in fp32"
            )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over a state dict of this package's, of torch's or of bitsandbytes' optimizer.

        bitsandbytes' 8-bit states are read as fp32 values and stored in the formats here, to
        nearest; its 32-bit states likewise, exactly where moments are fp32.

        Raises:
            ValueError: as megaopt.FusedAdam.load_state_dict; 8-bit states that are not block-wise.
                Nothing has changed then.
        """
        super().load_state_dict(unpacked_state_dict(state_dict))

    @torch.no_grad()
    def to_bitsandbytes_state_dict(self) -> dict[str, Any]:
        """A state dict that bitsandbytes' optimizer of this name loads; needs bitsandbytes.

        Moments are in its 8-bit codes where this optimizer has 8 bits, otherwise fp32.

        Raises:
            ImportError: bitsandbytes is not installed.
            ValueError: a parameter is a DTensor.
        """
        return packed_state_dict(self)

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and deepcopy."""
        return {**super().__getstate__(), "_min_8bit_size": self._min_8bit_size}


class _Adam(_Base, megaopt.FusedAdam):
    """What AdamW and Adam have in common, which differ by the default of weight_decay alone."""


def _check_8_bits(name: str, optim_bits: Any) -> None:
    if not same(optim_bits, 32):
        raise ValueError(
            f"optim_bits must be 32, which {name} does not use, got {shown(optim_bits)}"
        )


class Adam(_Adam):
    """bitsandbytes' Adam: megaopt.FusedAdam, with decoupled weight decay of 0 by default."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        optim_bits: int = 32,
        args: None = None,
        min_8bit_size: int = 4096,
        is_paged: bool = False,
        *,
        percentile_clipping: int = 100,
        block_wise: bool = True,
        seed: int = 0,
    ) -> None:
        rule = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        only: dict[str, Any] = {"amsgrad": amsgrad, "args": args, "is_paged": is_paged}
        only |= {"percentile_clipping": percentile_clipping, "block_wise": block_wise}
        self._start(params, {**rule, "seed": seed}, optim_bits, min_8bit_size, only)


class Adam8bit(Adam):
    """bitsandbytes' Adam8bit: Adam with moments of 8 bits."""

    _is_8bit = True


class AdamW(_Adam):
    """bitsandbytes' AdamW: megaopt.FusedAdam, with a weight_decay of 0.01 by default."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        optim_bits: int = 32,
        args: None = None,
        min_8bit_size: int = 4096,
        is_paged: bool = False,
        *,
        percentile_clipping: int = 100,
        block_wise: bool = True,
        seed: int = 0,
    ) -> None:
        rule = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        only: dict[str, Any] = {"amsgrad": amsgrad, "args": args, "is_paged": is_paged}
        only |= {"percentile_clipping": percentile_clipping, "block_wise": block_wise}
        self._start(params, {**rule, "seed": seed}, optim_bits, min_8bit_size, only)


class AdamW8bit(AdamW):
    """bitsandbytes' AdamW8bit: AdamW with moments of 8 bits."""

    _is_8bit = True


class _Lion(_Base, megaopt.FusedLion):
    """What Lion and Lion8bit have in common."""

    _moments = ("exp_avg",)


class Lion(_Lion):
    """bitsandbytes' Lion: megaopt.FusedLion."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0,
        optim_bits: int = 32,
        args: None = None,
        min_8bit_size: int = 4096,
        is_paged: bool = False,
        *,
        percentile_clipping: int = 100,
        block_wise: bool = True,
        seed: int = 0,
    ) -> None:
        rule = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "seed": seed}
        only: dict[str, Any] = {"args": args, "is_paged": is_paged}
        only |= {"percentile_clipping": percentile_clipping, "block_wise": block_wise}
        self._start(params, rule, optim_bits, min_8bit_size, only)


class Lion8bit(_Lion):
    """bitsandbytes' Lion8bit: Lion with a moment of 8 bits."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0,
        args: None = None,
        min_8bit_size: int = 4096,
        is_paged: bool = False,
        *,
        percentile_clipping: int = 100,
        block_wise: bool = True,
        seed: int = 0,
    ) -> None:
        rule = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "seed": seed}
        only: dict[str, Any] = {"args": args, "is_paged": is_paged}
        only |= {"percentile_clipping": percentile_clipping, "block_wise": block_wise}
        self._start(params, rule, 8, min_8bit_size, only)


def _paged(base: Any) -> Any:
    """Makes the optimizer of states that bitsandbytes pages to the host: here all are there."""
    doc = (
        f"{base.__name__}, with its states in pinned host memory, which the step reads and writes."
    )
    members = {"_is_paged": True, "__doc__": doc, "__module__": __name__}
    return type(f"Paged{base.__name__}", (base,), members)


PagedAdam, PagedAdam8bit = _paged(Adam), _paged(Adam8bit)
PagedAdamW, PagedAdamW8bit = _paged(AdamW), _paged(AdamW8bit)
PagedLion, PagedLion8bit = _paged(Lion), _paged(Lion8bit)
