"""torchao 0.18's optimizers under their names, over megaopt.FusedAdam.

Changing the import keeps a script; the bits are this package's, and not torchao's: moments of 8 and
4 bits are rounded stochastically, and one launch steps all parameters, without torch.compile.
torchao itself is needed by `to_torchao_state_dict` alone, and to read its files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Any, ClassVar

import torch

import megaopt
from megaopt.integration.drop_in import DropIn
from megaopt.optimizer import FusedOptimizer
from megaopt.options.checks import one_of, refuse
from megaopt.options.groups import entries_of
from megaopt.options.placement import STATE_DEVICE
from megaopt.params.dtensor import local_of

ADAM = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0, "amsgrad": False}
ADAMW = {**ADAM, "weight_decay": 1e-2}
ROUND = {"bf16_stochastic_round": False, "seed": 0}
SHARED = """\
Arguments are torchao's, with its order and defaults.

Args:
    params, betas, eps, weight_decay: as megaopt.FusedAdam takes them.
    lr: a number or a tensor of one; groups have it as an fp32 tensor, as torchao's have:
        `group["lr"].fill_(lr)` changes it. A tensor on a GPU makes the optimizer capturable.
    amsgrad: as megaopt.FusedAdam takes it; exp_avg_sq in blocks is rounded to nearest then, as in
        torchao: it stands still where a step changes it by less than half of a code.
    block_size: at least 64 (4 bits: 32; _AdamW has none). 128 and more give blocks of 128 elements,
        less gives 64; 4 bits have blocks of 32. A block's scale is a byte here, four in torchao.
    bf16_stochastic_round: rounds bf16 and fp16 weights stochastically. To nearest, updates below
        half of a weight's last place go lost.
    seed: of the random bits, from 0 to 2**64 - 1.

Raises:
    ValueError: as megaopt.FusedAdam; block_size is no whole number >= 64 (4 bits: 32).
"""


class _Base(DropIn, megaopt.FusedAdam):
    """Translates torchao's arguments, and reads and writes its state dicts."""

    _keywords: tuple[str, ...] = ("block_size", "bf16_stochastic_round", "seed")
    _allowed: ClassVar = dict.fromkeys(("amsgrad", "bf16_stochastic_round"), (True, False))
    _shared = SHARED
    _blocks: ClassVar = {128: ("block_e4m3", "block_e5m3"), 64: ("block64_e4m3", "block64_e5m3")}
    """The formats of exp_avg and exp_avg_sq, by the elements of a block."""
    _theirs = "subclass_8bit.OptimState8bit"
    """How torchao keeps a moment."""

    def _options(self, given: dict[str, Any]) -> dict[str, Any]:
        rounds, size, lr = (
            given.pop("bf16_stochastic_round"),
            given.pop("block_size", 128),
            given["lr"],
        )
        if type(size) is not int or size < min(self._blocks):
            refuse("block_size", f"a whole number >= {min(self._blocks)}", size)
        exp_avg, exp_avg_sq = next(own for least, own in self._blocks.items() if least <= size)
        # the largest of numbers that are rounded up and down would be too large
        nearest = "_nearest" if given["amsgrad"] else ""
        return {
            "exp_avg_dtype": exp_avg,
            "exp_avg_sq_dtype": f"{exp_avg_sq}{nearest}",
            "weight_rounding": "stochastic" if rounds else "nearest",
            "capturable": isinstance(lr, torch.Tensor) and lr.is_cuda,
            "makes_states": "stepped",
            **given,
        }

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group as megaopt.FusedAdam; its lr becomes an fp32 tensor, as in torchao."""
        super().add_param_group(param_group)
        self._make_tensors()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads as megaopt.FusedAdam; of torchao's state dicts codes are read as fp32."""
        super().load_state_dict(state_dict)
        self._make_tensors()

    def _read(self, state_dict: dict[str, Any]) -> Any:
        return unpacked_state_dict(state_dict)

    def _make_tensors(self) -> None:
        for group in self.param_groups:
            lr = group["lr"]
            if isinstance(lr, (int, float)) or (isinstance(lr, torch.Tensor) and lr.is_inference()):
                with torch.inference_mode(False):  # schedules write it
                    group["lr"] = torch.tensor(float(lr), dtype=torch.float32, device="cpu")

    @torch.no_grad()
    def to_torchao_state_dict(self, block_size: int | None = None) -> dict[str, Any]:
        """A state dict that torchao's optimizer of this name loads; needs torchao.

        Moments are given in torchao's formats where it keeps them so, otherwise in fp32, which it
        casts to the parameter's dtype.

        Args:
            block_size: of the optimizer that loads it; None: torchao's default.

        Raises:
            ImportError: torchao is not installed.
            ValueError: as megaopt.FusedAdam.to_torch_state_dict; a parameter is a DTensor.
        """
        found = self.to_torch_state_dict()
        size = block_size or self._face.parameters["block_size"].default
        for key, state in found["state"].items():
            for name in self.rule.moments:
                value = state[name]
                if local_of(value) is not value:
                    refuse(f"parameter {key}", "a plain tensor", value)
                is_packed = value.numel() >= 4096 and value.numel() % size == 0
                if self.options.moment_format(name).block and is_packed:
                    state[name] = self._packed(value, name == "exp_avg", size)
        for group in found["param_groups"]:
            group["lr"] = torch.tensor(group["lr"], dtype=torch.float32, device="cpu")
        return found

    def _packed(self, value: torch.Tensor, signed: bool, size: int) -> torch.Tensor:
        """A moment in torchao's own format."""
        module, name = self._theirs.split(".")
        kind = getattr(import_module(f"torchao.optim.{module}"), name)
        signs = () if "Fp8" in name else (signed,)
        code = kind.zeros(value.shape, *signs, size, value.device, dtype=torch.float32)
        packed: torch.Tensor = code.copy_(value)
        return packed


