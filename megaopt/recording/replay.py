"""A step that a recording kept, taken again here."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megaopt.recording.files import Rank, RecordingError, path_of_kept

RENAMED = {"master": "master_param"}
"""The state's names of quantities, where recordings have others."""

Kept = dict[str, dict[str, torch.Tensor]]
"""Tensors of a step by parameter, then by quantity."""


def replay(recorded: Rank, step: int, backend: str | None = None) -> list[str]:
    """Takes a kept step again, and compares every bit that it wrote.

    Args:
        recorded: of the rank whose tensors are meant.
        step: a step that was kept.
        backend: of megaopt's own optimizers, "reference" or "triton"; the default one by default.

    Returns:
        A line for each tensor that differs.

    Raises RecordingError where the step was not kept, or the optimizer cannot be made again, or
    steps by a closure.
    """
    numbers = recorded.scalars.get(step, {})
    paths = {source: path_of_kept(recorded.folder, step, source) for source in (0, *numbers)}
    kept = [source for source in sorted(numbers) if paths[source].is_file()]
    if not kept:
        raise RecordingError(f"step must be one that was kept (--keep), got {step}: no {paths[0]}")
    kinds = {source: _kind(recorded.optimizers[source]["class"], backend) for source in kept}
    found: list[str] = []
    for source, kind in kinds.items():
        described = recorded.described(source, step) or [recorded.optimizers[source]]
        own = (described[0]["groups"], numbers[source], backend)
        found += _differences(kind, _read(paths[source]), *own)
    return found


def _read(path: Path) -> Kept:
    from safetensors.torch import load_file

    kept: Kept = {}
    for key, tensor in load_file(path).items():
        name, _, quantity = key.rpartition("|")
        kept.setdefault(name, {})[quantity] = tensor
    return kept


def _differences(
    kind: type[torch.optim.Optimizer],
    kept: Kept,
    described: Sequence[Sequence[str]],
    line: Mapping[str, Any],
    backend: str | None,
) -> Iterator[str]:
    """Steps one optimizer, and tells what it wrote otherwise.

    described: the names of each group's parameters.
    """
    names = [[n for n in group if "grad" in kept.get(n, {})] for group in described]
    params = {name: _param(name, kept[name]) for group in names for name in group}
    lost = [name for name in kept if "grad" in kept[name] and name not in params]
    if lost:
        raise RecordingError(f"groups must have all parameters of the step, got no {lost[0]}")
    told = [[pair for pair in group.items() if pair[0] != "single"] for group in line["groups"]]
    options = [{name: _option(value) for name, value in group} for group in told]
    counts = [own.pop("step") for own in options]
    groups = [
        {**own, "params": [params[name] for name in group]}
        for own, group in zip(options, names, strict=False)  # later groups have come since
    ]
    has_masters = any("master" in tensors for tensors in kept.values())
    optimizer = _made(kind, groups, has_masters, backend)
    _load(optimizer, kept, [name for group in names for name in group], counts)
    optimizer.step()
    for name, param in params.items():
        state = optimizer.state[param]
        now = {**state, "weight": param.detach(), "master": state.get("master_param")}
        for quantity in (each for each in kept[name] if isinstance(now.get(each), torch.Tensor)):
            before, here = kept[name][quantity].reshape(-1), now[quantity].reshape(-1)
            unlike = _unequal(before, here)
            if unlike:
                values = f"{before[unlike[0]].item()!r}, and {here[unlike[0]].item()!r} here"
                yield f"{quantity} of {name}: {len(unlike)} differ; element {unlike[0]}: {values}"


def _unequal(a: torch.Tensor, b: torch.Tensor) -> list[int]:
    """The places of elements of other bits."""
    codes = (each.contiguous().view(torch.uint8).view(len(each), -1) for each in (a, b))
    places: list[int] = torch.ne(*codes).any(1).nonzero().view(-1).tolist()
    return places


def _param(name: str, tensors: Mapping[str, torch.Tensor]) -> torch.nn.Parameter:
    if "old weight" not in tensors:
        raise RecordingError(f"step must have been kept with the weights before it, got no {name}")
    weight = tensors["old weight"].clone()
    param = torch.nn.Parameter(weight)
    param.grad = tensors["grad"].clone()
    return param


def _option(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_option(each) for each in value)
    return float.fromhex(value) if isinstance(value, str) and "0x" in value else value


def _kind(path: str, backend: str | None) -> type[torch.optim.Optimizer]:
    """The recorded class; RecordingError where it is not here, or its step wants a closure.

    Also where it is not ours, and a backend is asked for.
    """
    module, _, name = path.rpartition(".")
    if backend is not None and not module.startswith("megaopt."):
        raise RecordingError(f"backend must be torch for {path}, got {backend!r}")
    try:
        kind: type[torch.optim.Optimizer] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise RecordingError(f"optimizer must be one that can be made here: {error}") from error
    closure = inspect.signature(kind.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise RecordingError(
            f"optimizer must be one that steps without a closure, got {path}: its step calls the"
            " script's closure, which a recording does not have"
        )
    return kind


def _made(
    kind: type[torch.optim.Optimizer],
    groups: list[dict[str, Any]],
    has_masters: bool,
    backend: str | None,
) -> torch.optim.Optimizer:
    """An optimizer of the recorded class, with the options that each group had."""
    is_own = kind.__module__.startswith("megaopt.")
    options: dict[str, Any] = _own_options(groups[0], has_masters) if is_own else {}
    if backend is not None:
        options["backend"] = backend
    try:
        return kind(groups, **options)
    except (TypeError, ValueError) as error:
        raise RecordingError(f"optimizer must be one that can be made here: {error}") from error


def _own_options(group: Mapping[str, Any], has_masters: bool) -> dict[str, Any]:
    """What megaopt's constructors are told and groups do not say as options: formats, marks."""
    formats = dict(each.split("=") for each in group["state_formats"].split(", "))
    formats.pop("blocks", None)
    master = formats.pop("master")
    dtypes = {f"{moment}_dtype": getattr(torch, each, each) for moment, each in formats.items()}
    if has_masters:
        dtypes |= {"master_weights": True, "master_weight_dtype": getattr(torch, master, master)}
    marks = ("contract", "adam_w_mode", "seed")
    return dtypes | {name: group[name] for name in marks if name in group}


def _load(
    optimizer: torch.optim.Optimizer,
    kept: Kept,
    names: Sequence[str],
    counts: Sequence[int | None],
) -> None:
    """Gives an optimizer the state from before the step; a parameter's first step finds none.

    counts: the number of the step, of each group; None where the optimizer does not count.
    """
    content = optimizer.state_dict()
    states = ({RENAMED.get(q, q): t for q, t in _old(kept[name]).items()} for name in names)
    content["state"] = {i: state for i, state in enumerate(states) if state}
    if not content["state"]:
        return
    for group, count in zip(content["param_groups"], counts, strict=False):
        if "step" in group:
            group["step"] = (count or 1) - 1
        elif count is not None:
            for i in content["state"].keys() & group["params"]:
                content["state"][i]["step"] = torch.tensor(count - 1.0)
    optimizer.load_state_dict(content)


def _old(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The state of one parameter before the step."""
    old = {q.removeprefix("old "): each for q, each in tensors.items() if q.startswith("old ")}
    return {quantity: each for quantity, each in old.items() if quantity != "weight"}
