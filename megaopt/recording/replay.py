"""A step that a recording kept, taken again here.

A recording is data of anybody's. It names the class of its optimizer, and never makes Python run
what came with it: a class is taken from what this process has imported already, from megaopt, or
from an installed distribution, and only where its file has a class of that name; from elsewhere
where the user names it.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import re
import site
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import torch

from megaopt.recording.checks import RecordingError
from megaopt.recording.files import Rank, encodable, path_of_kept
from megaopt.recording.samples import number

RENAMED = {"master": "master_param"}
"""The state's names of quantities, where recordings have others."""

Kept = dict[str, dict[str, torch.Tensor]]
"""Tensors of a step by parameter, then by quantity."""

NAME = re.compile(r"(?!\d)\w+(\.(?!\d)\w+)+")
"""A class's full name."""


def replay(
    recorded: Rank, step: int, backend: str | None = None, trusted: Sequence[str] = ()
) -> list[str]:
    """Takes a kept step again, and compares every bit that it wrote.

    Args:
        recorded: the recording of the rank whose tensors are meant.
        step: a step that was kept.
        backend: of megaopt's own optimizers, "reference" or "triton"; the default one by default.
        trusted: full names of classes that may be imported from where Python finds them, each for
            recorded classes of the same last name: their code runs.

    Returns:
        A line for each tensor that differs.

    Raises RecordingError where the step was not kept, what was kept is damaged, the optimizer is
    neither installed nor trusted, cannot be made again, or steps by a closure.
    """
    numbers = recorded.scalars.get(step, {})
    paths = {source: path_of_kept(recorded.folder, step, source) for source in (0, *numbers)}
    sources = [source for source in sorted(numbers) if paths[source].is_file()]
    if not sources:
        raise RecordingError(f"step must be one that was kept (--keep), got {step}: no {paths[0]}")
    if sources[-1] >= len(recorded.optimizers):
        where = f"manifest of {str(recorded.folder)!r}"
        raise RecordingError(f"{where} must have optimizer {sources[-1]}")
    classes = {source: recorded.optimizers[source]["class"] for source in sources}
    kinds = {source: _kind(path, recorded, backend, trusted) for source, path in classes.items()}

    from safetensors import SafetensorError
    from safetensors.torch import load_file

    lines: list[str] = []
    for source, kind in kinds.items():
        described = recorded.described(source, step) or [recorded.optimizers[source]]
        arguments = (described[0]["groups"], numbers[source], backend)
        # the step's tensors by parameter, then by quantity
        path, tensors = paths[source], Kept()
        try:
            content = load_file(path)
        except (SafetensorError, OSError, ValueError, TypeError, KeyError) as error:
            where = f"the file of kept tensors {str(path)!r}"
            words = f"must be whole, got one that cannot be read: {error}"
            raise RecordingError(f"{where} {words}") from error
        for key, tensor in content.items():
            name, _, quantity = key.rpartition("|")
            tensors.setdefault(name, {})[quantity] = tensor
        try:
            lines += _differences(kind, tensors, *arguments)
        except RecordingError:
            raise
        except Exception as error:  # whatever an optimizer makes of such options and tensors
            where = f"step {step} in {str(recorded.folder)!r}"
            words = f"one that {classes[source]} can take, got {type(error).__name__}: {error}"
            raise RecordingError(f"{where} must be {words}") from error
    return lines


