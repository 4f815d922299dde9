"""The recorder: learns what each step did through hooks, and writes it to a folder."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch

from megaopt.options.checks import one_of, refuse
from megaopt.recording.environment import describe
from megaopt.recording.files import Writer, hexadecimal
from megaopt.recording.inputs import batch_digest, in_digits, random_states
from megaopt.recording.places import Parameters
from megaopt.recording.quantities import Source, count_of
from megaopt.recording.table import Rows, Sampled, fetched, rows_of, sample_rows, samples_of
from megaopt.recording.watched import BACKWARD, CLIP

LEVELS = ("loss", "step", "blocks", "modules")
SAMPLED_FIRST = 100
"""So many first steps are sampled each."""


Number = torch.Tensor | float
"""A float, or a tensor of one on the host, which is there when the device gets to it."""


@dataclass
class Heard:
    """What is known of the step that comes, of all optimizers together."""

    losses: list[Number] = field(default_factory=list)
    grad_norm: Number | None = None
    options: list[dict[str, Any]] = field(default_factory=list)
    """Of each group."""
    random: dict[str, str] = field(default_factory=dict)
    batches: list[torch.Tensor] = field(default_factory=list)
    rows: list[Rows] = field(default_factory=list)
    samples: list[Sampled] = field(default_factory=list)

    def write(self, writer: Writer, step: int, source: int) -> None:
        """Writes it as a step of an optimizer; when the device is done."""
        rows = [rows.array() for rows in self.rows]
        joined = numpy.concatenate(rows) if rows else None
        writer.step(step, source, self.scalars(), joined, sample_rows(self.samples))

    def scalars(self) -> dict[str, Any]:
        """The numbers, as files have them."""
        norm = self.grad_norm
        return {
            "losses": [hexadecimal(float(loss)) for loss in self.losses],
            "grad_norm": None if norm is None else hexadecimal(float(norm)),
            "groups": [{n: option(v) for n, v in group.items()} for group in self.options],
            "loss_scale": None,
            "skipped": None,
            "rng": self.random,
            "batch": [in_digits(batch) for batch in self.batches],
        }


class Recorder:
    """Records the steps of optimizers, whatever their class, to a folder.

    `megaopt diff` compares two such folders, and `megaopt audit` holds one to the optimizer's law.
    The run's bits stay what they are. Hooks of torch tell of forwards, backwards and steps; they
    are gone after `close`, which the end of a with block calls.

    Args:
        model: the module that is trained, or a list of them.
        optimizer: any torch.optim.Optimizer, or a list of them.
        out: a folder, made by the first rank that comes; each rank writes to one of its own there.
        every: record step 1 and each step that this divides.
        level: "loss": losses, options, random states and batches; "step": also digests of
            gradients, weights, masters and moments, and 64 sampled elements of each; "blocks": also
            outputs of blocks and their gradients; "modules": of all modules without children.
        samples: steps from the 101st on are sampled where this divides them; those before all.
        names: canonical names of parameters, by the names they have here.

    Raises ValueError for an argument out of range, and FileExistsError where a rank has a recording
    in the folder. An error in writing is raised by the step it belongs to or a later one, or by
    `close`.
    """

    def __init__(
        self,
        model: torch.nn.Module | Sequence[torch.nn.Module],
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        out: str | os.PathLike[str],
        *,
        every: int = 1,
        level: str = "step",
        samples: int = 10,
        names: Mapping[str, str] | None = None,
    ) -> None:
        one_of("level", level, LEVELS)
        self._every, self._samples = whole_number("every", every), whole_number("samples", samples)
        self._level = LEVELS.index(level)
        self._models = [model] if isinstance(model, torch.nn.Module) else list(model)
        optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else optimizer
        self._parameters = Parameters(self._models, names or {})
        self._sources = [Source(o, i, self._parameters) for i, o in enumerate(optimizers)]
        run = {**process(), "level": level, "every": every, "environment": describe()}
        self.folder = Path(out)
        self._writer = Writer(self.folder, run["rank"], run)
        self._heard = Heard()
        self._described = False
        self._undo: list[Callable[[], None]] = []
        self._listen()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def loss(self, loss: torch.Tensor | float) -> None:
        """Notes a loss of the next step, where no backward is called on it."""
        self._heard.losses.append(number_of(loss))

    def batch(self, batch: Any) -> None:
        """Notes what the next step trains on, where it is no argument of the model: tensors."""
        self._begin()
        self._heard.batches.append(fetched(batch_digest(batch)))

    def close(self) -> None:
        """Takes all hooks away and closes the files."""
        while self._undo:
            self._undo.pop()()
        self._writer.close()

    # --- what hooks call

    def _listen(self) -> None:
        for source in self._sources:
            register = source.optimizer.register_step_pre_hook
            self._undo.append(register(lambda _, *args, own=source: self._before(own)).remove)
            after = source.optimizer.register_step_post_hook
            self._undo.append(after(lambda _, *args, own=source: self._after(own)).remove)
        for model in self._models:
            hook = model.register_forward_pre_hook(self._forward, with_kwargs=True)
            self._undo.append(hook.remove)
        self._undo.append(BACKWARD.listen(self._backward))
        self._undo.append(CLIP.listen(self._clipped))

    def _forward(self, _: torch.nn.Module, args: Any, kwargs: Any) -> None:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self.batch((args, kwargs))

    def _backward(self, args: tuple[Any, ...], kwargs: dict[str, Any], _: Any) -> None:
        tensors = args[0] if args else kwargs["tensors"]
        for tensor in [tensors] if isinstance(tensors, torch.Tensor) else tensors:
            if tensor.numel() == 1:
                self.loss(tensor)

    def _clipped(self, _: Any, __: Any, norm: torch.Tensor) -> None:
        self._heard.grad_norm = number_of(norm)

    def _begin(self) -> None:
        """Notes the random states once a step, before its first forward."""
        if not self._heard.random:
            devices = {p.device for source in self._sources for p, _ in source.params()}
            self._heard.random = random_states(devices)

    def _before(self, source: Source) -> None:
        source.step += 1
        self._begin()
        self._describe()
        heard = self._heard
        heard.options = [options_of(group) for group in source.groups]
        if not self._is_recorded(source.step) or not self._level:
            return
        old = [held._replace(quantity=f"old {held.quantity}") for held in source.weights()]
        gradients = source.gradients()
        written = source.step == 1 or not self._is_recorded(source.step - 1)
        heard.rows += rows_of([*gradients, *(old if written else ())], self._writer.number)
        if self._is_sampled(source.step):
            heard.samples += samples_of([*gradients, *old], self._writer.number)

    def _after(self, source: Source) -> None:
        heard, self._heard = self._heard, Heard()
        if not self._is_recorded(source.step):
            return
        for group, options in zip(source.groups, heard.options, strict=True):
            options["step"] = count_of(source.optimizer, group)
        if self._level:
            found = source.weights()
            heard.rows += rows_of(found, self._writer.number)
            if self._is_sampled(source.step):
                heard.samples += samples_of(found, self._writer.number)
        heard.write(self._writer, source.step, source.number)

    def _is_recorded(self, step: int) -> bool:
        return step == 1 or step % self._every == 0

    def _is_sampled(self, step: int) -> bool:
        return step <= SAMPLED_FIRST or step % self._samples == 0

    def _describe(self) -> None:
        if self._described:
            return
        for source in self._sources:
            own = type(source.optimizer)
            names = source.names()
            defaults = {n: option(v) for n, v in source.optimizer.defaults.items()}
            self._writer.optimizer(
                {
                    "class": f"{own.__module__}.{own.__qualname__}",
                    "options": defaults,
                    "groups": names,
                    "order": [name for group in names for name in group],
                }
            )
        self._described = True


def whole_number(name: str, value: object) -> int:
    """The value; ValueError unless it is a whole number from 1 on."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        refuse(name, "a whole number >= 1", value)
    return value


def number_of(value: torch.Tensor | float) -> Number:
    """A number as it is now, on the host sooner or later."""
    return fetched(value) if isinstance(value, torch.Tensor) else value


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group's options as they are now."""
    left_out = ("params", "step", "param_names")
    found = ((name, value) for name, value in group.items() if name not in left_out)
    return {n: fetched(v) if isinstance(v, torch.Tensor) else v for n, v in found}


def option(value: Any) -> Any:
    """An option as JSON has it; of what is no number, text or list of them its text."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, float):
        return hexadecimal(value)
    if isinstance(value, (list, tuple)):
        return [option(each) for each in value]
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)


def process() -> dict[str, Any]:
    """The process's rank, the number of ranks, and its command."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    else:
        rank, world = (int(os.environ.get(name, d)) for name, d in (("RANK", 0), ("WORLD_SIZE", 1)))
    return {"rank": rank, "world": world, "argv": sys.argv}
