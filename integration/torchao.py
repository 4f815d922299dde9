"""torchao 0.18's optimizers under their names, over megaopt.FusedAdam.

Changing the import keeps a script; the bits are this package's, and not torchao's: moments of 8 and
4 bits are rounded stochastically, and one launch steps all parameters, without torch.compile.
torchao itself is needed to read its files alone; it loads what `to_torch_state_dict` gives.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

import megaopt
from megaopt.integration.drop_in import ADAM, ADAMW, DropIn
from megaopt.kernels.refusals import one_of, refuse
from megaopt.kernels.shards import local_of
from megaopt.optimizer import FusedOptimizer
from megaopt.options.groups import entries_of
from megaopt.options.placement import STATE_DEVICE
from megaopt.saving.parse import with_states

BLOCK8 = {128: ("block_e4m3", "block_e5m3"), 64: ("block64_e4m3", "block64_e5m3")}
BLOCK4 = {32: ("block32_e3m0", "block32_e4m0")}
"""The formats of exp_avg and exp_avg_sq, by the elements that a block has at least."""
PLAIN: dict[str, Any] = {"exp_avg_dtype": torch.float32, "exp_avg_sq_dtype": torch.float32}
ROUNDING = {True: {"weight_rounding": "stochastic"}, False: {"weight_rounding": "nearest"}}
DRAWS = {"bf16_stochastic_round": False, "seed": 0}
EIGHT: dict[str, Any] = {"*": None, "block_size": 256, **DRAWS}
FOUR: dict[str, Any] = {**EIGHT, "block_size": 128}


MEANS = {"bf16_stochastic_round": ROUNDING}


class _Base(DropIn, megaopt.FusedAdam, means=MEANS, makes_states="stepped"):
    """Arguments are torchao's, with its order and defaults. Formats are not its own.

    Moments of 8 bits, also where torchao has fp8, are "block_e4m3" and "block_e5m3", those of 4
    bits "block32_e3m0" and "block32_e4m0"; a block's scale is a byte here, four in torchao. Small
    ones, and where rows are no whole blocks, are fp32 (docs/how-to/low_memory.md); torchao's are of
    the weight's dtype.

    Args:
        params, betas, eps, weight_decay: as megaopt.FusedAdam takes them.
        lr: a number or a tensor of one; groups have it as an fp32 tensor, as torchao's have:
            `group["lr"].fill_(lr)` changes it. A tensor on a GPU makes the optimizer capturable.
        amsgrad: as there; exp_avg_sq in blocks is rounded to nearest then, as in torchao: it stands
            still where a step changes it by less than half of a code.
        block_size: at least 64 (4 bits: 32; _AdamW has none). 128 and more give blocks of 128
            elements, less gives 64; 4 bits have blocks of 32.
        bf16_stochastic_round: rounds bf16 and fp16 weights stochastically. To nearest, updates
            below half of a weight's last place go lost.
        seed: of the random bits, from 0 to `2**64 - 1`.

    Raises:
        ValueError: as megaopt.FusedAdam; block_size is too small.
    """

    _blocks = BLOCK8

    def _translated(self, arguments: dict[str, Any]) -> dict[str, Any]:
        size, lr = arguments.get("block_size", 128), arguments["lr"]
        if type(size) is not int or size < min(self._blocks):
            refuse("block_size", f"a whole number >= {min(self._blocks)}", size)
        exp_avg, exp_avg_sq = next(pair for least, pair in self._blocks.items() if least <= size)
        # the largest of numbers that are rounded up and down would be too large
        nearest = "_nearest" if arguments["amsgrad"] is True else ""
        is_capturable = isinstance(lr, torch.Tensor) and lr.is_cuda
        moments = {"exp_avg_dtype": exp_avg, "exp_avg_sq_dtype": f"{exp_avg_sq}{nearest}"}
        return {**moments, "capturable": is_capturable}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group as megaopt.FusedAdam; its lr becomes an fp32 tensor, as in torchao."""
        super().add_param_group(param_group)
        self._make_tensors()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads as megaopt.FusedAdam; codes in torchao's state dicts are read as fp32."""
        super().load_state_dict(unpacked_state_dict(state_dict))
        self._make_tensors()

    def _make_tensors(self) -> None:
        for group in self.param_groups:
            lr = group["lr"]
            if isinstance(lr, (int, float)) or (isinstance(lr, torch.Tensor) and lr.is_inference()):
                with torch.inference_mode(False):  # schedules write it
                    group["lr"] = torch.tensor(float(lr), dtype=torch.float32, device="cpu")


def unpacked_state_dict(state_dict: Any) -> Any:
    """A state dict of torchao with fp32 values in the place of its codes; the given one stays.

    megaopt.FusedAdam and torch.optim.AdamW load it. What has no such codes is passed on as it is.
    """
    return with_states(state_dict, lambda state, _: {name: _values(state[name]) for name in state})