def _differences(
    kind: type[torch.optim.Optimizer],
    step_tensors: Kept,
    described: Sequence[Sequence[str]],
    line: Mapping[str, Any],
    backend: str | None,
) -> Iterator[str]:
    """Steps one optimizer, and tells what it wrote otherwise.

    described: the names of each group's parameters.
    """
    encoded = [[encodable(name) for name in group] for group in described]
    names = [[n for n in group if "grad" in step_tensors.get(n, {})] for group in encoded]
    params: dict[str, torch.nn.Parameter] = {}
    for name in (name for group in names for name in group):
        if "old weight" not in step_tensors[name]:
            words = f"step must have been kept with the weights before it, got no {name}"
            raise RecordingError(words)
        params[name] = torch.nn.Parameter(step_tensors[name]["old weight"].clone())
        params[name].grad = step_tensors[name]["grad"].clone()
    lost = [name for name in step_tensors if "grad" in step_tensors[name] and name not in params]
    if lost:
        raise RecordingError(f"groups must have all parameters of the step, got no {lost[0]}")
    groups, counts = list[dict[str, Any]](), list[int | None]()
    for settings, group in zip(line["groups"], names, strict=False):  # later ones came since
        options = {n: number(value) for n, value in settings.items() if n != "single"}
        counts.append(options.pop("step"))
        groups.append({**options, "params": [params[name] for name in group]})
    has_masters = any("master" in tensors for tensors in step_tensors.values())
    optimizer = _made(kind, groups, has_masters, backend)
    _load(optimizer, step_tensors, [name for group in names for name in group], counts)
    optimizer.step()
    for name, param in params.items():
        state = optimizer.state[param]
        now = {**state, "weight": param.detach(), "master": state.get("master_param")}
        tensors = [key for key in step_tensors[name] if isinstance(now.get(key), torch.Tensor)]
        for quantity in tensors:
            # places of elements of other bits
            before, here = step_tensors[name][quantity].reshape(-1), now[quantity].reshape(-1)
            codes = (t.contiguous().view(torch.uint8).view(len(t), -1) for t in (before, here))
            unlike = torch.ne(*codes).any(1).nonzero().view(-1).tolist()
            if unlike:
                values = f"{before[unlike[0]].item()!r}, and {here[unlike[0]].item()!r} here"
                yield f"{quantity} of {name}: {len(unlike)} differ; element {unlike[0]}: {values}"


