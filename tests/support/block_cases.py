"""Moments in blocks by themselves: stored and read again by kernel, twin and oracle."""

import block_oracle
import numpy as np
import torch
from bits import assert_same_bits

from megaopt.kernels.chunks import blocks
from megaopt.kernels.chunks.batch import Formats
from megaopt.kernels.chunks.spec import KernelSpec
from megaopt.kernels.chunks.table import Geometry
from megaopt.kernels.formats import GRADS, MOMENTS, NONE, WEIGHTS
from megaopt.kernels.formats.block8 import factor, inverse_factor
from megaopt.kernels.optional_triton import INTERPRETED, helper, jit, tl
from megaopt.kernels.rules import RULES
from megaopt.kernels.step.reference import decoded, store_blocks

LINEAR = [form for form in MOMENTS.values() if form.block and "int8" in form.name]
BLOCKS = [f for f in MOMENTS.values() if f.block and f.packed == 1 and f not in LINEAR]
BLOCKS_OF_4_BITS = [form for form in MOMENTS.values() if form.packed == 2]
# the interpreter takes as long for a large tile as for a small one
TILE = 65536 if INTERPRETED else 1024
FUNCTIONS = ("offsets_of", "rows_of", "inside", "new_scale_of", "store_scale", "load_scale")
FUNCTIONS = (*FUNCTIONS, "load_pairs", "store_pairs")


@helper
def chunk(
    lead,
    elements,
    SPEC: tl.constexpr,
    OFFSETS_OF: tl.constexpr,
    ROWS_OF: tl.constexpr,
    INSIDE: tl.constexpr,
):
    """All elements as one chunk, which begins `lead` elements before them.

    Where it starts, from the first on, the offsets and rows of the tile, how many elements the
    chunk has, and which are inside.
    """
    start = tl.zeros((), tl.int64) - lead
    count = (elements + lead).to(tl.int32)
    FORMATS: tl.constexpr = SPEC.formats
    offsets = OFFSETS_OF(tl.program_id(0), SPEC)
    rows = ROWS_OF(tl.program_id(0), SPEC)
    return start, offsets, rows, count, INSIDE(offsets, start, count, FORMATS)


