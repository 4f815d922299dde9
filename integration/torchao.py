"""torchao 0.18's optimizers under their names, over megaopt.FusedAdam.

Changing the import keeps a script; the bits are this package's, and not torchao's: moments of 8 and
4 bits are rounded stochastically, and one launch steps all parameters, without torch.compile.
torchao itself is needed by `to_torchao_state_dict` alone, and to read its files.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Any

import torch

import megaopt
from megaopt.optimizer import FusedOptimizer
from megaopt.options.checks import one_of, refuse
from megaopt.options.groups import entries_of
from megaopt.options.placement import STATE_DEVICE
from megaopt.params.dtensor import local_of

__all__ = [
    "Adam4bit",
    "Adam8bit",
    "AdamFp8",
    "AdamW4bit",
    "AdamW8bit",
    "AdamWFp8",
    "CPUOffloadOptimizer",
    "_AdamW",
    "unpacked_state_dict",
]

FORMATS = {128: ("block_e4m3", "block_e5m3"), 64: ("block64_e4m3", "block64_e5m3")}
"""Of exp_avg and exp_avg_sq, by the elements of a block."""
FORMATS_OF_4_BITS = {32: ("block32_e3m0", "block32_e4m0")}

BLOCK_SIZE = """\
block_size: at least 64. torchao's default, 256, and all from 128 on give blocks of 128 elements,
        less give blocks of 64: never larger ones than asked for. A block's scale is a byte here,
        and four in torchao.
    """
BLOCK_SIZE_OF_4_BITS = """\
block_size: at least 32. Blocks have 32 elements whatever is asked for, never more: with a byte for
        a block's scale they take what torchao's default, 128, takes with four.
    """
ARGUMENTS = """\
Arguments are torchao's, with its order and defaults.

Args:
    params, betas, eps, weight_decay: as megaopt.FusedAdam takes them.
    lr: a number or a tensor of one; the groups have it as an fp32 tensor, as torchao's have:
        `group["lr"].fill_(lr)` changes it. A tensor on a GPU makes the optimizer capturable: no
        step waits for it. A number that is put in the tensor's place is taken too, where torchao
        raises an error.
    amsgrad: as megaopt.FusedAdam takes it.{amsgrad}
    {block_size}bf16_stochastic_round: True rounds bf16 weights stochastically, and fp16 ones, which
        torchao rounds to nearest. False rounds to nearest, and loses updates below half of a
        weight's last place.
    seed: of the random bits, from 0 to 2**64 - 1; not torchao's, which draws from torch's
        generator.

Raises:
    ValueError: as megaopt.FusedAdam{raised}.