def unpacked_state_dict(state_dict: Any) -> Any:
    """A state dict of torchao with fp32 values in the place of its codes; the given one stays.

    megaopt.FusedAdam and torch.optim.AdamW load it. What has no such codes, in whole or in part,
    is passed on as it is.
    """
    states = state_dict.get("state") if isinstance(state_dict, Mapping) else None
    if not isinstance(states, Mapping):
        return state_dict
    found = dict(states)
    for key, state in states.items():
        if isinstance(state, Mapping):
            found[key] = {name: _values(value) for name, value in state.items()}
    return {**state_dict, "state": found}


def _values(value: Any) -> Any:
    """fp32 where the value has torchao's codes; a DTensor of such becomes one of values."""
    local: Any = local_of(value)
    if not (
        isinstance(local, torch.Tensor) and hasattr(local, "codes") and hasattr(local, "scale")
    ):
        return value
    found = local.dequantize().float()
    if local is value:
        return found
    extent = {"shape": value.shape, "stride": value.stride()}
    mesh, placements = value.device_mesh, value.placements
    return type(value).from_local(found, mesh, placements, run_check=False, **extent)


class Adam8bit(_Base, face={**ADAM, "block_size": 256, **ROUND}):
    """torchao's Adam8bit: megaopt.FusedAdam with L2 weight decay and 8-bit moments in blocks.

    The codes are not torchao's dynamic ones: "block_e4m3" for exp_avg, "block_e5m3" for exp_avg_sq,
    with scales that are powers of two. By the row rule moments of parameters whose rows are whole
    blocks are in blocks, of DTensors too; others, and those of fewer than 4,096 elements, 65,536 in
    one dimension, are fp32; torchao's are of the weight's dtype.
    """

    _fixed: ClassVar = {"adam_w_mode": False}


class AdamW8bit(_Base, face={**ADAMW, "block_size": 256, **ROUND}):
    """torchao's AdamW8bit: megaopt.FusedAdam with 8-bit moments in blocks, as Adam8bit has them."""


class AdamFp8(Adam8bit):
    """torchao's AdamFp8: Adam8bit; formats here have an exponent as fp8 has, e5m3 no sign."""

    _theirs = "subclass_fp8.OptimStateFp8"


class AdamWFp8(AdamW8bit):
    """torchao's AdamWFp8: AdamW8bit; formats here have an exponent as fp8 has, e5m3 no sign."""

    _theirs = "subclass_fp8.OptimStateFp8"


