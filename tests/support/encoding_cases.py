"""Encoding and decoding by themselves: the kernels, the oracle, and the values that are hard."""

import numpy as np
import oracle
import torch
from bits import assert_same_bits

from megaopt.kernels.optional_triton import jit, tl


@jit
def encode_kernel(value_ptr, code_ptr, FORMAT: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(code_ptr + offsets, FORMAT.encode(tl.load(value_ptr + offsets), 1.0))


@jit
def encode_drawing_kernel(value_ptr, bits_ptr, code_ptr, FORMAT: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value, bits = tl.load(value_ptr + offsets), tl.load(bits_ptr + offsets)
    tl.store(code_ptr + offsets, FORMAT.encode(value, 1.0, bits))


@jit
def split_kernel(value_ptr, weight_ptr, code_ptr, FORMAT: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    weight, code = FORMAT.encode(tl.load(value_ptr + offsets))
    tl.store(weight_ptr + offsets, weight)
    tl.store(code_ptr + offsets, code)


@jit
def split_drawing_kernel(
    value_ptr, bits_ptr, weight_ptr, code_ptr, FORMAT: tl.constexpr, BLOCK: tl.constexpr
):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    weight, code = FORMAT.encode(tl.load(value_ptr + offsets), tl.load(bits_ptr + offsets))
    tl.store(weight_ptr + offsets, weight)
    tl.store(code_ptr + offsets, code)


def run(kernel, *tensors, form):
    block = 4096
    assert tensors[0].numel() % block == 0
    with np.errstate(all="ignore"):
        kernel[(tensors[0].numel() // block,)](*tensors, form, block)


def oracle_codes(form, values):
    codes, _ = oracle.encode(form.name, values.numpy())
    return torch.from_numpy(np.ascontiguousarray(codes))


# Any format: a list of its codes' tensors, one, or for joined ones the weight's and the master's.


def by_twin(form, values, bits=None):
    """bits: int32, 16 random ones for each value, where the format draws."""
    own = [] if bits is None else [bits]
    codes = form.encode_reference(values, *([] if form.joined else [None]), *own)
    return list(codes) if form.joined else [codes]


def by_oracle(form, values, bits=None):
    own = None if bits is None else bits.numpy().astype(np.int64)
    if form.joined:
        weight = {torch.float16: "float16", torch.bfloat16: "bfloat16"}[form.requires_weight]
        codes = oracle.joined_codes(form.name, weight, values.numpy(), own)
    else:
        codes = [oracle.encode(form.name, values.numpy(), own)[0]]
    found = [torch.from_numpy(np.ascontiguousarray(code)) for code in codes]
    return [code.view(dtype) for code, dtype in zip(found, dtypes_of(form), strict=True)]


def by_kernel(form, values, device, bits=None):
    """As the others, on the CPU in the end."""
    count = len(values)
    given = [values] if bits is None else [values, bits]
    given = [torch.cat([each, each.new_zeros(-count % 4096)]).to(device) for each in given]
    codes = [torch.zeros(len(given[0]), dtype=d, device=device) for d in dtypes_of(form)]
    kernels = [[encode_kernel, encode_drawing_kernel], [split_kernel, split_drawing_kernel]]
    signed = {1: torch.int8, 2: torch.int16, 4: torch.float32}
    stored = [code.view(signed[code.element_size()]) for code in codes]
    run(kernels[form.joined][form.draws], *given, *stored, form=form)
    return [code[:count].cpu() for code in codes]


def dtypes_of(form):
    return [form.requires_weight, form.dtype] if form.joined else [form.dtype]


def assert_encoded(form, values, device, bits=None):
    """Fails unless twin, kernel and oracle give the same codes; returns them."""
    expected = by_oracle(form, values, bits)
    sides = {"twin": by_twin(form, values, bits), "kernel": by_kernel(form, values, device, bits)}
    for name, found in sides.items():
        for one, other in zip(found, expected, strict=True):
            assert_same_bits(one, other, f"{name} of {form.name}")
    return expected


LOWER_HALVES = (0, 1, 0x7F, 0x80, 0x81, 0x0FFF, 0x8000, 0x9000, 0xFFFF)
"""At the ends and the middle."""


def upper_halves(lower_halves=LOWER_HALVES):
    """Every upper half of fp32 with some lower halves; NaNs canonical."""
    upper = np.arange(2**16, dtype=np.uint32)[:, None] << 16
    patterns = (upper | np.array(lower_halves, dtype=np.uint32)).reshape(-1)
    return torch.from_numpy(oracle.canonical(patterns.view(np.float32)))


def every_pattern_of_16_bits():
    """As fp32: all of bf16, all of fp16."""
    patterns = np.arange(2**16, dtype=np.uint16)
    upper = (patterns.astype(np.uint32) << 16).view(np.float32)
    return torch.from_numpy(np.concatenate([upper, patterns.view(np.float16).astype(np.float32)]))


def ties(form):
    """Between each two neighbouring codes the middle, and the fp32 numbers just beside it.

    Returns the values and the codes that they must get: on a tie the even one.
    """
    positive = torch.arange(256, dtype=torch.uint8).view(form.dtype).float()[:128]
    codes = [code for code in range(127) if positive[code + 1].isfinite()]
    middles = torch.stack([(positive[code] + positive[code + 1]) / 2 for code in codes])
    beside = [middles.view(torch.int32) + step for step in (-1, 0, 1)]
    values = torch.stack(beside, 1).view(torch.float32).flatten()
    expected = torch.tensor([[code, code + code % 2, code + 1] for code in codes]).flatten()
    both = torch.cat([expected, expected + 128]).to(torch.uint8).view(form.dtype)
    return torch.cat([values, -values]), both


def assert_encodes(form, values, expected, device):
    """Fails unless the twin, on the CPU and on the device, and the kernel give these codes."""
    for place in {torch.device("cpu"), device}:
        assert_same_bits(form.encode_reference(values.to(place)), expected, f"twin on {place}")
    assert_same_bits(by_kernel(form, values, device)[0], expected, "kernel")
