"""Host memory as a card would map it, where there is none: the CPU counts as a card."""

import numpy

from megaopt.kernels.host_memory import HostMemoryError


class FakePinning:
    """Pins nothing, and keeps account; limit: bytes that can be had at a time."""

    def __init__(self, limit=2**40, reason=None, can_free=True):
        self.limit, self.reason, self.can_free = limit, reason, can_free
        self.chunks, self.sizes, self.waits = {}, [], 0

    def serves(self, device):
        return device.type == "cpu"

    def why_not(self, device):
        return self.reason

    def allocate(self, size, device):
        if size + self.held > self.limit:
            raise HostMemoryError("out of memory")
        self.sizes.append(size)
        memory = numpy.full(size + 256, 0xAB, dtype=numpy.uint8)
        address = -(-memory.ctypes.data // 256) * 256
        self.chunks[address] = (size, memory)
        return address

    def free(self, address, device):
        if self.can_free:
            del self.chunks[address]
        return self.can_free

    def is_pinned(self, tensor):
        begin, size = tensor.data_ptr(), tensor.untyped_storage().nbytes()
        return any(a <= begin and begin + size <= a + n for a, (n, _) in self.chunks.items())

    def wait(self, device):
        self.waits += 1

    @property
    def held(self):
        return sum(size for size, _ in self.chunks.values())
