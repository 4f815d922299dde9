"""Pinned host memory that a card reads and writes by its address, cut into tensors.

With unified addressing a kernel takes the address of pinned memory as one of the card's own: what
it loads and stores there goes over the bus while it runs, without a copy.
"""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

import numpy
import torch

ALIGNMENT = 256
"""Bytes: where tensors start, so that loads are as wide as from the card's own memory."""
SMALLEST, LARGEST = 2**21, 2**28
"""Bytes of an allocation that tensors share: as many as there are already, within these."""


class HostMemoryError(RuntimeError):
    """Host memory could not be pinned, or a card cannot map it."""


class Pinning:
    """Pins host memory by NVIDIA's driver: as many bytes as are asked for, given back at once.

    Tests have another, with the same methods.
    """

    # of cuda.h
    PORTABLE_AND_MAPPED = 1 | 2
    CAN_MAP_HOST_MEMORY, UNIFIED_ADDRESSING = 19, 41

    def serves(self, device: torch.device) -> bool:
        """Returns whether this device's tensors are elsewhere than in host memory."""
        return device.type not in ("cpu", "meta")

    def why_not(self, device: torch.device) -> str | None:
        """The reason why the device cannot read and write pinned host memory; None where it can."""
        if device.type != "cuda" or torch.version.hip is not None:
            kind = "AMD's GPUs" if device.type == "cuda" else f"device type {device.type!r}"
            return f"{kind} are not NVIDIA's GPUs, whose driver maps host memory"
        abilities = {
            "map host memory": self.CAN_MAP_HOST_MEMORY,
            "address host memory as its own (unified addressing)": self.UNIFIED_ADDRESSING,
        }
        lacks = []
        try:
            index = torch.cuda.current_device() if device.index is None else device.index
            for words, number in abilities.items():
                handle, value = ctypes.c_int(), ctypes.c_int()
                self._call("cuDeviceGet", ctypes.byref(handle), ctypes.c_int(index))
                attribute = (ctypes.byref(value), ctypes.c_int(number), handle)
                self._call("cuDeviceGetAttribute", *attribute)
                lacks += [] if value.value else [words]
        except (OSError, HostMemoryError) as error:
            return f"its driver does not say whether it maps host memory: {error}"
        return f"the card cannot {' or '.join(lacks)}" if lacks else None

    def allocate(self, size: int, device: torch.device) -> int:
        """The address of so many bytes; raises HostMemoryError with the reason."""
        with torch.cuda.device(device):
            torch.cuda.synchronize()  # the driver needs torch's context on this thread
            # pinned for all contexts, and mapped; then the address that the card has for it
            host, mapped = ctypes.c_void_p(), ctypes.c_uint64()
            flags = ctypes.c_uint(self.PORTABLE_AND_MAPPED)
            self._call("cuMemHostAlloc", ctypes.byref(host), ctypes.c_size_t(size), flags)
            address = int(host.value or 0)
            pair = (ctypes.byref(mapped), host, ctypes.c_uint(0))
            self._call("cuMemHostGetDevicePointer_v2", *pair)
        # tensors have one address, so both must be the same
        if mapped.value != address:
            self._call("cuMemFreeHost", host)
            raise HostMemoryError("the card has another address for it than the host")
        return address

    def free(self, address: int, device: torch.device) -> bool:
        """Frees them behind the device's work; False within a capture, where it cannot wait."""
        if torch.cuda.is_current_stream_capturing():
            return False
        with torch.cuda.device(device):
            torch.cuda.synchronize()
            self._call("cuMemFreeHost", ctypes.c_void_p(address))
        return True

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Returns whether a device may be given the address of a tensor in host memory."""
        return tensor.is_pinned()

    def wait(self, device: torch.device) -> None:
        """Returns when the work of all the device's streams is done: a graph may be on any."""
        torch.cuda.synchronize(device)

    def _call(self, name: str, *arguments: Any) -> None:
        driver = ctypes.CDLL("libcuda.so.1")
        code = getattr(driver, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            driver.cuGetErrorString(code, ctypes.byref(text))
            reason = (text.value or b"an unknown error").decode()
            raise HostMemoryError(f"{name} says {reason} ({code})")


CUDA = Pinning()
_pinning = CUDA


def pinning() -> Pinning:
    """Returns the way in which host memory is pinned now."""
    return _pinning


@contextmanager
def pinned_by(replacement: Pinning) -> Iterator[None]:
    """Lets optimizers that are made within it pin host memory another way: for tests."""
    global _pinning
    before, _pinning = _pinning, replacement
    try:
        yield
    finally:
        _pinning = before


# --- memory


class HostAllocation:
    """One allocation; freed when neither it nor a tensor in it is left."""

    held = 0
    """Bytes of all chunks of the process."""
    _left: ClassVar[list[Callable[[], bool]]] = []
    """The calls that free what could not be freed yet."""

    def __init__(self, size: int, device: torch.device, by: Pinning) -> None:
        # what could not be freed within a capture is tried again
        HostAllocation._left[:] = [free for free in HostAllocation._left if not free()]
        self.size, self.used = size, 0
        self.address = by.allocate(size, device)
        HostAllocation.held += size
        # called when neither this nor an array over it is left
        freeing = weakref.finalize(self, _free, by, self.address, size, device)
        freeing.atexit = False  # tensors may outlive the interpreter; the process ends anyway

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """The memory as numpy reads it, whose array keeps the chunk."""
        place = {"data": (self.address, False), "shape": (self.size,)}
        return {**place, "typestr": "|u1", "version": 3}

    def take(self, size: int) -> torch.Tensor:
        """The next so many bytes, uint8: a tensor with a storage of its own."""
        memory = numpy.asarray(self)[self.used : self.used + size]
        self.used += padded(size)
        return torch.from_numpy(memory)

    @property
    def left(self) -> int:
        """Bytes that nobody has."""
        return self.size - self.used


def _free(by: Pinning, address: int, size: int, device: torch.device) -> None:
    def free() -> bool:
        done = True
        with suppress(Exception):  # the process ends, and the device is gone before
            done = by.free(address, device)
        HostAllocation.held -= size * done
        return done

    if not free():
        HostAllocation._left.append(free)


def held_bytes() -> int:
    """Bytes of pinned host memory that states of this process hold."""
    return HostAllocation.held


def padded(size: int) -> int:
    """Bytes that a tensor takes, up to where the next one starts."""
    return -(-size // ALIGNMENT) * ALIGNMENT


class HostMemory:
    """A maker of tensors in pinned host memory, for a device that reads and writes them."""

    def __init__(self, device: torch.device, by: Pinning | None = None) -> None:
        self.device, self.by = device, by or pinning()
        self._chunk: HostAllocation | None = None
        self._total = 0

    @contextmanager
    def room(self, size: int) -> Iterator[None]:
        """Makes tensors of so many padded bytes within it in one allocation.

        Few bytes come out of one that others share.

        Raises HostMemoryError where it cannot be pinned.
        """
        before = self._chunk
        # many bytes get an allocation of their own, unless the open one has room
        if size >= SMALLEST and size > (before.left if before else 0):
            self._chunk = self._new(size)
        announced = self._chunk
        try:
            yield
        finally:
            # later tensors go on in the one from before
            if announced is not before:
                self._chunk = before

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor on the CPU, in pinned memory, with whatever was there before.

        Raises HostMemoryError where it cannot be pinned.
        """
        size = math.prod(shape) * dtype.itemsize
        if not size:
            return torch.empty(shape, dtype=dtype, device="cpu")
        # a new allocation is as large as all before, within limits: few are made
        if self._chunk is None or self._chunk.left < padded(size):
            self._chunk = self._new(max(padded(size), SMALLEST, min(self._total, LARGEST)))
        return self._chunk.take(size).view(dtype).view(shape)

    def _new(self, size: int) -> HostAllocation:
        try:
            chunk = HostAllocation(size, self.device, self.by)
        except HostMemoryError as error:
            free = free_bytes()
            amount = "an unknown number of" if free is None else f"{free:,}"
            raise HostMemoryError(
                f"state_device='cpu' must find {size:,} bytes of host memory to pin for "
                f"{self.device}, got none: {error}; {amount} bytes are free, {held_bytes():,} hold "
                "states already. Keep less there (state_device={'moments': 'cpu'}, or formats of "
                "fewer bits), allow the process more memory (the container's limit), or leave "
                "state_device out"
            ) from None
        self._total += size
        return chunk


def free_bytes(root: Path = Path("/")) -> int | None:
    """Host memory that could still be pinned: what is free, within the container's limit.

    None where the system does not say. root: of /proc and /sys.
    """
    sizes = []
    with suppress(OSError, ValueError, IndexError, StopIteration):
        # the whole machine's, in KiB
        lines = (root / "proc/meminfo").read_text().splitlines()
        line = next(text for text in lines if text.startswith("MemAvailable:"))
        sizes.append(int(line.split()[1]) * 1024)
    groups = root / "sys/fs/cgroup"
    # the container's, of cgroup v2, then v1
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        with suppress(OSError, ValueError):  # "max" is no limit
            sizes.append(int((groups / limit).read_text()) - int((groups / used).read_text()))
    return max(0, min(sizes)) if sizes else None
