"""The recorder: learns what each step did through hooks, and writes it to a folder."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import itertools
import math
import multiprocessing.util
import os
import sys
import warnings
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megaopt.kernels.chunks.table import is_capturing
from megaopt.kernels.refusals import one_of, refuse
from megaopt.kernels.shards import local_of
from megaopt.kernels.untraced import untraced
from megaopt.recording import megatron
from megaopt.recording.environment import describe
from megaopt.recording.files import Writer
from megaopt.recording.inputs import (
    BACKWARD,
    CAPTURE_BEGIN,
    CAPTURE_END,
    CLIP,
    PIPELINE,
    REPLAY,
    SCALER,
    Watched,
    batch_digest,
    leaves,
    random_states,
)
from megaopt.recording.places import Known, Parameters
from megaopt.recording.sink import NORMS, SCALES, Sink, Step, option
from megaopt.recording.sources import RecordedOptimizer, Those, count_of
from megaopt.recording.table import Held, Listed, UnpreparedError, fetched, held

LISTS_OF_BLOCKS = (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.Sequential)
LEVELS = ("loss", "step", "blocks", "modules")
LOSS, STEP, BLOCKS, MODULES = range(len(LEVELS))
SAMPLED_FIRST = 100
"""The number of first steps each of which is sampled."""
NUMBERS = (*NORMS, *SCALES, "skipped")
"""The numbers that a step has one of each."""
HOOKED = torch.optim.Optimizer.profile_hook_step(print).__code__
"""The code that torch wraps around each class's step, and calls hooks in."""


