"""Codes that are read as words of 32 bits: every code, in every place of a word."""

import numpy as np
import pytest
import torch
from bits import INTEGERS, assert_same_bits

from megaopt.kernels.chunks.codes import decoded, words_at
from megaopt.kernels.formats import GRADS, MOMENTS, WEIGHTS
from megaopt.kernels.formats.block8 import factor_reference
from megaopt.kernels.optional_triton import INTERPRETED, jit, tl

FORMS = {form.name: form for table in (GRADS, WEIGHTS, MOMENTS) for form in table.values()}
FORMS = {name: form for name, form in FORMS.items() if form.present and not form.scaled}
ROWS = 8192 if INTERPRETED else 128


@jit
def read_kernel(code_ptr, factor_ptr, value_ptr, FORMAT: tl.constexpr, ROWS: tl.constexpr):
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)) * 8
    scale = tl.load(factor_ptr + rows // 8)[:, None]
    value = decoded(words_at(code_ptr, rows, FORMAT, 8), scale, FORMAT, 8)
    tl.store(value_ptr + rows[:, None] + tl.arange(0, 8)[None, :], value)


def every_code(form, scales):
    """Each code of 16 bits or less once under each of the scales, in another order each time."""
    bits = {1: 8, 2: 16, 4: 32}[form.dtype.itemsize] // form.packed
    generator = torch.Generator().manual_seed(0)
    if bits == 32:
        return torch.randint(-(2**31), 2**31, (65536 * scales,), generator=generator)
    count = 2**bits * max(8192 >> bits, 1)
    orders = [torch.randperm(count, generator=generator) % 2**bits for _ in range(scales)]
    return torch.cat(orders)


def reference(form, code, scale):
    """By the twin; a block's elements have their factor."""
    value = form.decode_reference(code, factor_reference(scale) if form.block else None)
    return value.float()


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.sample(2)
def test_words_are_read_as_their_codes_are(form, device):
    scales = torch.arange(1, 254) if form.block else torch.tensor([127])
    code = every_code(form, len(scales))
    each = code.numel() // len(scales)
    padding = -code.numel() % (8 * ROWS)
    code = torch.nn.functional.pad(code, (0, padding))
    scale = torch.nn.functional.pad(scales.repeat_interleave(each), (0, padding), value=127).byte()
    stored = code[0::2] | code[1::2] << 4 if form.packed == 2 else code
    own = stored.to(INTEGERS[form.dtype.itemsize]).view(form.dtype)
    alone = code.to(torch.uint8) if form.packed == 2 else own
    value = torch.empty(code.numel(), device=device)
    element = own.view({1: torch.int8, 2: torch.int16, 4: torch.float32}[own.element_size()])
    element = element.view(torch.uint8) if form.element == tl.uint8 else element
    factor = factor_reference(scale)[::8].contiguous().to(device)
    with np.errstate(all="ignore"):
        read_kernel[(code.numel() // (8 * ROWS),)](element.to(device), factor, value, form, ROWS)
    value, expected = value.cpu(), reference(form, alone, scale)
    # a NaN's bits are its maker's until something is stored
    value, expected = (each.masked_fill(each.isnan(), torch.nan) for each in (value, expected))
    assert_same_bits(value, expected)