"""
NEAREST = """ exp_avg_sq is rounded to nearest then, as in
        torchao: it stands still where a step changes it by less than half the distance of two
        codes."""


class _Base(megaopt.FusedAdam):
    """What torchao's optimizers have in common."""

    _adam_w_mode = False
    _is_fp8 = False
    _is_4_bits = False

    def __init_subclass__(cls, **arguments: Any) -> None:
        """Gives the optimizers of this file the docstring of all their arguments."""
        super().__init_subclass__(**arguments)
        if cls.__module__ != __name__:
            return
        has_blocks = "block_size" in inspect.signature(cls).parameters
        least = min(cls._formats())
        shared = ARGUMENTS.format(
            amsgrad=NEAREST if has_blocks else "",
            block_size=(BLOCK_SIZE_OF_4_BITS if cls._is_4_bits else BLOCK_SIZE) * has_blocks,
            raised=f"; block_size is less than {least}" if has_blocks else "",
        )
        cls.__doc__ = f"{inspect.cleandoc(cls.__doc__ or '')}\n\n{shared}"

    @classmethod
    def _formats(cls) -> dict[int, tuple[str, str]]:
        return FORMATS_OF_4_BITS if cls._is_4_bits else FORMATS

    def _in_blocks(self, block_size: Any, amsgrad: Any) -> dict[str, str]:
        """The formats of both moments."""
        formats = self._formats()
        whole = isinstance(block_size, int) and not isinstance(block_size, bool)
        if not whole or block_size < min(formats):
            refuse("block_size", f"a whole number >= {min(formats)}", block_size)
        exp_avg, exp_avg_sq = next(found for size, found in formats.items() if size <= block_size)
        one_of("amsgrad", amsgrad, (True, False))
        # the largest of numbers that are rounded up and down would be too large
        rounding = "_nearest" if amsgrad else ""
        return {"exp_avg_dtype": exp_avg, "exp_avg_sq_dtype": f"{exp_avg_sq}{rounding}"}

    def _start(
        self,
        params: Iterable[Any],
        numbers: tuple[Any, ...],
        moments: Mapping[str, Any],
        bf16_stochastic_round: bool,
        seed: int,
    ) -> None:
        """numbers: lr, betas, eps, weight_decay, amsgrad; moments: their formats."""
        *rule, amsgrad = numbers
        one_of("bf16_stochastic_round", bf16_stochastic_round, (True, False))
        named = dict(zip(("lr", "betas", "eps", "weight_decay"), rule, strict=True))
        super().__init__(
            params,
            **named,
            **moments,
            amsgrad=amsgrad,
            adam_w_mode=self._adam_w_mode,
            makes_states="stepped",
            weight_rounding="stochastic" if bf16_stochastic_round else "nearest",
            capturable=isinstance(named["lr"], torch.Tensor) and named["lr"].is_cuda,
            seed=seed,
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As megaopt.FusedAdam's; the group's lr becomes an fp32 tensor, as in torchao."""
        super().add_param_group(param_group)
        self._make_tensors()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over a state dict of megaopt.FusedAdam's, torch's or torchao's.

        torchao's 8-bit, 4-bit and fp8 states are read as fp32 values and stored in the formats
        here, to nearest; bf16 states exactly.

        Raises:
            ValueError: as megaopt.FusedAdam.load_state_dict; nothing has changed then.
        """
        super().load_state_dict(unpacked_state_dict(state_dict))
        self._make_tensors()

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
            block_size: of the optimizer that loads it; None: torchao's default, 256, with 4 bits
                128.

        Raises:
            ImportError: torchao is not installed.
            ValueError: as megaopt.FusedAdam.to_torch_state_dict; a parameter is a DTensor, whose
                shards torchao packs on their own.
        """
        found = self.to_torch_state_dict()
        block_size = block_size or (128 if self._is_4_bits else 256)
        for key, state in found["state"].items():
            for name in self.rule.moments:
                if local_of(state[name]) is not state[name]:
                    refuse(f"parameter {key}", "a plain tensor", state[name])
                if self.options.moment_format(name).block:
                    state[name] = self._packed(state[name], name, block_size)
        groups = found["param_groups"]
        return {
            **found,
            "param_groups": [
                {**g, "lr": torch.tensor(g["lr"], dtype=torch.float32, device="cpu")}
                for g in groups
            ],
        }

    def _packed(self, values: torch.Tensor, name: str, block_size: int) -> torch.Tensor:
        """A moment in torchao's own format, where it would keep it so."""
        optim = import_module("torchao.optim")
        if values.numel() < 4096 or values.numel() % block_size:
            return values
        shape, device = values.shape, values.device
        if self._is_fp8:
            kind = optim.subclass_fp8.OptimStateFp8
            code = kind.zeros(shape, block_size, device, dtype=torch.float32)
        else:
            is_4_bits = self._is_4_bits
            module = optim.subclass_4bit if is_4_bits else optim.subclass_8bit
            kind = module.OptimState4bit if is_4_bits else module.OptimState8bit
            code = kind.zeros(shape, name == "exp_avg", block_size, device, torch.float32)
        packed: torch.Tensor = code.copy_(values)
        return packed


def unpacked_state_dict(state_dict: Any) -> Any:
    """A state dict of torchao with fp32 values in the place of its codes; the given one stays.

    megaopt.FusedAdam and torch.optim.AdamW load it. What has no such codes, in whole or in part,
    is passed on as it is.
    """
    states = state_dict.get("state") if isinstance(state_dict, Mapping) else None
    if not isinstance(states, Mapping):
        return state_dict
    found = {key: _unpacked(state) for key, state in states.items()}
    return {**state_dict, "state": found}


def _unpacked(state: Any) -> Any:
    if not isinstance(state, Mapping):
        return state
    return {name: _values(value) for name, value in state.items()}


def _values(value: Any) -> Any:
    """fp32 where the value has torchao's codes; a DTensor of such becomes one of values."""
    local = local_of(value)
    if not isinstance(local, torch.Tensor) or not all(
        hasattr(local, n) for n in ("codes", "scale")
    ):
        return value
    found: Any = local.dequantize().float()
    if local is value:
        return found
    extent = {"shape": value.shape, "stride": value.stride()}
    return type(value).from_local(
        found, value.device_mesh, value.placements, run_check=False, **extent
    )


class Adam8bit(_Base):
    """torchao's Adam8bit: megaopt.FusedAdam with L2 weight decay and 8-bit moments in blocks.

    The codes are not torchao's dynamic ones: "block_e4m3" for exp_avg, "block_e5m3" for exp_avg_sq,
    with scales that are powers of two. By the row rule moments of parameters whose rows are whole
    blocks are in blocks, of DTensors too; others, and those of fewer than 4,096 elements, 65,536 in
    one dimension, are fp32; torchao's are of the weight's dtype.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        block_size: int = 256,
        bf16_stochastic_round: bool = False,
        seed: int = 0,
    ) -> None:
        numbers = (lr, betas, eps, weight_decay, amsgrad)
        moments = self._in_blocks(block_size, amsgrad)
        self._start(params, numbers, moments, bf16_stochastic_round, seed)


class AdamW8bit(_Base):
    """torchao's AdamW8bit: megaopt.FusedAdam with 8-bit moments in blocks, as Adam8bit has them."""

    _adam_w_mode = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        block_size: int = 256,
        bf16_stochastic_round: bool = False,
        seed: int = 0,
    ) -> None:
        numbers = (lr, betas, eps, weight_decay, amsgrad)
        moments = self._in_blocks(block_size, amsgrad)
        self._start(params, numbers, moments, bf16_stochastic_round, seed)


