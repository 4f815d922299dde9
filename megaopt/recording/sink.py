"""Steps on their way to files: at once on a CPU, by a thread when a device is done."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch

from megaopt.recording.digest import hexadecimal as digits
from megaopt.recording.files import Writer, encodable, hexadecimal, path_of_kept
from megaopt.recording.inputs import RandomStates, random_digests
from megaopt.recording.table import Rows, Samples

WAITING = 64
"""Steps that may wait for their device; the next one then waits for the first of them."""
LATE = 0.02
"""Seconds for which the thread lets steps come together: at each by itself it would take Python's
lock from the loop, which a step of 300 tensors then waits for as long as it takes itself."""
NORMS, SCALES = ("grad_norm", "clip_norm", "clip_coefficient"), ("grad_scale", "loss_scale")
"""The numbers that a step has of its gradient's norm, and of loss scales."""
Number = torch.Tensor | float
"""A float, or a tensor of one on the host, which is there when the device gets to it."""


@dataclass
class Step:
    """The record of a step, parts of which devices may still be making."""

    number: int = 0
    source: int = 0
    losses: list[Number] = field(default_factory=list)
    grad_norm: Number | None = None
    clip_norm: Number | None = None
    """The norm that an optimizer was told to clip to in its step."""
    clip_coefficient: Number | None = None
    """The factor by which it was told to multiply gradients."""
    loss_scale: Number | None = None
    grad_scale: Number | None = None
    """The loss scale where gradients are still multiplied by it when the optimizer reads them."""
    skipped: Number | None = None
    options: list[dict[str, Any]] = field(default_factory=list)
    """The options of each group."""
    random: RandomStates = field(default_factory=dict)
    batches: list[torch.Tensor] = field(default_factory=list)
    rows: list[Rows] = field(default_factory=list)
    """The digests of what forwards and backwards made."""
    stepped: list[Rows] = field(default_factory=list)
    """The digests of what the optimizer reads and writes."""
    samples: list[Samples] = field(default_factory=list)
    has_all_old: bool = False
    """Whether samples have all there was before the step: what they lack, the step has made."""
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    """Whole tensors on the host, by "name|quantity"."""

    def write(self, writer: Writer) -> None:
        """Writes the step; when the devices are done."""
        if self.tensors:
            from safetensors.torch import save_file

            path = path_of_kept(writer.folder, self.number, self.source)
            path.parent.mkdir(exist_ok=True)
            save_file({encodable(name): tensor for name, tensor in self.tensors.items()}, path)
        parts = [part.array() for part in (*self.rows, *self.stepped)]
        rows = numpy.concatenate(parts) if parts else None
        samples = numpy.concatenate([s.array() for s in self.samples]) if self.samples else None
        numbers = {name: getattr(self, name) for name in (*NORMS, *SCALES)}
        texts = {n: None if v is None else hexadecimal(float(v)) for n, v in numbers.items()}
        scalars = {
            "losses": [hexadecimal(float(loss)) for loss in self.losses],
            **{name: texts[name] for name in NORMS},
            "groups": [{n: option(v) for n, v in group.items()} for group in self.options],
            **{name: texts[name] for name in SCALES},
            "skipped": None if self.skipped is None else bool(self.skipped),
            "rng": random_digests(self.random),
            "batch": [digits(batch) for batch in self.batches],
            **({"has_all_old": True} if self.has_all_old else {}),
        }
        writer.step(self.number, self.source, scalars, rows, samples)


def option(value: Any) -> Any:
    """Returns an option as JSON has it; as text where it is no number, text or list of them."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, float):
        return hexadecimal(value)
    if isinstance(value, (list, tuple)):
        return [option(element) for element in value]
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)


class Sink:
    """Takes steps and writes them in their order.

    What cannot be written ends the recording with a warning, and never the training; nothing is
    written after it, as no step behind a torn one could be read.
    """

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue(WAITING)
        self._thread: threading.Thread | None = None
        self._hurry = threading.Event()
        """Set where somebody waits for what is on its way."""

    def put(self, step: Step, devices: set[torch.device]) -> None:
        """Writes a step, when the devices have done what they were asked for up to now."""
        if self._writer.is_stopped:
            return
        waits = [torch.cuda.current_stream(d).record_event() for d in devices if d.type == "cuda"]
        if not waits and self._thread is None:
            self._write(step)
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="megaopt-recorder", daemon=True)
            self._thread.start()

        def write() -> None:
            for event in waits:
                event.synchronize()
            self._write(step)

        self._queue.put(write)

    def wait(self) -> None:
        """Returns when no step waits for its device."""
        self._hurry.set()
        self._queue.join()
        self._hurry.clear()

    def close(self) -> None:
        """Waits for what is on its way, and closes the files."""
        if self._thread is not None:
            self._hurry.set()
            self._queue.put(None)
            self._thread.join()
        self._writer.close()

    def _run(self) -> None:
        while (write := self._queue.get()) is not None:
            if self._queue.empty():
                self._hurry.wait(LATE)
            try:
                write()
            except Exception as error:
                self._writer.stop(error)
            finally:
                self._queue.task_done()

    def _write(self, step: Step) -> None:
        """Writes a step, if all before it are: whole steps alone, without one left out."""
        if self._writer.is_stopped:
            return
        try:
            step.write(self._writer)
        except Exception as error:
            self._writer.stop(error)
        except BaseException as interrupt:  # Ctrl-C, which left a part of it
            self._writer.stop(interrupt)
            raise
