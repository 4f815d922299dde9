"""Tables on the device: where tensors lie, how they are cut into chunks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy
import torch

from megaopt.kernels import native
from megaopt.kernels.chunks.scales import AMAX_PHASE, STEP_PHASE
from megaopt.kernels.optional_triton import INTERPRETED


class CopyEvent:
    """An event behind copies on the stream that is current when it is made.

    Copies on a CPU are done at once.

    torch's own asks for the current stream at each record, which takes 5 us on an H200's host.
    """

    def __init__(self, device: torch.device) -> None:
        self._event: Any = None
        if device.type == "cuda":
            self._stream = torch.cuda.current_stream(device)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def record(self) -> None:
        """Puts the event behind what is queued now."""
        if self._event is not None:
            self._event.record(self._stream)

    def query(self) -> bool:
        """Returns whether the event has passed."""
        return self._event is None or bool(self._event.query())

    def wait(self) -> None:
        """Waits until it has passed."""
        if self._event is not None:
            self._event.synchronize()


@dataclass(frozen=True)
class PinnedMemory:
    """Memory of the host that the device copies from."""

    tensor: torch.Tensor
    copied: Any
    """The event behind its last copy: once it has passed the memory can be written again."""

    @cached_property
    def array(self) -> numpy.ndarray:
        """The memory as the host writes it."""
        return self.tensor.numpy()


def new_piece(like: torch.Tensor) -> PinnedMemory:
    """Memory for a copy to a tensor; pinned where that is on a GPU."""
    on_gpu = like.device.type == "cuda"
    # a step within inference mode makes tensors that no other step could write
    with torch.inference_mode(False):
        memory = torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=on_gpu)
    return PinnedMemory(memory, CopyEvent(like.device))


GIVEN_UP: list[PinnedMemory] = []
"""Pieces of an Upload that was dropped within a capture, until another is written.