@jit(do_not_specialize=["lead", "elements"])
def store_kernel(
    value_ptr,
    bits_ptr,
    code_ptr,
    scale_ptr,
    lead,
    elements,
    SPEC: tl.constexpr,
    OFFSETS_OF: tl.constexpr,
    ROWS_OF: tl.constexpr,
    INSIDE: tl.constexpr,
    NEW_SCALE_OF: tl.constexpr,
    STORE_SCALE: tl.constexpr,
    LOAD_SCALE: tl.constexpr,
    LOAD_PAIRS: tl.constexpr,
    STORE_PAIRS: tl.constexpr,
):
    FORMATS: tl.constexpr = SPEC.formats
    FORMAT: tl.constexpr = FORMATS.moments[0]
    start, offsets, rows, count, mask = chunk(lead, elements, SPEC, OFFSETS_OF, ROWS_OF, INSIDE)
    value = tl.load(value_ptr + start + offsets, mask=mask, other=0.0)
    scale = NEW_SCALE_OF((value,), mask, FORMATS, 0)
    STORE_SCALE(scale_ptr, scale, rows, count, FORMAT.block, True)
    inverse = inverse_factor(scale)[:, None]
    if FORMAT.draws:
        bits = tl.load(bits_ptr + start + offsets, mask=mask, other=0)
        code = FORMAT.encode(value, inverse, bits)
    else:
        code = FORMAT.encode(value, inverse)
    if FORMAT.packed == 2:
        STORE_PAIRS(code_ptr + start // 2, offsets, rows, code, mask)
    else:
        tl.store(code_ptr + start + offsets, code, mask=mask)


@jit(do_not_specialize=["lead", "elements"])
def read_kernel(
    value_ptr,
    code_ptr,
    scale_ptr,
    lead,
    elements,
    SPEC: tl.constexpr,
    OFFSETS_OF: tl.constexpr,
    ROWS_OF: tl.constexpr,
    INSIDE: tl.constexpr,
    NEW_SCALE_OF: tl.constexpr,
    STORE_SCALE: tl.constexpr,
    LOAD_SCALE: tl.constexpr,
    LOAD_PAIRS: tl.constexpr,
    STORE_PAIRS: tl.constexpr,
):
    FORMATS: tl.constexpr = SPEC.formats
    FORMAT: tl.constexpr = FORMATS.moments[0]
    start, offsets, rows, count, mask = chunk(lead, elements, SPEC, OFFSETS_OF, ROWS_OF, INSIDE)
    scale = factor(LOAD_SCALE(scale_ptr, rows, count, FORMATS, 0, True))[:, None]
    if FORMAT.packed == 2:
        code = LOAD_PAIRS(code_ptr + start // 2, offsets, rows, mask)
    else:
        code = tl.load(code_ptr + start + offsets, mask=mask, other=0)
    tl.store(value_ptr + start + offsets, FORMAT.decode(code, scale), mask=mask)


def formats_of(form):
    """A batch with this moment alone."""
    return Formats(GRADS[torch.float32], WEIGHTS[torch.float32], NONE, (form,), ("exp_avg",))


def spec_of(form):
    return KernelSpec(
        formats_of(form), RULES["adamw", "ieee"], False, Geometry(TILE, 1, TILE // 256)
    )


def scale_count(form, count, lead):
    return -(-(count + lead) // form.block) if count else 0


def launched(kernel, form, tensors, lead, module):
    functions = [getattr(module, name) for name in FUNCTIONS]
    count = tensors[0].numel()
    programs = -(-(count + lead) // TILE)
    with np.errstate(all="ignore"):
        kernel[(programs,)](*tensors, lead, count, spec_of(form), *functions)


def as_element(form, code):
    """Codes as the kernel takes them."""
    return code.view(torch.int8) if form.element == tl.int8 else code


def stored_by_kernel(form, value, bits, lead, device, module=blocks):
    """Codes and scales; module: megaopt.kernels.chunks.blocks, or a mutant of it."""
    code = torch.zeros(value.numel() // form.packed, dtype=torch.uint8, device=device)
    scale = torch.zeros(scale_count(form, value.numel(), lead), dtype=torch.uint8, device=device)
    own = as_element(form, code)
    bits = torch.zeros(1, dtype=torch.int32) if bits is None else bits
    tensors = [value.to(device), bits.to(device), own, scale]
    launched(store_kernel, form, tensors, lead, module)
    return code.cpu(), scale.cpu()


def read_by_kernel(form, code, scale, lead, device, module=blocks):
    value = torch.zeros(code.numel() * form.packed, device=device)
    own = as_element(form, code.to(device))
    launched(read_kernel, form, [value, own, scale.to(device)], lead, module)
    # a NaN's bits are its maker's until something is stored
    return value.masked_fill(value.isnan(), torch.nan).cpu()


def stored_by_twin(form, value, bits=None, lead=0):
    code = torch.zeros(value.numel() // form.packed, dtype=torch.uint8)
    scale = torch.zeros(scale_count(form, value.numel(), lead), dtype=torch.uint8)
    store_blocks(code, scale, value, form, lead, *([bits] if form.draws else []))
    return code, scale


def read_by_twin(form, code, scale, lead=0):
    return decoded(form, code, scale, lead)


def stored_by_oracle(form, value, bits=None, lead=0):
    own = None if bits is None else bits.numpy().astype(np.int64)
    code, scale = block_oracle.encode(form.name, value.numpy(), lead, own)
    return torch.from_numpy(code), torch.from_numpy(scale)


def read_by_oracle(form, code, scale, lead=0):
    found = block_oracle.decode(form.name, code.numpy(), scale.numpy(), lead)
    return torch.from_numpy(np.ascontiguousarray(found))


def random_bits(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2**16, (count,), generator=generator, dtype=torch.int32)


def draws_of(count):
    """The smallest and the largest, and random ones between."""
    bits = random_bits(count)
    bits[::3], bits[1::3] = 0, 65535
    return bits


def random_values(count, seed=0):
    """Of all magnitudes, those of a block within some octaves; some are 0, infinite, NaN."""
    generator = torch.Generator().manual_seed(seed)
    octave = torch.randint(-150, 128, (-(-count // 50),), generator=generator).repeat_interleave(50)
    below = torch.randint(-40, 1, (count,), generator=generator)
    value = torch.randn(count, generator=generator) / 8
    value = torch.ldexp(value.double(), octave[:count] + below).float()
    kind = torch.randint(0, 60, (count,), generator=generator)
    for index, special in enumerate((0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-45, 3.4e38)):
        value = torch.where(kind == index, special, value)
    return value


def assert_read(form, code, scale, lead, device, module=blocks):
    """Fails unless kernel, twin and oracle read the same; returns it."""
    expected = read_by_oracle(form, code, scale, lead)
    assert_same_bits(read_by_twin(form, code, scale, lead), expected, f"twin reads {form.name}")
    found = read_by_kernel(form, code, scale, lead, device, module)
    assert_same_bits(found, expected, f"kernel reads {form.name}")
    return expected


def assert_stored(form, value, device, lead=0, seed=0, module=blocks):
    """Fails unless kernel, twin and oracle store and read the same; returns codes and scales."""
    bits = random_bits(value.numel(), seed) if form.draws else None
    expected = stored_by_oracle(form, value, bits, lead)
    sides = {
        "twin": stored_by_twin(form, value, bits, lead),
        "kernel": stored_by_kernel(form, value, bits, lead, device, module),
    }
    for name, (code, scale) in sides.items():
        assert_same_bits(scale, expected[1], f"scales of {form.name} by the {name}")
        assert_same_bits(code, expected[0], f"codes of {form.name} by the {name}")
    assert_read(form, *expected, lead, device, module)
    return expected