class Recorder:
    """Records the steps of optimizers, whatever their class, to a folder.

    `megaopt diff` compares two such folders, and `megaopt audit` holds one to the optimizer's law.
    The run's bits stay what they are. Hooks of torch tell of forwards, backwards and steps; they
    are gone after `close`, which the end of a with block calls, and the process's end. Forwards
    without gradients are left out. docs/recording.md has what is recorded, and each byte.

    Args:
        model: the module that is trained, or a list of them.
        optimizer: any torch.optim.Optimizer, or a list of them; Megatron's stands for its inner
            ones.
        out: a folder, made by the first rank that comes; each rank writes to one of its own there.
        every: record step 1 and each step that this divides.
        level: "loss": losses, options, random states and batches; "step": also digests of
            gradients, weights, masters and moments, and 64 sampled elements of each; "blocks": also
            outputs of blocks, their gradients, and each rank's gradients before they are reduced;
            "modules": outputs of all modules without children too.
        keep: steps of which whole tensors are written, numbers and ranges: (100, range(200, 210)).
        samples: steps from the 101st on are sampled where this divides them; those before all.
        names: canonical names of parameters and modules, by the names they would have.
        vocabulary: rows of Megatron's embedding that are not padding; None: all.

    Raises ValueError for an argument out of range, and for RANK or WORLD_SIZE in the environment
    that is no number, and FileExistsError where a rank has a recording in the folder. What cannot
    be written, as on a full disk, ends the recording with a RuntimeWarning, never the training.
    """

    def __init__(
        self,
        model: torch.nn.Module | Sequence[torch.nn.Module],
        optimizer: Any,
        out: str | os.PathLike[str],
        *,
        every: int = 1,
        level: str = "step",
        keep: Iterable[int | range] = (),
        samples: int = 10,
        names: Mapping[str, str] | None = None,
        vocabulary: int | None = None,
    ) -> None:
        # what to record, checked before anything is registered or written
        one_of("level", level, LEVELS)
        self._every, self._samples = whole_number("every", every), whole_number("samples", samples)
        # levels by number: each records what those below it record
        self._level, self._keep = LEVELS.index(level), set[int]()
        # numbers of steps, and ranges of them
        entries: Any = keep
        if isinstance(entries, str) or not isinstance(entries, Iterable):
            refuse("keep", "numbers of steps and ranges, as (100, range(200, 210))", keep)
        for entry in entries:
            steps = entry if isinstance(entry, range) else (entry,)
            self._keep |= {whole_number("keep", step) for step in steps}
        if self._keep and importlib.util.find_spec("safetensors") is None:
            refuse("keep", "empty where safetensors is not installed", keep)
        self._run = {"level": level, "every": every}

        # a fork inherits the recorder; only this process writes
        self.folder, self._pid = Path(out), os.getpid()
        if vocabulary is not None:
            whole_number("vocabulary", vocabulary)

        # what is known of models and optimizers
        name_map: Any = {} if names is None else names
        is_map = isinstance(name_map, Mapping)
        if not is_map or not all(isinstance(n, str) for pair in name_map.items() for n in pair):
            refuse("names", "a dict of texts, as {'their.name': 'name'}", names)
        self._parameters = Parameters(name_map, vocabulary)
        self._meshes: set[str] = set()
        """The meshes of models' and optimizers' parameters; models come before optimizers step."""
        self._sources: list[RecordedOptimizer] = []
        self._devices: set[torch.device] = set()
        self._order: dict[str, None] = {}
        """Names of parameters as the first forward met them."""

        # the step that comes, filled by hooks until the optimizer's step takes it
        self._coming, self._wanted = Step(), True
        self._graph: Any = None
        """The CUDA graph that is being captured; `_coming` is within it."""
        self._outside = Step()
        """The coming step as it was before the capture."""
        self._graphs: MutableMapping[Any, list[Captured]] = weakref.WeakKeyDictionary()

        # the rank's files; made with the first optimizer, or the first step
        self._files: tuple[Writer, Sink] | None = None
        self._is_closed = False

        self._own_rows: dict[tuple[str, str], tuple[Held, Listed]] = {}
        """The last tensor's description by name and quantity: its shape may change each time."""
        self._mark = object()
        """The mark of the functions that made the models' outputs."""
        self._hears_all = True
        """Whether no model was given: then every backward is one of the run."""

        # what close() takes back
        self._undo: list[Callable[[], None]] = []
        self._hooks: dict[torch.nn.Module, list[Any]] = {}
        """The hooks that are registered for each model."""
        # of any process: one that multiprocessing has started knows no atexit
        self._at_exit = multiprocessing.util.Finalize(None, self.close, exitpriority=0)
        # a half-made recorder leaves no hooks behind
        try:
            self._start(model, optimizer)
        except BaseException:
            self.close()
            raise

    def _start(self, model: Any, optimizer: Any) -> None:
        models = [model] if isinstance(model, torch.nn.Module) else model
        is_list = isinstance(models, Sequence)
        if not is_list or not all(isinstance(module, torch.nn.Module) for module in models):
            refuse("model", "a torch.nn.Module or a list of them", model)
        self._hears_all = not models
        for module in models:
            self.add_model(module)
        for inner in inner_optimizers(optimizer):
            self.add_optimizer(inner)
        # with an optimizer the folder is made now; without, at the first step
        if self._sources:
            self._open()  # to refuse a folder at once

        # functions of torch and Megatron that are watched, and what hears of their calls
        passes = (BACKWARD, self._backward), (PIPELINE, self._backward)
        numbers = (CLIP, self._clip), (SCALER, self._scale)
        captures = (CAPTURE_BEGIN, self._begin_capture), (CAPTURE_END, self._end_capture)
        pairs: tuple[tuple[Watched, Any], ...]
        pairs = (*passes, *numbers, *captures, (REPLAY, self._replay))
        for watched, listener in pairs:
            watched.listen(listener)
            self._undo.append(functools.partial(watched.forget, listener))

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add_model(self, model: torch.nn.Module) -> None:
        """Records a further model's forwards and backwards from now on, and knows its names.

        It stands for models that were added before and are modules of it.
        """
        self._parameters.add(model)
        self._meshes |= meshes(model.parameters())
        for watched in (PIPELINE, CLIP):
            watched.look()  # Megatron may have been imported since
        # optimizers name their parameters anew, by the model's names
        for source in self._sources:
            source.forget()
        # hooks of the outermost module, then of blocks and modules as the level asks
        hooks: list[Any] = [
            model.register_forward_pre_hook(Hook(self._before_forward), with_kwargs=True),
            model.register_forward_hook(Hook(self._after_forward)),
        ]
        # the order in which the first forward pass meets parameters
        named = dict(model.named_modules())
        for module in named.values() if self._level >= STEP else ():
            params = (param for _, param in module.named_parameters(recurse=False))
            names = [self._parameters.names[param] for param in params]
            if names:
                hooks.append(module.register_forward_pre_hook(Hook(self._meet, names)))

        # outputs of blocks, the members of lists, dicts and sequences that hold parameters; at
        # level "modules" also of all modules without children
        seen = dict[str, torch.nn.Module]()
        if self._level >= BLOCKS:
            lists = (m for m in named.values() if isinstance(m, LISTS_OF_BLOCKS))
            members = (child for module in lists for child in module.children())
            blocks = {child for child in members if next(child.parameters(), None) is not None}
            for path, module in named.items():
                is_leaf = self._level >= MODULES and not any(module.children())
                if is_leaf or module in blocks:
                    seen[path] = module
        for path, name in self._parameters.modules(model, list(seen)).items():
            hooks.append(LastHook(seen[path], Hook(self._after_module, name)))

        # each rank's own gradient, before DDP or FSDP reduce it over ranks
        own_params: list[Any] = list(model.parameters())  # whose register_hook has no types
        for param in own_params if self._level >= BLOCKS and process()["world"] > 1 else ():
            if param.requires_grad:
                name = self._parameters.names[param]
                hook = functools.partial(self._add_own, name, "local grad")
                hooks.append(param.register_hook(hook))

        # models within it lose their own hooks, which would hear everything twice
        for inner in model.modules():
            for hook in self._hooks.pop(inner, ()):
                hook.remove()
        self._hooks[model] = hooks

    def add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Records a further optimizer's steps from now on."""
        source = RecordedOptimizer(optimizer, len(self._sources), self._parameters)
        self._sources.append(source)
        self._meshes |= meshes(source.params())
        self._devices.add(source.device)
        before = untraced(functools.partial(self._hear, self._before, source))
        after = untraced(functools.partial(self._hear, self._after, source))
        hooks = optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)
        self._undo += [hook.remove for hook in hooks]

    def loss(self, loss: torch.Tensor | float) -> None:
        """Notes a loss of the next step, where no backward is called on it."""
        self._coming.losses.append(number_of(loss))

    def batch(self, batch: Any) -> None:
        """Notes what the next step trains on, where it is no argument of the model: tensors."""
        if not self._coming.random:  # once a step, before its first forward
            self._coming.random = random_states(self._devices)
        self._coming.batches.append(fetched(batch_digest(batch)))

    def close(self) -> None:
        """Takes all hooks away, writes what is open, and closes the files."""
        self._at_exit.cancel()
        # hooks first: from here on no step comes in
        while self._undo:
            self._undo.pop()()
        for hooks in self._hooks.values():
            for hook in hooks:
                hook.remove()
        self._hooks.clear()
        # steps that wait for the model's weights get them as they are now
        if self._files is not None and os.getpid() == self._pid:
            for source in self._sources:
                self._finish(source)
                source.close()
            self._files[1].close()
        self._files, self._is_closed = None, True

    # --- forwards and backwards

    def _listens(self) -> bool:
        """Whether what happens now belongs to a step that is recorded."""
        is_traced = torch.compiler.is_compiling()  # a hook would become a part of the program
        return not is_traced and self._wanted and torch.is_grad_enabled() and self._is_here()

    def _is_here(self, in_graph: bool = False) -> bool:
        """Whether the process is the recorder's, and nothing is captured; hooks outlive it.

        in_graph: what a graph that the recorder knows captures is heard, too.
        """
        if self._is_closed or os.getpid() != self._pid:
            return False
        return (in_graph and self._graph is not None) or not any(map(is_capturing, self._devices))

    def _before_forward(self, _: torch.nn.Module, args: Any, kwargs: Any) -> None:
        if self._listens():
            self.batch((args, kwargs))

    def _after_forward(self, _: torch.nn.Module, __: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        for source in self._sources:  # Megatron has gathered its weights now
            self._finish(source)
        # the functions that made the outputs: a backward that reaches one is this run's
        functions: Iterator[Any] = (tensor.grad_fn for tensor in leaves(output))
        for function in functions:
            if function is not None:
                function.metadata[self._mark] = True

    def _meet(self, names: Sequence[str], *_: Any) -> None:
        is_first = not any(source.count.step for source in self._sources)
        if is_first and not torch.compiler.is_compiling():
            self._order.update(dict.fromkeys(names))

    def _after_module(self, name: str, _: torch.nn.Module, __: Any, output: Any) -> None:
        if not self._listens():
            return
        tensors: Iterator[Any] = leaves(output)
        for tensor in tensors:
            self._add_own(name, "forward", tensor)
            # the gradient of the output comes with the backward pass, by the tensor's hook
            if tensor.requires_grad:
                tensor.register_hook(functools.partial(self._add_own, name, "backward"))

    def _add_own(self, name: str, quantity: str, tensor: torch.Tensor) -> None:
        """Adds the digest of what this rank alone has."""
        if not self._wanted or not self._is_here():
            return
        # digests on the device: nothing waits for them here
        local = local_of(tensor.detach())
        entry = held(Known(name, tuple(local.shape), None), quantity, local)
        # the description is kept while shape and dtype stay
        before, listed = self._own_rows.get((name, quantity), (None, None))
        if listed is None or entry != before:
            listed = Listed([entry])
            self._own_rows[name, quantity] = entry, listed
        with torch.no_grad():
            self._coming.rows += listed.rows([local], self._number)

    # --- what torch's functions are called with

    def _backward(self, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        arguments = [*args, *named.values()]
        if any(argument is not None for argument in arguments[1:2]):
            return  # with a gradient, as Megatron has them: an output of another rank's input
        tensors, is_wanted = arguments[0], self._wanted or self._graph is not None
        # a loss has one element, and comes from the models; without models every one counts
        for tensor in [tensors] if isinstance(tensors, torch.Tensor) else tensors:
            if tensor.numel() != 1 or not is_wanted or not self._is_here(in_graph=True):
                continue
            # whether the backward gets to an output or a parameter of the models: over the autograd
            # graph, breadth first, from the loss on
            is_heard, seen = self._hears_all, set[Any]([None])
            waiting: deque[Any] = deque([tensor.grad_fn])
            while waiting and not is_heard:
                function = waiting.popleft()
                if function not in seen:
                    # a variable is set where a leaf's gradient is accumulated
                    variable = getattr(function, "variable", None)
                    is_heard = self._mark in function.metadata or self._parameters.has(variable)
                    seen.add(function)
                    waiting += [successor for successor, _ in function.next_functions]
            if is_heard:
                self.loss(tensor)

    def _clip(self, args: tuple[Any, ...], named: dict[str, Any]) -> Callable[[Any], None] | None:
        parameters = args[0] if args else named.get("parameters", ())
        tensors = [parameters] if isinstance(parameters, torch.Tensor) else parameters
        # another model's parameters; Megatron gives gradients, which may be of this one
        params = [tensor for tensor in tensors if isinstance(tensor, torch.nn.Parameter)]
        run_params = {param for source in self._sources for param in source.params()}
        is_heard = any(p in run_params or self._parameters.has(p) for p in params)
        if params and not is_heard and not self._hears_all:
            return None

        def clipped(norm: Any) -> None:
            # of a DTensor ranks would have to meet
            if local_of(norm) is norm and self._is_here(in_graph=True):
                self._coming.grad_norm = number_of(norm)

        return clipped

    def _scale(self, args: tuple[Any, ...], _: Any) -> Callable[[Any], None] | None:
        """Hears of torch.amp.GradScaler's step, which leaves out the optimizer's at an overflow."""
        scaler, optimizer, *_ = args
        source = next((entry for entry in self._sources if entry.optimizer is optimizer), None)
        if source is None or getattr(optimizer, "_step_supports_amp_scaling", False):
            return None  # such an optimizer is told the scale itself
        # GradScaler calls the step only without an overflow: both hooks are called here otherwise
        before, self._coming.loss_scale = source.count.step, scaler.get_scale()

        def scaled(_: Any) -> None:
            # the optimizer has taken no step: record one that was skipped
            if source.count.step == before:
                self._before(source, optimizer, (), {})
                self._coming.skipped = True
                self._after(source, optimizer, (), {})

        return scaled

    # --- CUDA graphs, whose replays run no hooks

    def _begin_capture(self, args: tuple[Any, ...], _: Any) -> None:
        """Hears that a graph is captured from now on: what follows is noted within it.

        One that a step captures is its optimizer's own.
        """
        if not self._is_here() or any(True for _ in running()):
            return
        # steps before it are written now: a capture allows no copies to the host
        for source in self._sources:
            self._finish(source)
        if self._files is not None:
            self._files[1].wait()  # a thread that asks for events would break the capture
        # `_coming` collects what is captured, the step outside waits
        self._graph, self._outside, self._coming = args[0], self._coming, Step()
        self._graphs[self._graph] = []

    def _end_capture(self, *_: Any) -> None:
        # losses and norms behind the last captured step belong to no optimizer's step
        if self._graph is not None:
            if self._coming.losses or self._coming.grad_norm is not None:
                self._graphs[self._graph].append((None, self._coming))
            self._graph, self._coming = None, self._outside

    def _replay(self, args: tuple[Any, ...], _: Any) -> Callable[[Any], None] | None:
        """Hears of a replay before it; what it leaves is copied to the host behind it."""
        captured = self._graphs.get(args[0])
        if not captured or not self._is_here():
            return None
        # one step for each captured one, in order; None: what stood behind the last
        steps, earlier = list[Step](), Counter[RecordedOptimizer]()
        for source, _ in captured:
            step = Step()
            if source is not None:
                # what is noted so far belongs to the first step of the replay
                step, self._coming = self._begun(source), step
                step.number += earlier[source]
                if not earlier[source] and self._level >= STEP and self._is_recorded(step.number):
                    with torch.no_grad():
                        self._gather_before(step, source)
                earlier[source] += 1
            steps.append(step)

        # copies are queued behind the replay, before the next one overwrites its tensors
        def replayed(_: Any) -> None:
            for step, (source, capture) in zip(steps, captured, strict=True):
                if source is None:
                    add_replayed(self._coming, capture)
                    continue
                self._count(step, source)
                if not self._is_recorded(step.number):
                    continue
                add_replayed(step, capture)
                # samples are captured in every graph; steps that are not sampled leave them out
                if not self._is_sampled(step.number):
                    step.samples.clear()
                # whole tensors are read as the replay left them
                if self._level >= STEP:
                    weights = source.weights()
                    if step.number in self._keep:
                        keep_tensors(step, weights)
                self._close_step(step, source)

        return replayed

    # --- steps

    def _count(self, step: Step, source: RecordedOptimizer) -> None:
        """Counts a step, eager or replayed; hooks of models work where the next one is recorded."""
        source.count.step = step.number
        self._wanted = any(self._is_recorded(e.count.step + 1) for e in self._sources)

    def _hear(self, function: Callable[..., None], *args: Any) -> None:
        try:
            function(*args)
        except UnpreparedError:  # the capture is left alone
            del self._graphs[self._graph]
            self._graph, self._coming = None, self._outside
            warn_of_capture("a recorded step like it has to come before the capture")

    def _before(self, source: RecordedOptimizer, _: Any, args: tuple[Any, ...], named: Any) -> None:
        # a capture that the recorder did not see begin cannot be recorded
        if not self._is_here(in_graph=True):
            if any(map(is_capturing, self._devices)):
                warn_of_capture("the recorder was not there when the capture began")
            return
        # a step of the same optimizer around this one has been noted, as a subclass's by super
        if sum(caller is source.optimizer for caller in running()) > 1:
            return
        # options as the step takes them, then weights and state, then gradients
        step = self._begun(source)
        step.options = [options_of(group) for group in source.groups]
        # what torch.amp.GradScaler has told an optimizer that unscales by itself
        optimizer: Any = source.optimizer
        scale, found_inf = (getattr(optimizer, name, None) for name in ("grad_scale", "found_inf"))
        if scale is not None:
            step.grad_scale = number_of(scale)
            step.loss_scale = step.grad_scale if step.loss_scale is None else step.loss_scale
        if found_inf is not None:
            step.skipped = number_of(found_inf)
        elif step.loss_scale is not None:
            step.skipped = False

        # digests; a captured step, whose number is 0, has all of them
        if self._level >= STEP and self._is_recorded(step.number):
            with torch.no_grad():
                # a captured step: the old weights are read before each replay
                if self._graph is None:
                    self._gather_before(step, source)
                # gradients of a closure are made within the step: `_after` reads them
                if (args[1] if len(args) > 1 else named.get("closure")) is None:
                    self._add_gradients(step, source)

    def _begun(self, source: RecordedOptimizer) -> Step:
        """Returns the step that comes, with what is known before it."""
        # the step before is closed: this one may overwrite its weights
        self._finish(source)
        source.look()
        step = self._coming
        step.stepped, step.samples, step.tensors = [], [], {}  # of a step that an error has ended
        # a captured step gets its number at each replay
        if self._graph is None:
            if not step.random:
                step.random = random_states(self._devices)
            self._describe()
            step.number, step.source = source.count.step + 1, source.number
        return step

    def _gather_before(self, step: Step, source: RecordedOptimizer) -> None:
        if self._every == 1:  # launches would sum up at other steps too
            source.ask()
        # weights: parameters and their state; changed: places that were written since the last step
        weights = source.weights()
        changed = source.changed(step.number, weights)
        # places: those of weights, whose writes by .data torch does not count
        places, is_sampled = weights.listed.weight_indices, self._is_sampled(step.number)
        everything: Sequence[int] = range(len(weights.tensors))
        # a released parameter without gradient has been stepped: no old value is left
        release = sys.modules.get("megaopt.models.release")  # not imported for others' optimizers
        if release is not None and source.optimizer in release.RELEASED:
            params = [entry.param for entry in weights.listed.held]
            everything = [i for i in everything if getattr(params[i], "grad", None) is not None]
            changed, places = sorted({*changed} & {*everything}), places & {*everything}

        # digests of what was written; from level "blocks" on of all weights
        if self._level >= BLOCKS or is_sampled:
            with_weights = sorted({*changed, *places})
        written = weights.before(with_weights if self._level >= BLOCKS else changed)
        step.stepped += written.rows(self._number)
        # samples: after a sampled step its new samples are the old ones of all that stayed
        if is_sampled:
            follows = source.sampled == step.number - 1 > 0
            indices = with_weights if follows else everything
            step.samples += weights.before(indices).samples(self._number)
            step.has_all_old = len(indices) == len(weights.tensors)
        if step.number in self._keep:
            keep_tensors(step, weights.before(everything))

    def _after(self, source: RecordedOptimizer, _: Any, args: tuple[Any, ...], named: Any) -> None:
        # the step is the one that `_before` has begun
        step, in_graph = self._coming, self._graph is not None
        is_its = in_graph or (step.source, step.number) == (source.number, source.count.step + 1)
        if not self._is_here(in_graph=True) or not is_its:
            return
        if sum(caller is source.optimizer for caller in running()) > 1:
            return
        # hooks hear of the next step from here on
        self._coming = Step()
        if not in_graph:
            if not source.is_described:  # a model came within the step
                self._describe()
            self._count(step, source)
        if not self._is_recorded(step.number):
            return
        # the count that the optimizer itself has, after the step
        for group, options in zip(source.groups, step.options, strict=True):
            options["step"] = None if in_graph else count_of(source.optimizer, group)
        # megaopt's norm is known where the step had to clip, or looks for values not finite
        optimizer: Any = source.optimizer
        nonfinite = getattr(getattr(optimizer, "options", None), "nonfinite", "propagate")
        step.clip_norm, coefficient = named.get("clip_norm"), named.get("clip_coefficient")
        if step.clip_norm is not None or (step.grad_norm is None and nonfinite != "propagate"):
            step.grad_norm = number_of(optimizer.grad_norm)
        if coefficient is not None:  # one for each group: files have no place for these
            step.clip_coefficient = number_of(coefficient) if coefficient.numel() == 1 else math.nan
        # gradients where a closure made them, then weights and state
        if self._level >= STEP:
            with torch.no_grad():
                # a closure made them within the step; args: self first
                if (args[1] if len(args) > 1 else named.get("closure")) is not None:
                    self._add_gradients(step, source)
                weights = source.weights()
                step.stepped += source.rows(weights, self._number)
                self._add_elements(step, weights)
        # a captured step has tensors without values: each replay copies them
        if in_graph:
            self._graphs[self._graph].append((source, step))
        else:
            self._close_step(step, source)

    def _close_step(self, step: Step, source: RecordedOptimizer) -> None:
        """Notes what a step has left; it is written now, or after the model's weights."""
        # the next step finds what was written since then
        if self._level >= STEP:
            source.note(step.number)
            if self._is_sampled(step.number):
                source.sampled = step.number
        if source.open is not None:  # of the same replay: what it left of the model is gone
            self._open()[1].put(source.open, self._devices)
        # it stays open until weights of the model, gathered after the step, are there
        source.open = step
        if self._level < STEP or source.models() is None:
            self._finish(source)

    def _add_gradients(self, step: Step, source: RecordedOptimizer) -> None:
        gradients = source.gradients()
        now = source.read(gradients)
        step.stepped += now.rows(self._number)
        self._add_elements(step, gradients)

    def _add_elements(self, step: Step, selection: Those) -> None:
        """Adds samples and whole tensors, as far as they are wanted of this step."""
        if self._is_sampled(step.number):
            step.samples += selection.samples(self._number)
        if step.number in self._keep:
            keep_tensors(step, selection)

    def _finish(self, source: RecordedOptimizer) -> None:
        """Hands a step over to be written, after the model's weights where these came later."""
        step, source.open = source.open, None
        if step is None:
            return
        # weights of the model beside masters, which Megatron gathers after the optimizer's step
        models = source.models() if self._level >= STEP else None
        if models is not None:
            with torch.no_grad():
                step.stepped += models.rows(self._number)
                self._add_elements(step, models)
        self._open()[1].put(step, self._devices)

    def _is_recorded(self, step: int) -> bool:
        return step == 1 or step % self._every == 0 or step in self._keep

    def _is_sampled(self, step: int) -> bool:
        return step <= SAMPLED_FIRST or step % self._samples == 0

    # --- files

    def _open(self) -> tuple[Writer, Sink]:
        if self._files is None:
            sharded = {"meshes": sorted(self._meshes)} if self._meshes else {}
            layout = {**megatron.layout(), **sharded}
            run = {**process(), **self._run, "layout": layout, "environment": describe()}
            writer = Writer(self.folder, run["rank"], run, raises=False)
            self._files = writer, Sink(writer)
        return self._files

    def _number(self, value: Any) -> int:
        return self._open()[0].number(value)

    def _describe(self) -> None:
        """Describes the optimizers that came, or have other parameters, since the last step."""
        for source in (entry for entry in self._sources if not entry.is_described):
            kind, names = type(source.optimizer), source.names()
            source.is_described = True
            source.join([peer for peer in self._sources if peer is not source])
            # parameters in the order of the forward pass, those that it did not meet behind
            unique_names = dict.fromkeys(itertools.chain(*names))
            order = [name for name in self._order if name in unique_names]
            anew, source.anew = list(source.anew), {}
            description = {
                "source": source.number,
                "step": source.count.step + 1,
                **({"anew": anew} if anew else {}),
                "class": f"{kind.__module__}.{kind.__qualname__}",
                "steps_as": list(steps_as(kind)),
                "options": all_options(source.optimizer),
                "groups": names,
                "order": list(dict.fromkeys([*order, *unique_names])),
            }
            self._open()[0].optimizer(description)


def running() -> Iterator[torch.optim.Optimizer]:
    """The optimizers whose steps are running, the innermost first; errors leave nothing behind."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code is HOOKED:
            yield frame.f_locals["self"]


Captured = tuple[RecordedOptimizer | None, Step]
"""A step within a CUDA graph; without a source what is noted behind the last one."""


def add_replayed(step: Step, captured: Step) -> None:
    """Adds what a replay has left on the device, where the next one writes it anew."""
    step.losses += map(number_of, captured.losses)
    for name in NUMBERS:
        number = getattr(captured, name)
        if number is not None:
            setattr(step, name, number_of(number))
    step.options = [{n: number_of(v) for n, v in options.items()} for options in captured.options]
    step.stepped += [rows._replace(digests=fetched(rows.digests)) for rows in captured.stepped]
    step.samples += [s._replace(bits=fetched(s.bits)) for s in captured.samples]


def warn_of_capture(reason: str) -> None:
    """Says that replays will not be recorded."""
    warnings.warn(f"steps that this CUDA graph replays are not recorded: {reason}", stacklevel=2)


class Hook:
    """A hook of a module, which does nothing in a copy of it, or where it was saved and loaded."""

    def __init__(self, function: Callable[..., None] | None = None, *first: Any) -> None:
        self._function, self._first = function, first

    def __call__(self, *args: Any) -> None:
        """Calls the function."""
        if self._function is not None:
            self._function(*self._first, *args)

    def __reduce__(self) -> tuple[type[Hook], tuple[()]]:
        """Returns what copies and pickles have of the hook: one that does nothing."""
        return Hook, ()


class LastHook:
    """A module's forward hook, behind those that others register later: they may change the output.

    Args:
        module: the module.
        hook: called with the module, its arguments and the output.
    """

    def __init__(self, module: torch.nn.Module, hook: Hook) -> None:
        self._hook = hook
        self._handle = module.register_forward_hook(hook)
        self._before = module.register_forward_pre_hook(Hook(self._move))

    def _move(self, module: torch.nn.Module, _: Any) -> None:
        is_last = next(reversed(module._forward_hooks), None) == self._handle.id
        if not is_last and not torch.compiler.is_compiling():
            self._handle.remove()
            self._handle = module.register_forward_hook(self._hook)

    def remove(self) -> None:
        """Takes the hook away."""
        self._before.remove()
        self._handle.remove()


def inner_optimizers(optimizer: Any) -> Iterator[torch.optim.Optimizer]:
    """The torch.optim.Optimizers in one, in a list, or in wrappers as Megatron and torchtitan have.

    Raises TypeError for anything else.
    """
    lists = (getattr(optimizer, name, None) for name in ("chained_optimizers", "optimizers"))
    several = next(filter(None, lists), None)
    if isinstance(optimizer, torch.optim.Optimizer) and not several:
        # integration.megatron's shows Megatron one whose gradients and weights are elsewhere
        fused = getattr(optimizer, "fused", None)
        yield fused if isinstance(fused, torch.optim.Optimizer) else optimizer
        return
    inside = several or getattr(optimizer, "optimizer", None)
    members = optimizer if isinstance(optimizer, Sequence) else inside
    if members is None:
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {optimizer!r}")
    for member in members if isinstance(members, Sequence) else [members]:
        yield from inner_optimizers(member)


NO_STEPS = ("zero_grad", "state_dict", "load_state_dict", "add_param_group")
"""Methods that a step does not call."""


def steps_as(kind: type) -> Iterator[str]:
    """The names of the classes whose step a class has inherited, the nearest first.

    Its own methods with names that the inherited class does not have are called by nobody there;
    those that it has must be the inherited ones, but for `__init__`, which makes the groups that
    are recorded, and what no step calls.
    """
    # the nearest base class first; torch.optim.Optimizer itself has no step
    for base in kind.__mro__[1 : kind.__mro__.index(torch.optim.Optimizer)]:
        names = [n for n in dir(base) if not n.startswith("__") and n not in NO_STEPS]
        # each attribute that the base has, without what torch wraps around each class's step: the
        # same, or overridden
        pairs = ([inspect.getattr_static(owner, n) for owner in (kind, base)] for n in names)
        bare = ([inspect.unwrap(a) if callable(a) else a for a in pair] for pair in pairs)
        if all(code is base_code for code, base_code in bare):
            yield f"{base.__module__}.{base.__qualname__}"


def whole_number(name: str, value: object) -> int:
    """The value; ValueError unless it is a whole number from 1 on."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        refuse(name, "a whole number >= 1", value)
    return value


def number_of(value: Any) -> Any:
    """A number or an option as it is now, of tensors their numbers, on the host sooner or later."""
    if isinstance(value, (tuple, list)):
        return [number_of(element) for element in value]
    return fetched(local_of(value)) if isinstance(value, torch.Tensor) else value


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group's options as they are now."""
    left_out = ("params", "step", "param_names")
    options = {name: value for name, value in group.items() if name not in left_out}
    single = []  # names of those that are fp32 tensors; betas may be a pair of them
    for name, value in options.items():
        values = value if isinstance(value, (tuple, list)) else (value,)
        if any(isinstance(v, torch.Tensor) and v.dtype == torch.float32 for v in values):
            single.append(name)
    numbers = {name: number_of(value) for name, value in options.items()}
    return {**numbers, "single": single} if single else numbers


def all_options(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Returns the options an optimizer was made with: the groups', and what libraries keep beside.

    TransformerEngine's and apex's FusedAdam keep adam_w_mode as an attribute, megaopt's optimizers
    their options.
    """
    attributes = {**getattr(getattr(optimizer, "options", None), "__dict__", {}), **vars(optimizer)}
    public = [name for name in attributes if not name.startswith("_")]
    plain = {n: attributes[n] for n in public if isinstance(attributes[n], (int, float, str))}
    if isinstance(getattr(optimizer, "master_weights", None), (list, tuple)):
        plain["are_masters_given"] = True  # which are no casts of the weights
    return {name: option(value) for name, value in {**plain, **optimizer.defaults}.items()}


def keep_tensors(step: Step, selection: Those) -> None:
    """Keeps whole tensors for the step's file."""
    for entry, tensor in zip(selection.listed.held, selection.tensors, strict=True):
        if tensor.dtype == torch.complex128:  # which safetensors has not; steps are of the parts
            tensor = torch.view_as_real(tensor.resolve_conj())
        step.tensors[f"{entry.placement.name}|{entry.quantity}"] = fetched(tensor).contiguous()


def process() -> dict[str, Any]:
    """The process's rank, the number of ranks, and its command."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    else:
        # what a launcher has set; the least where there is none
        numbers = list[int]()
        for variable, least in (("RANK", 0), ("WORLD_SIZE", 1)):
            text = os.environ.get(variable, str(least))
            if not text.isdecimal() or int(text) < least:
                refuse(f"{variable} in the environment", f"a whole number >= {least}", text)
            numbers.append(int(text))
        rank, world = numbers
    return {"rank": rank, "world": world, "argv": sys.argv}


def meshes(params: Iterable[Any]) -> set[str]:
    """The meshes and placements of DTensors among parameters."""
    sharded = [param for param in params if local_of(param) is not param]
    return {f"{param.device_mesh}: {param.placements}" for param in sharded}
