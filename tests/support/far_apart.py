"""Memory in two regions of the address space that are further apart than a descriptor's stride.

A card's driver gives out such addresses now and then: on two H200s with NCCL 0x4a... and 0x7fb...
"""

import ctypes
import itertools
import mmap

import torch

APART = 1 << 41
"""Bytes between the two, of which a stride has fewer than half as many at most."""
_addresses = itertools.count(1 << 44, 1 << 43)
"""Where host memory is asked for."""


def far_apart(like):
    """Two tensors of the shape, dtype and device of one, 2^40 bytes apart or more.

    Their memory stays until the process ends.
    """
    found = _on_card(like) if like.is_cuda else _on_host(like)
    assert found[1].data_ptr() - found[0].data_ptr() >= 1 << 40
    return found


def _on_host(like):
    first = next(_addresses)
    return [_mapped(address, like) for address in (first, first + APART)]


def _mapped(address, like):
    size = -(-like.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    place = libc.mmap(address, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    assert place not in (None, ctypes.c_void_p(-1).value), ctypes.get_errno()
    numbers = (ctypes.c_uint8 * size).from_address(place)
    return (
        torch.frombuffer(numbers, dtype=torch.uint8)[: like.nbytes]
        .view(like.dtype)
        .view(like.shape)
    )


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    """CUmemAllocationProp: memory of a card, pinned there."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("metadata", ctypes.c_void_p),
        ("flags", ctypes.c_uint8 * 8),
    )


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class _Numbers:
    def __init__(self, address, size):
        self.__cuda_array_interface__ = {
            "data": (address, False), "shape": (size,), "typestr": "|u1", "version": 3,
        }  # fmt: skip


def _on_card(like):
    """Addresses are reserved for all between the two, and memory for these alone."""
    driver, index = ctypes.CDLL("libcuda.so.1"), like.device.index or 0

    def call(name, *arguments):
        code = getattr(driver, name)(*arguments)
        assert code == 0, f"{name} says {code}"

    location = _Location(1, index)  # CU_MEM_LOCATION_TYPE_DEVICE
    properties = _Properties(1, 0, location, None)  # CU_MEM_ALLOCATION_TYPE_PINNED
    access = _Access(location, 3)  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    unit, first, zero = ctypes.c_size_t(), ctypes.c_uint64(), ctypes.c_uint64(0)
    call("cuMemGetAllocationGranularity", ctypes.byref(unit), ctypes.byref(properties), 0)
    size = ctypes.c_size_t(-(-like.nbytes // unit.value) * unit.value)
    whole = ctypes.c_size_t(APART + size.value)
    call("cuMemAddressReserve", ctypes.byref(first), whole, ctypes.c_size_t(0), zero, zero)
    found = []
    for address in (first.value, first.value + APART):
        place, handle = ctypes.c_uint64(address), ctypes.c_uint64()
        call("cuMemCreate", ctypes.byref(handle), size, ctypes.byref(properties), zero)
        call("cuMemMap", place, size, ctypes.c_size_t(0), handle, zero)
        call("cuMemSetAccess", place, size, ctypes.byref(access), ctypes.c_size_t(1))
        numbers = torch.as_tensor(_Numbers(address, like.nbytes), device=like.device)
        found.append(numbers.view(like.dtype).view(like.shape))
    return found