Where pinned memory is freed, torch records an event on each stream that copied from it. On a stream
that a CUDA graph is being captured on, that event can never be queried: the next pin_memory(), of
anybody, fails with "invalid argument".
"""


class Upload:
    """A tensor on the device that the host writes again and again, while earlier copies wait.

    pin_memory() and .to() in each step took 0.07 ms on an H200's host. There are as many pieces of
    memory as the host has ever been writes ahead of the device. The tensor is contiguous, and is
    written and read on one stream, current at every write.
    """

    def __init__(
        self, tensor: torch.Tensor, new: Callable[[torch.Tensor], PinnedMemory] = new_piece
    ) -> None:
        self.tensor, self._new = tensor, new
        self._pieces: deque[PinnedMemory] = deque()

    def write(self, array: numpy.ndarray, first: int = 0, last: int | None = None) -> None:
        """Copies an array's rows from `first` up to `last` into the tensor's, after what is queued.

        The array is of the tensor's shape and dtype, and may change as soon as this returns.
        """
        GIVEN_UP.clear()
        # the oldest piece is written again if its copy has passed; otherwise there is a new piece
        oldest_is_done = bool(self._pieces) and self._pieces[0].copied.query()
        piece = self._pieces.popleft() if oldest_is_done else self._new(self.tensor)
        target, source = self.tensor, piece.tensor
        # the host writes the piece now, the device copies it behind what is queued
        piece.array[first:last] = array[first:last]
        if first or last is not None:
            target, source = target[first:last], source[first:last]
        target.copy_(source, non_blocking=True)
        # the event says when the device has read the piece
        piece.copied.record()
        self._pieces.append(piece)  # not where the copy failed

    def __del__(self) -> None:
        """Lets the pinned memory outlive this within a capture."""
        # After a fault of the device torch cannot say whether there is a capture. Then none goes
        # on, and an error here would only hide that of the fault.
        with suppress(RuntimeError):
            # no operation of torch on a CPU, where the collector may come at any moment
            if self.tensor.is_cuda and torch.cuda.is_current_stream_capturing():
                GIVEN_UP.extend(self._pieces)


@dataclass(frozen=True)
class Geometry:
    """The way elements are dealt out to programs; it changes no bit of the result."""

    block: int
    """Elements that a program loads at a time; a power of two."""
    iterations: int
    """Blocks that a program works through."""
    warps: int = 4
    span: int = 32
    """Chunks for which one row of `Chunks` says where to begin to look for a tensor.

    On an H200, ms on set B for fp32 masters, remainders, bf16 moments: 6.83 6.28 4.85 with 32, as
    with 1 (6.83 6.27 4.87); on set C, of small tensors, 0.037 0.036 0.032 and 0.037 0.035 0.031.
    """

    registers: int | None = None
    """The most that a thread may have, on NVIDIA's GPUs; None: as many as the compiler takes."""

    @property
    def width(self) -> int:
        """Elements of a block that a thread takes, in tiles: 4 or 8."""
        return min(max(self.block // (32 * self.warps), 4), 8)


# On an H200, percent of copy on set B for fp32 masters, remainders, bf16 moments, both:
# 512 x 4: 97.0 98.3 97.0 96.0; 1024 x 4: 96.5 97.1 94.3 94.8; 512 x 8: 95.6 96.3 96.0 96.5;
# 1024 x 8: 95.1 96.2 94.9 95.2; 512 x 16: 94.8 95.4 94.9 95.0; 8 warps: 79.9 to 96.3
COMPILED = Geometry(512, 4)
# With scales per tensor (two phases, a ticket for each program): ms on set B for fp16 and for fp8
# moments, contract te; copying their 26 and 20 bytes takes 6.1 and 4.7. 512 x 32 with 2 warps: 6.39
# 5.24; with 4: 6.53 5.50; 1024 x 32: 6.45 5.42; 512 x 16: 6.70 5.64; 512 x 8: 7.16 6.02; 512 x 4:
# 8.28 7.09. Lags of 1,056 to 4,224 programs are alike; 528: 6.83 5.91.
COMPILED_SCALED = Geometry(512, 32, 2)
# Where weights and moments are drawn, with as much arithmetic as memory has time for; percent of
# copy on set B for bf16 weights and moments, stochastic: 512 x 4: 88.8; 512 x 8: 92.0;
# 1024 x 2, 4, 8: 61.2 65.2 66.6; with 2 warps 512 x 4: 80.3, 256 x 8: 88.7; with 8 warps 1024 x 4:
# 80.0. Beside fp32 moments 512 x 4 is better: 24-bit masters 94.2 and 93.7, Kahan 96.2 and 94.9.
COMPILED_DRAWN = Geometry(512, 8, registers=64)
# Moments in blocks of 8 bits, where arithmetic takes as long as memory: percent of copy on set B
# (which takes 2.34 ms) for 10 bytes, ieee and te, and for Lion's 8, with at most so many registers:
#
# | geometry        | any            | 112            | 96             | 80             |
# |-----------------|----------------|----------------|----------------|----------------|
# | 1024 x 8        | 52.8 61.2 73.4 | 61.2 60.3 67.3 | 65.5 66.1 73.4 | 60.3 66.6 77.0 |
# | 1024 x 32       |                |                | 71.9 72.8 79.4 |                |
# | 512 x 8, 2 w.   | 67.3 74.3 80.5 |                |                |                |
# | 512 x 32, 2 w.  | 70.8 79.9 87.1 | 71.5 74.7 79.8 | 71.8 81.6 84.1 | 66.1 81.4 87.2 |
# | 512 x 64, 2 w.  | 70.6 79.3 86.3 |                |                |                |
# | 256 x 32, 1 w.  | 69.5 82.9 86.0 |                |                |                |
# | 256 x 64, 1 w.  | 71.5 83.4 86.3 | 69.7 74.8 84.1 | 70.8 79.4 84.1 | 65.5 80.4 88.1 |
#
# A program's first loads, which wait for each other, count less in a longer one. Without the next
# block's codes on their way (kernel.step_ahead) 1024 x 8 with 96 was 66.0 67.4 65.7, and before
# several codes at a time (formats/hopper.py) 55.7 at 10 bytes. Loaded ahead through shared memory
# instead (tl.range's num_stages=2, cp.async), 512 x 32 with 2 warps and 96, 80, any registers: 67.1
# 66.9 62.6 at 10 bytes, te 75.9 80.9 76.9, Lion 77.2 82.6 78.3: codes go to registers through two
# more barriers.
COMPILED_BLOCKS = Geometry(512, 32, 2)
COMPILED_BLOCK_PAIR = Geometry(512, 32, 2, registers=96)
# An interpreted operation costs some 15 microseconds whatever its size: fewer, larger programs.
INTERPRETER = Geometry(16384, 1, span=4)
OWN = INTERPRETER if INTERPRETED else COMPILED
OWN_SCALED = INTERPRETER if INTERPRETED else COMPILED_SCALED
OWN_DRAWN = INTERPRETER if INTERPRETED else COMPILED_DRAWN
OWN_BLOCKS = INTERPRETER if INTERPRETED else COMPILED_BLOCKS
OWN_BLOCK_PAIR = INTERPRETER if INTERPRETED else COMPILED_BLOCK_PAIR


# Finding the rows of a smaller array takes as long as copying all of it.
SMALL = 4096


class DeviceTable:
    """A host array's copy on the device; what changed in the array is written over it.

    What a CUDA graph captured has to stay as it was for as long as the graph is replayed: those
    copies are kept with the table, and are never written again. Nor is a copy written on another
    stream than the one that it was allocated on, whose allocator would give its memory away too
    early.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._host: numpy.ndarray | None = None
        self._upload: Upload | None = None
        self._stream = 0
        self._captured: list[torch.Tensor] = []
        self._is_captured = self._waits_for_replay = False

    def update(self, array: numpy.ndarray, rows: Sequence[int] | None = None) -> torch.Tensor:
        """The array on the device, uploaded where it differs from the last one.

        rows: those that may differ, of the same shape; None for any.
        """
        # from the first row that differs to behind the last, by bits: 0.0 == -0.0
        host, first, last = self._host, 0, None
        if host is not None and host.shape == array.shape:
            # large arrays are compared row by row, only those that may differ
            changed_rows = []
            if array.nbytes > SMALL:
                rows = range(len(array)) if rows is None else rows
                changed_rows = [row for row in rows if array[row].tobytes() != host[row].tobytes()]
            if changed_rows:
                first, last = min(changed_rows), max(changed_rows) + 1
            elif array.nbytes > SMALL or array.tobytes() == host.tobytes():
                return self.kept()  # up to date
        self._host = None  # after an error the next one is uploaded whole
        if host is None or host.shape != array.shape:
            host = array.copy()
        else:
            host[first:last] = array[first:last]

        if is_capturing(self.device):
            # a copy to new memory, filled only when the graph is replayed: both live as long as
            # the table, as a replay copies again
            pinned = pinned_copy(host, self.device)
            tensor = pinned.to(self.device, non_blocking=True, copy=True)
            self._captured += pinned, tensor
            self._upload = Upload(tensor)
            self._is_captured = self._waits_for_replay = True
        else:
            tensor = self._put(host, first, last)  # over the last one where it may
        self._host = host
        return tensor

    def kept(self) -> torch.Tensor:
        """The array on the device as it was last, which a graph that is being captured may keep."""
        assert self._host is not None
        assert self._upload is not None
        if is_capturing(self.device):
            # the graph reads this copy at every replay: it is never written again
            self._captured.append(self._upload.tensor)
            self._is_captured = True
        elif self._waits_for_replay or self._stream != stream_of(self.device):
            # what a capture filled is filled at replay only, and a copy belongs to one stream
            return self._put(self._host)
        return self._upload.tensor

    def _put(self, host: numpy.ndarray, first: int = 0, last: int | None = None) -> torch.Tensor:
        """Writes rows over those of the copy; makes a new one where it must stay, or fits not."""
        stream, upload = stream_of(self.device), self._upload
        fits = upload is not None and upload.tensor.shape == host.shape and self._stream == stream
        if upload is None or not fits or self._is_captured:
            # not what a step within inference mode would make: every later step may write it
            with torch.inference_mode(False):
                tensor = torch.empty_like(torch.from_numpy(host), device=self.device)
            upload, first, last = Upload(tensor), 0, None
        upload.write(host, first, last)
        self._upload, self._stream = upload, stream
        self._is_captured = self._waits_for_replay = False
        return upload.tensor


def stream_of(device: torch.device) -> int:
    """The device's current stream, as a number."""
    if device.type != "cuda":
        return 0
    # torch.cuda.current_stream makes an object, which takes 5 us on an H200's host
    index = torch.cuda.current_device() if device.index is None else device.index
    return int(torch._C._cuda_getCurrentRawStream(index))


def is_capturing(device: torch.device) -> bool:
    """Returns whether a CUDA graph is being captured on the device's current stream."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def pinned_copy(array: numpy.ndarray, device: torch.device) -> torch.Tensor:
    """The array in memory from which the device copies without being waited for."""
    host = torch.from_numpy(array)
    return host.clone() if device.type == "cpu" else host.pin_memory()


def to_device(array: numpy.ndarray, device: torch.device) -> torch.Tensor:
    """A copy on the device, made without waiting for the work queued there.

    The pinned memory goes back to torch's host allocator, which reuses it only after the copy.
    """
    return pinned_copy(array, device).to(device, non_blocking=True, copy=True)


class Chunks:
    """A table on the device of each chunk's tensor: 4 bytes a tensor and 4 a span of chunks.

    A row for each chunk, 8 bytes for 2,048 elements, was 0.01% of what Megatron holds.
    """

    def __init__(self, numels: Sequence[int], geometry: Geometry, device: torch.device) -> None:
        ends = numpy.cumsum(chunk_counts(numels, geometry))
        self.count = int(ends[-1]) if len(ends) else 0
        # of the tensors that have chunks, the one whose chunks end after a span's first
        begins = numpy.searchsorted(ends, numpy.arange(0, self.count, geometry.span), side="right")
        self.table = to_device(numpy.concatenate([[0], ends, begins]).astype(numpy.int32), device)
        """int32: each tensor's first chunk, and all chunks; the tensor of each span's first."""


def chunk_counts(numels: Sequence[int], geometry: Geometry) -> numpy.ndarray:
    """int64: in how many chunks each tensor is worked through."""
    return -(-numpy.array(numels, dtype=numpy.int64) // (geometry.block * geometry.iterations))


def chunk_rows(numels: Sequence[int], geometry: Geometry) -> numpy.ndarray:
    """int32 [2, chunks]: the tensor of each, and the place there in chunks."""
    counts = chunk_counts(numels, geometry)
    tensors = numpy.repeat(numpy.arange(len(numels)), counts)
    firsts = numpy.repeat(numpy.cumsum(counts) - counts, counts)
    places = numpy.arange(len(tensors)) - firsts
    return numpy.stack([tensors, places]).astype(numpy.int32)


def two_phase_chunk_rows(chunks: numpy.ndarray, lag: int) -> numpy.ndarray:
    """Each tensor's chunks twice: for the amaxes, and, from `lag` programs later on, for the step.

    So many programs are at work at a time, and one that waits keeps its place on the processor. A
    third row has the phase.
    """
    tensors = chunks[0]
    order = numpy.arange(len(tensors))
    ends = numpy.searchsorted(tensors, tensors, side="right")  # past each tensor's last chunk
    # int32 [3, chunks] twice: tensor, place, phase
    phases = (numpy.full_like(order, phase.value) for phase in (AMAX_PHASE, STEP_PHASE))
    amaxes, steps = (numpy.stack([*chunks, row]).astype(numpy.int32) for row in phases)
    # a step's key is later than the keys of all its tensor's amaxes, which are their own order
    keys = numpy.concatenate([order, ends + (lag - 0.5)])
    merged = numpy.concatenate([amaxes, steps], axis=1)
    return numpy.ascontiguousarray(merged[:, numpy.argsort(keys, kind="stable")])


def note_row(row: numpy.ndarray, tensors: Iterable[torch.Tensor]) -> bool:
    """Notes the tensors' addresses in an int64 row; whether any is another than before."""
    now = list(map(torch.Tensor.data_ptr, tensors))
    moved: bool = now != row.tolist()
    row[:] = now
    return moved


def addresses_of(buffers: Mapping[str, Sequence[torch.Tensor]]) -> dict[str, numpy.ndarray]:
    """Returns the addresses of the tensors of each slot, int64 [tensors]."""
    module = native.get(False)
    if module is None:
        # without the native module one address after another
        row_of = partial(numpy.fromiter, dtype=numpy.int64)
        pairs = buffers.items()
        return {slot: row_of(map(torch.Tensor.data_ptr, tensors)) for slot, tensors in pairs}
    return {slot: module.addresses_of([*tensors]) for slot, tensors in buffers.items()}