class AdamFp8(Adam8bit):
    """torchao's AdamFp8: Adam8bit; formats here have an exponent as fp8 has, e5m3 no sign."""

    _is_fp8 = True


class AdamWFp8(AdamW8bit):
    """torchao's AdamWFp8: AdamW8bit; formats here have an exponent as fp8 has, e5m3 no sign."""

    _is_fp8 = True


class _AdamW(_Base):
    """torchao's _AdamW: megaopt.FusedAdam with fp32 moments; torchao's are of the weight's dtype.

    exp_avg_dtype="bfloat16_stochastic" of megaopt.FusedAdam takes half their memory, and does not
    stand still. Weights are plain or DTensors; torchao's quantized ones are refused.
    """

    _adam_w_mode = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        bf16_stochastic_round: bool = False,
        seed: int = 0,
    ) -> None:
        numbers = (lr, betas, eps, weight_decay, amsgrad)
        self._start(params, numbers, {}, bf16_stochastic_round, seed)


class Adam4bit(_Base):
    """torchao's Adam4bit: megaopt.FusedAdam with L2 weight decay and 4-bit moments in blocks.

    The codes are not torchao's: "block32_e3m0" for exp_avg, "block32_e4m0" for exp_avg_sq, with
    scales that are powers of two. By the row rule moments of parameters whose rows are whole blocks
    are in blocks, of DTensors too; here the last dimension has to be a multiple of 32. Others, and
    those of fewer than 4,096 elements, 65,536 in one dimension, are fp32.
    """

    _is_4_bits = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        block_size: int = 128,
        bf16_stochastic_round: bool = False,
        seed: int = 0,
    ) -> None:
        numbers = (lr, betas, eps, weight_decay, amsgrad)
        moments = self._in_blocks(block_size, amsgrad)
        self._start(params, numbers, moments, bf16_stochastic_round, seed)