def _kind(
    path: str, recorded: Rank, backend: str | None, trusted: Sequence[str]
) -> type[torch.optim.Optimizer]:
    """Returns the recorded class.

    Raises RecordingError where the class is not here, where its step wants a closure, and where it
    is not megaopt's but a backend is named.
    """
    if backend is not None and not path.startswith("megaopt."):
        raise RecordingError(f"backend must be torch for {path}, got {backend!r}")
    named = next((e for e in trusted if e.rpartition(".")[2] == path.rpartition(".")[2]), None)
    if named is None and not _is_ours_to_import(path, recorded.folder):
        raise RecordingError(
            "optimizer must be a class of an installed package, or one that --optimizer names, as"
            f" its code runs, got {path!r}"
        )
    module, _, name = (named or path).rpartition(".")
    try:
        kind = inspect.getattr_static(importlib.import_module(module), name)
    except Exception as error:  # whatever a package's own code makes of this machine
        raise RecordingError(f"optimizer must be one that can be made here: {error}") from error
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise RecordingError(f"optimizer must be a torch.optim.Optimizer, got {path!r}")
    closure = inspect.signature(kind.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise RecordingError(
            f"optimizer must be one that steps without a closure, got {path}: its step calls the"
            " script's closure, which a recording does not have"
        )
    return kind


def _is_ours_to_import(path: str, folder: Path) -> bool:
    """Whether a class can be imported without running what may have come with a recording.

    path: the class's full name, which the recording says.
    folder: the recording's folder.
    """
    module, _, name = path.rpartition(".")
    if not NAME.fullmatch(path) or module == "__main__":
        return False
    if module in sys.modules:
        return True
    file = _file_of(module)
    if file is None or file.resolve().is_relative_to(folder.resolve().parent):
        return False
    return re.search(rf"^class {name}\b", file.read_text("utf-8", "replace"), re.M) is not None


def _file_of(module: str) -> Path | None:
    """The file of a module of megaopt's or of an installed distribution's; nothing is imported.

    Returns None where there is none, or where an import would find another package of its name
    first.
    """
    first, *rest = module.split(".")
    if first == "megaopt":
        # files of megaopt's optimizers lie in these two folders
        is_outside = rest[0] == "integration"
        spec = importlib.util.find_spec("megaopt.integration" if is_outside else "megaopt")
        folders = map(Path, (spec and spec.submodule_search_locations) or ())
        files = (file for folder in folders for file in _files(folder, rest[is_outside:]))
        return next(files, None)
    try:
        spec = importlib.util.find_spec(first)
    except ValueError:  # of a module that something else than an import has made
        return None
    origin = "" if spec is None else str(spec.origin)
    installed = _installed_folders()
    for folder in (Path(path) for path in sys.path if os.path.realpath(path) in installed):
        if Path(origin).is_relative_to(folder):
            # a distribution in the folder must say that it has brought the file
            brought = distributions(path=[str(folder)])
            records = [distribution.read_text("RECORD") or "" for distribution in brought]
            for file in _files(folder, [first, *rest]):
                line = f"{file.relative_to(folder).as_posix()},"
                if any(record.startswith(line) or f"\n{line}" in record for record in records):
                    return file
            return None
    return None


def _installed_folders() -> set[str]:
    """The real paths of Python's own folders of installed packages, and of those they add.

    A folder that PYTHONPATH names is none, whatever its name is, unless it is Python's own.
    """
    names = ("purelib", "platlib")
    folders = [*site.getsitepackages(), *map(sysconfig.get_path, names)]
    if site.ENABLE_USER_SITE:
        folders.append(site.getusersitepackages())
    lines = (
        os.path.join(folder, line.rstrip())
        for folder in folders
        for file in Path(folder).glob("*.pth")
        for line in file.read_text("utf-8", "replace").splitlines()
        if line.strip() and not line.startswith(("#", "import ", "import\t"))
    )
    named = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    added = set(map(os.path.realpath, lines)) - set(map(os.path.realpath, named))
    return {*map(os.path.realpath, folders), *added}


def _files(folder: Path, names: Sequence[str]) -> Iterator[Path]:
    """The file or files that a module's names stand for."""
    place = folder.joinpath(*names)
    both = place.with_suffix(".py"), place / "__init__.py"
    yield from (file for file in both if file.is_file())


def _made(
    kind: type[torch.optim.Optimizer],
    groups: list[dict[str, Any]],
    has_masters: bool,
    backend: str | None,
) -> torch.optim.Optimizer:
    """An optimizer of the recorded class, with the options that each group had."""
    options: dict[str, Any] = {}
    # what megaopt's constructors take and groups have not as options: formats, marks
    if kind.__module__.startswith("megaopt."):
        formats = dict(part.split("=") for part in groups[0]["state_formats"].split(", "))
        formats.pop("blocks", None)
        master = formats.pop("master")
        options = {f"{moment}_dtype": _dtype(form) for moment, form in formats.items()}
        if has_masters:
            options |= {"master_weights": True, "master_weight_dtype": _dtype(master)}
        marks = ("contract", "adam_w_mode", "seed")
        options |= {name: groups[0][name] for name in marks if name in groups[0]}
    if backend is not None:
        options["backend"] = backend
    try:
        return kind(groups, **options)
    except (TypeError, ValueError) as error:
        raise RecordingError(f"optimizer must be one that can be made here: {error}") from error


def _dtype(name: str) -> Any:
    """Returns torch's dtype of a name, or the name of a format that torch does not have."""
    dtype = getattr(torch, name, None)
    return dtype if isinstance(dtype, torch.dtype) else name


def _load(
    optimizer: torch.optim.Optimizer,
    step_tensors: Kept,
    names: Sequence[str],
    counts: Sequence[int | None],
) -> None:
    """Gives an optimizer the state from before the step; a parameter's first step finds none.

    counts: the number of the step, of each group; None where the optimizer does not count.
    """
    content = optimizer.state_dict()
    content["state"] = {}
    for i, name in enumerate(names):
        old = {q[4:]: t for q, t in step_tensors[name].items() if q.startswith("old ")}
        state = {RENAMED.get(q, q): tensor for q, tensor in old.items() if q != "weight"}
        content["state"] |= {i: state} if state else {}
    if not content["state"]:
        return
    for group, count in zip(content["param_groups"], counts, strict=False):
        if "step" in group:
            group["step"] = (count or 1) - 1
        elif count is not None:
            for i in content["state"].keys() & group["params"]:
                content["state"][i]["step"] = torch.tensor(count - 1.0)
    optimizer.load_state_dict(content)