class AdamW4bit(_Base, face={**ADAMW, "block_size": 128, **ROUND}):
    """torchao's AdamW4bit: megaopt.FusedAdam with 4-bit moments in blocks.

    The codes are not torchao's: "block32_e3m0" for exp_avg, "block32_e4m0" for exp_avg_sq. What
    AdamW8bit says holds, and the last dimension has to be a multiple of 32.
    """

    _blocks: ClassVar = {32: ("block32_e3m0", "block32_e4m0")}
    _theirs = "subclass_4bit.OptimState4bit"


class Adam4bit(_Base, face={**ADAM, "block_size": 128, **ROUND}):
    """torchao's Adam4bit: AdamW4bit with L2 weight decay."""

    _blocks, _theirs, _fixed = AdamW4bit._blocks, AdamW4bit._theirs, Adam8bit._fixed


class _AdamW(_Base, face={**ADAMW, **ROUND}):
    """torchao's _AdamW: megaopt.FusedAdam with fp32 moments; torchao's are of the weight's dtype.

    exp_avg_dtype="bfloat16_stochastic" of megaopt.FusedAdam takes half their memory, and does not
    stand still. Weights are plain or DTensors; torchao's quantized ones are refused.
    """

    _fixed: ClassVar = {"exp_avg_dtype": torch.float32, "exp_avg_sq_dtype": torch.float32}


OFFLOADED: dict[Any, tuple[type[FusedOptimizer], dict[str, Any]]] = {
    torch.optim.AdamW: (megaopt.FusedAdam, {"weight_decay": 1e-2}),
    torch.optim.Adam: (megaopt.FusedAdam, {"adam_w_mode": False}),
    torch.optim.SGD: (megaopt.FusedSGD, {}),
}
"""What stands for torch's optimizers, and the arguments in which it differs."""


def CPUOffloadOptimizer(
    params: Iterable[Any],
    optimizer_class: Any = torch.optim.AdamW,
    *,
    offload_gradients: bool = False,
    minimal_size: int = 4096,
    **kwargs: Any,
) -> FusedOptimizer:
    """Makes the optimizer with states in host memory that torchao's CPUOffloadOptimizer stands for.

    It is that of `optimizer_class` itself, with state_device="cpu": the step runs on the card and
    reads and writes states in pinned host memory, where torchao steps on the CPU. Weights and
    gradients stay on the card, and state dicts are the optimizer's own, not torchao's.

    Args:
        params: parameters or groups.
        optimizer_class: torch.optim.AdamW, Adam or SGD, which FusedAdam and FusedSGD stand for; one
            of this module, or torchao's of the same name; megaopt's FusedAdam, FusedLion, FusedSGD.
        offload_gradients: only False; megaopt.release_gradients frees each gradient within the
            backward pass.
        minimal_size: parameters with fewer elements keep their states on the card; at least 0.
        **kwargs: other arguments of the optimizer.

    Raises:
        ValueError, TypeError: an argument is wrong, as for the optimizer.
    """
    one_of("offload_gradients", offload_gradients, (False,))
    home = {"moments": "cpu", "masters": "cpu", "at_least": minimal_size}
    if type(minimal_size) is not int or minimal_size < 0:
        refuse("minimal_size", "a whole number >= 0", minimal_size)
    is_torchaos = str(getattr(optimizer_class, "__module__", "")).startswith("torchao.")
    own = globals().get(optimizer_class.__name__) if is_torchaos else optimizer_class
    kind, defaults = OFFLOADED.get(own, (own, {})) if isinstance(own, type) else (type(own), {})
    if not issubclass(kind, FusedOptimizer) or issubclass(kind, megaopt.GaLoreAdamW):
        refuse(
            "optimizer_class", "torch.optim.AdamW, Adam or SGD, megaopt.FusedAdam, FusedLion or "
            "FusedSGD, or an optimizer of this module", optimizer_class,
        )  # fmt: skip
    entries: Any = entries_of("params", params)
    is_grouped = isinstance(entries, list) and any(isinstance(each, dict) for each in entries)
    groups = entries if is_grouped else [{"params": entries}]
    make: Any = kind
    made: FusedOptimizer = make(
        [{**group, STATE_DEVICE: home} for group in groups], **{**defaults, **kwargs}
    )
    return made