class AdamW4bit(_Base):
    """torchao's AdamW4bit: megaopt.FusedAdam with 4-bit moments in blocks, as Adam4bit has them."""

    _adam_w_mode = True
    _is_4_bits = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        block_size: int = 128,
        bf16_stochastic_round: bool = False,
        seed: int = 0,
    ) -> None:
        numbers = (lr, betas, eps, weight_decay, amsgrad)
        moments = self._in_blocks(block_size, amsgrad)
        self._start(params, numbers, moments, bf16_stochastic_round, seed)


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
        params: parameters or groups. Each becomes two groups where some parameters are smaller than
            minimal_size, the larger ones first.
        optimizer_class: torch.optim.AdamW, Adam or SGD, which FusedAdam and FusedSGD stand for; one
            of this module, or torchao's of the same name; megaopt's FusedAdam, FusedLion, FusedSGD.
        offload_gradients: only False; megaopt.release_gradients frees each gradient within the
            backward pass.
        minimal_size: parameters with fewer elements keep their states on the card; at least 0.
        **kwargs: other arguments of the optimizer.

    Raises:
        ValueError: an argument is not allowed; as the optimizer.
        TypeError: as the optimizer.
    """
    if offload_gradients is not False:
        refuse(
            "offload_gradients", "False (megaopt.release_gradients frees gradients within the "
            "backward pass)", offload_gradients,
        )  # fmt: skip
    if type(minimal_size) is not int or minimal_size < 0:
        refuse("minimal_size", "a whole number >= 0", minimal_size)
    kind, defaults = _offloaded(optimizer_class)
    entries: Any = entries_of("params", params)
    is_grouped = isinstance(entries, list) and any(isinstance(each, dict) for each in entries)
    groups = entries if is_grouped else [{"params": entries}]
    placed = [part for group in groups for part in _placed(group, minimal_size)]
    made: FusedOptimizer = kind(placed, **{**defaults, **kwargs})
    return made


def _offloaded(optimizer_class: Any) -> tuple[Any, dict[str, Any]]:
    """The optimizer that stands for a class, and the arguments in which it differs."""
    if isinstance(optimizer_class, type) and optimizer_class in OFFLOADED:
        return OFFLOADED[optimizer_class]
    name = str(getattr(optimizer_class, "__name__", ""))
    is_torchaos = str(getattr(optimizer_class, "__module__", "")).startswith("torchao.")
    own = globals()[name] if is_torchaos and name in __all__ else optimizer_class
    is_ours = isinstance(own, type) and issubclass(own, FusedOptimizer)
    if not is_ours or issubclass(own, megaopt.GaLoreAdamW):
        refuse(
            "optimizer_class", "torch.optim.AdamW, Adam or SGD, megaopt.FusedAdam, FusedLion or "
            "FusedSGD, or an optimizer of this module", optimizer_class,
        )  # fmt: skip
    return own, {}


def _placed(group: dict[str, Any], minimal_size: int) -> list[dict[str, Any]]:
    """A group's parameters whose states are in host memory, and those whose are on the card."""
    params: Any = entries_of("params", group["params"])
    if not isinstance(params, list):
        return [{**group, STATE_DEVICE: "cpu"}]
    tensors = [each[1] if isinstance(each, tuple) else each for each in params]
    if not all(isinstance(each, torch.Tensor) for each in tensors):
        return [group]  # torch says what is wrong
    parts: dict[Any, list[int]] = {"cpu": [], None: []}
    for place, tensor in enumerate(tensors):
        parts["cpu" if tensor.numel() >= minimal_size else None].append(place)
    whole = {**group, "params": params}
    found = [
        {**whole, **_chosen(whole, own), STATE_DEVICE: home} for home, own in parts.items() if own
    ]
    return found or [group]


def _chosen(group: dict[str, Any], places: list[int]) -> dict[str, Any]:
    """Picks, for some parameters of a group, what it says of each."""
    count = len(group["params"])
    given = {name: group.get(name) for name in ("params", "param_numbers", "param_names")}
    lists = {n: v for n, v in given.items() if isinstance(v, (list, tuple)) and len(v) == count}
    return {name: [value[place] for place in places] for name, value in lists.items()}
