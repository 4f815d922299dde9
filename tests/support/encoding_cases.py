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
def decode_kernel(code_ptr, value_ptr, FORMAT: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(value_ptr + offsets, FORMAT.decode(tl.load(code_ptr + offsets), 1.0))


def run(kernel, *tensors, form):
    block = 4096
    assert tensors[0].numel() % block == 0
    with np.errstate(all="ignore"):
        kernel[(tensors[0].numel() // block,)](*tensors, form, block)


def oracle_codes(form, values):
    codes, _ = oracle.encode(form.name, values.numpy())
    return torch.from_numpy(np.ascontiguousarray(codes))


def kernel_codes(form, values, device):
    """What the kernel stores for values, a multiple of 4096 of them."""
    code = torch.zeros(values.numel(), dtype=form.dtype, device=device)
    integer = {1: torch.int8, 2: torch.int16, 4: torch.float32}[code.element_size()]
    run(encode_kernel, values.to(device), code.view(integer), form=form)
    return code


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


def random_patterns(count):
    """Half of all fp32 patterns, half of numbers where fp8 has codes."""
    generator = np.random.default_rng(0)
    patterns = generator.integers(0, 2**32, count // 2, dtype=np.uint32).view(np.float32)
    exponents = np.exp2(generator.integers(-24, 18, count // 2)).astype(np.float32)
    near = generator.standard_normal(count // 2, dtype=np.float32) * exponents
    return torch.from_numpy(np.concatenate([patterns, near]))


def assert_encodes(form, values, expected, device):
    """Fails unless the twin, on the CPU and on the device, and the kernel give these codes."""
    for place in {torch.device("cpu"), device}:
        assert_same_bits(form.encode_reference(values.to(place)), expected, f"twin on {place}")
    padding = torch.zeros(-len(values) % 4096)
    found = kernel_codes(form, torch.cat([values, padding]), device)
    assert_same_bits(found[: len(values)], expected, "kernel")
