"""The words that elements draw, and what each slot takes of them: twin, kernel and oracle."""

import numpy as np
import philox_oracle
import torch
from bits import assert_same_bits

from megaopt.kernels.chunks import draws
from megaopt.kernels.chunks.chunk import Column
from megaopt.kernels.chunks.rows import FIRST_ELEMENT, NUMBER, RUN, RUN_STRIDE
from megaopt.kernels.optional_triton import jit, tl
from megaopt.kernels.place import Place
from megaopt.kernels.rules.base import draw_numbers

SEED, STEP = 0xFEDC_BA98_7654_3210, 7 + 2**16
CPU = torch.device("cpu")
# a place, and where a chunk starts in the tensor
CASES = [
    (Place(0), 0),
    (Place(3, 8), 64),
    (Place(2**32 - 1, 3), 12),
    (Place(1, 2**34 + 20), 16),
    (Place(5, 10, 7, 64), 8),
]


@jit
def words_kernel(
    table_ptr,  # *int64, one column
    row_ptr,  # *fp32, the group's numbers
    out_ptr,  # *int32: words, then the bits of weight and four moments, CHUNK elements each
    start,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    IN_QUADS: tl.constexpr,
    DRAW_OF: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
    WEIGHT_BITS: tl.constexpr,
    MOMENT_BITS: tl.constexpr,
):
    """Of a chunk's blocks, as the step's kernel asks for them."""
    draw = DRAW_OF(Column(table_ptr, 1, 0), row_ptr, True)
    for block in tl.static_range(BLOCKS):
        offsets = block * BLOCK + tl.arange(0, BLOCK)
        word = BLOCK_WORDS(
            draw, start.to(tl.int64), block * BLOCK, offsets, True, True, BLOCK, IN_QUADS
        )
        tl.store(out_ptr + offsets, word)
        tl.store(out_ptr + BLOCKS * BLOCK + offsets, WEIGHT_BITS(word))
        tl.store(out_ptr + 2 * BLOCKS * BLOCK + offsets, MOMENT_BITS(word, 0))
        tl.store(out_ptr + 3 * BLOCKS * BLOCK + offsets, MOMENT_BITS(word, 1))
        tl.store(out_ptr + 4 * BLOCKS * BLOCK + offsets, MOMENT_BITS(word, 2))
        tl.store(out_ptr + 5 * BLOCKS * BLOCK + offsets, MOMENT_BITS(word, 5))


def numbers_of(seed=SEED, step=STEP):
    return draw_numbers({"seed": seed, "step": step})


def by_kernel(module, place, start, block, blocks, numbers, device, in_quads):
    """int64 [6, elements]: words and bits of the elements from `start` on."""
    table = torch.zeros(RUN_STRIDE.value + 1, dtype=torch.int64)
    rows = (NUMBER, FIRST_ELEMENT, RUN, RUN_STRIDE)
    for row, value in zip(rows, place, strict=True):
        table[row.value] = value
    out = torch.zeros((6, block * blocks), dtype=torch.int32, device=device)
    row = torch.tensor(numbers, device=device)
    functions = (module.draw_of, module.block_words, module.weight_bits, module.moment_bits)
    with np.errstate(all="ignore"):  # products wrap
        words_kernel[(1,)](table.to(device), row, out, start, block, blocks, in_quads, *functions)
    return out.cpu().long() & 0xFFFFFFFF


def by_twin(module, place, count, numbers):
    words = module.words_reference(place, count, numbers, CPU)
    bits = [
        module.weight_bits_reference(words),
        *(module.moment_bits_reference(words, i) for i in (0, 1, 2, 5)),
    ]
    return torch.stack([words, *bits])


def by_oracle(place, start, count, seed, step):
    words = philox_oracle.words(place, start + count, seed, step)[start:]
    slots = list(philox_oracle.bits_by_slot(words, range(6)).values())
    chosen = [
        slots[place] for place in (0, 1, 2, 3, 6)
    ]  # the weight's, and those that kernels draw
    return torch.from_numpy(np.stack([words.astype(np.int64), *chosen]))


def assert_words(place, start, block, device, seed=SEED, step=STEP, module=draws):
    """Fails unless twin, kernel and oracle draw the same for two blocks; module: draws.py's."""
    count = 2 * block
    expected, numbers = by_oracle(place, start, count, seed, step), numbers_of(seed, step)
    twin = by_twin(module, place, start + count, numbers)[:, start:]
    assert_same_bits(twin, expected, "twin")
    own = (module, place, start, block, 2, numbers, device)
    assert_same_bits(by_kernel(*own, False), expected, "kernel, element by element")
    if place.in_quads and start % 4 == 0:
        assert_same_bits(by_kernel(*own, True), expected, "kernel, four at a time")