def _values(value: Any) -> Any:
    """fp32 where the value has torchao's codes; a DTensor of such becomes one of values."""
    local: Any = local_of(value)
    if not all(hasattr(local, name) for name in ("codes", "scale", "dequantize")):
        return value
    values = local.dequantize().float()
    if local is value:
        return values
    extent = {"shape": value.shape, "stride": value.stride()}
    mesh, placements = value.device_mesh, value.placements
    return type(value).from_local(values, mesh, placements, run_check=False, **extent)


class Adam8bit(_Base, takes={**ADAM, **EIGHT}, adam_w_mode=False):
    """torchao's Adam8bit: megaopt.FusedAdam with L2 weight decay and 8-bit moments."""


class AdamW8bit(_Base, takes={**ADAMW, **EIGHT}):
    """torchao's AdamW8bit: megaopt.FusedAdam with 8-bit moments."""


class AdamFp8(Adam8bit):
    """torchao's AdamFp8: Adam8bit."""


class AdamWFp8(AdamW8bit):
    """torchao's AdamWFp8: AdamW8bit."""


class AdamW4bit(_Base, takes={**ADAMW, **FOUR}):
    """torchao's AdamW4bit: megaopt.FusedAdam with 4-bit moments."""

    _blocks = BLOCK4


class Adam4bit(_Base, takes={**ADAM, **FOUR}, adam_w_mode=False):
    """torchao's Adam4bit: megaopt.FusedAdam with L2 weight decay and 4-bit moments."""

    _blocks = BLOCK4


class _AdamW(_Base, takes={**ADAMW, "*": None, **DRAWS}, **PLAIN):
    """torchao's _AdamW: megaopt.FusedAdam with fp32 moments; torchao's are of the weight's dtype.

    exp_avg_dtype="bfloat16_stochastic" of megaopt.FusedAdam takes half their memory, and does not
    stand still. Weights are plain or DTensors; torchao's quantized ones are refused.
    """


STANDS_FOR: dict[Any, tuple[type[FusedOptimizer], dict[str, Any]]] = {
    torch.optim.AdamW: (megaopt.FusedAdam, {"weight_decay": 1e-2}),
    torch.optim.Adam: (megaopt.FusedAdam, {"adam_w_mode": False}),
    torch.optim.SGD: (megaopt.FusedSGD, {}),
}
"""This package's optimizers for torch's, and the arguments in which they differ."""


def CPUOffloadOptimizer(
    params: Iterable[Any],
    optimizer_class: Any = torch.optim.AdamW,
    *,
    offload_gradients: bool = False,
    minimal_size: int = 4096,
    **kwargs: Any,
) -> FusedOptimizer:
    """Makes an optimizer of `optimizer_class` itself, with state_device="cpu".

    The step runs on the card and reads and writes states in pinned host memory, where torchao steps
    on the CPU. Weights and gradients stay on the card, and state dicts are the optimizer's own.

    Args:
        params: parameters or groups.
        optimizer_class: torch.optim.AdamW, Adam or SGD, which FusedAdam and FusedSGD stand for; one
            of this module, or torchao's of the same name; megaopt's FusedAdam, FusedLion, FusedSGD.
        offload_gradients: only False; megaopt.release_gradients frees each gradient within the
            backward pass.
        minimal_size: parameters with fewer elements keep their states on the card; at least 0.
        **kwargs: other arguments of the optimizer.

    Raises:
        ValueError, TypeError: an argument has another value; as the optimizer.
    """
    one_of("offload_gradients", offload_gradients, (False,))
    if type(minimal_size) is not int or minimal_size < 0:
        refuse("minimal_size", "a whole number >= 0", minimal_size)
    is_torchaos = str(getattr(optimizer_class, "__module__", "")).startswith("torchao.")
    cls = globals().get(optimizer_class.__name__) if is_torchaos else optimizer_class
    kind, usual = STANDS_FOR.get(cls, (cls, {})) if isinstance(cls, type) else (type(cls), {})
    if not issubclass(kind, FusedOptimizer) or issubclass(kind, megaopt.GaLoreAdamW):
        allowed = "torch.optim.AdamW, Adam or SGD, megaopt.FusedAdam, FusedLion or FusedSGD"
        refuse("optimizer_class", f"{allowed}, or an optimizer of this module", optimizer_class)
    entries: Any = entries_of("params", params)
    if not (isinstance(entries, list) and any(isinstance(entry, dict) for entry in entries)):
        entries = [{"params": entries}]
    home = {STATE_DEVICE: {"moments": "cpu", "masters": "cpu", "at_least": minimal_size}}
    make: Any = kind
    optimizer: FusedOptimizer = make(
        [{**group, **home} for group in entries], **{**usual, **kwargs}
    )
    return optimizer
