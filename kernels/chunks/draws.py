"""The random bits of a step: one word for each element of a parameter, whoever steps it.

A word is a function of the seed, the parameter's number, the element's index in the whole
parameter and the number of the step. So chunks, shards, replicas, launches, replays and resumes
draw the same.

What is rounded stochastically takes 16 bits of its element's word: weights and what lies beside
them the lower ones, a rule's second moment the upper ones, its first their exclusive or, which is
independent of each. The moment with index i >= 2 takes lower ^ x**(i - 1) * upper, a product in
GF(2**16): as x**i - x**j has an inverse, any two of all these are independent.
"""

from __future__ import annotations

from typing import Any

import torch

from megaopt.kernels.chunks.chunk import entry
from megaopt.kernels.chunks.rows import FIRST_ELEMENT, NUMBER, RUN, RUN_STRIDE
from megaopt.kernels.optional_triton import helper, tl
from megaopt.kernels.place import Place

# Philox4x32: Salmon, Moraes, Dror & Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3". Seven
# rounds are the fewest that pass BigCrush there.
MASK = 0xFFFFFFFF
OWN_ROUNDS = 7
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
"""The numbers that each round adds to the key."""

ROUNDS: tl.constexpr = tl.constexpr(OWN_ROUNDS)
MULTIPLIER_0: tl.constexpr = tl.constexpr(MULTIPLIERS[0])
MULTIPLIER_2: tl.constexpr = tl.constexpr(MULTIPLIERS[1])
WEYL_0: tl.constexpr = tl.constexpr(WEYL[0])
WEYL_1: tl.constexpr = tl.constexpr(WEYL[1])


@helper
def philox(counter_0, counter_1, counter_2, counter_3, key_0, key_1):
    """Four uint32 words from a counter of four, of one shape, and a key of two single numbers."""
    for _ in tl.static_range(ROUNDS):
        # two products of 64 bits: the upper halves are mixed in, the lower ones move on
        product_0 = counter_0.to(tl.uint64) * MULTIPLIER_0
        product_2 = counter_2.to(tl.uint64) * MULTIPLIER_2
        counter_0 = (product_2 >> 32).to(tl.uint32) ^ counter_1 ^ key_0
        counter_2 = (product_0 >> 32).to(tl.uint32) ^ counter_3 ^ key_1
        counter_1, counter_3 = product_2.to(tl.uint32), product_0.to(tl.uint32)
        # the next round's key
        key_0 = (key_0 + WEYL_0).to(tl.uint32)
        key_1 = (key_1 + WEYL_1).to(tl.uint32)
    return counter_0, counter_1, counter_2, counter_3


def philox_reference(
    counter: tuple[torch.Tensor, ...], key: tuple[int, int], rounds: int = OWN_ROUNDS
) -> tuple[torch.Tensor, ...]:
    """The twin: four words as int64 tensors, each from 0 to 2**32 - 1.

    counter: int64 of one shape, with numbers of 32 bits. rounds: other ones for known answers.
    """
    first, second, third, fourth = counter
    key_0, key_1 = key
    for _ in range(rounds):
        # int64 products wrap: their bits are those of the unsigned ones
        product_0, product_2 = first * MULTIPLIERS[0], third * MULTIPLIERS[1]
        first = ((product_2 >> 32) & MASK) ^ second ^ key_0
        third = ((product_0 >> 32) & MASK) ^ fourth ^ key_1
        second, fourth = product_2 & MASK, product_0 & MASK
        key_0, key_1 = (key_0 + WEYL[0]) & MASK, (key_1 + WEYL[1]) & MASK
    return first, second, third, fourth


# x**16 + x**12 + x**3 + x + 1, primitive: powers of x are all different
POLYNOMIAL = 0x1100B
REDUCED_BY: tl.constexpr = tl.constexpr(POLYNOMIAL)


def seed_and_step(numbers: tuple[float, ...]) -> tuple[tuple[int, int], int]:
    """The key of Philox, and the step, from a group's numbers (rules.base.draw_numbers)."""
    parts = [int(number) for number in numbers]
    return (parts[0] | parts[1] << 16, parts[2] | parts[3] << 16), parts[4] | parts[5] << 16


def words_reference(place: Place, numel: int, numbers: Any, device: torch.device) -> torch.Tensor:
    """The words of a tensor's elements, int64, each from 0 to 2**32 - 1.

    numbers: of the group, as rules.base.draw_numbers makes them.
    """
    if not place.stride:
        # elements follow each other: whole quads are drawn, and what is outside is cut off
        key, step = seed_and_step(numbers)
        skipped = place.first % 4
        index = torch.arange(place.first // 4, (place.first + numel + 3) // 4, device=device)
        words = torch.stack(_quads(index, place.number, step, key), 1)
        return words.view(-1)[skipped : skipped + numel]
    # in runs: the index of each element in the parameter, int64 [numel]
    offset = torch.arange(numel, device=device)
    index = place.first + offset // place.run * place.stride + offset % place.run
    return words_at(index, place.number, numbers)


def words_at(index: torch.Tensor, number: int, numbers: Any) -> torch.Tensor:
    """The words of a parameter's elements with these indices, int64; number: the parameter's."""
    key, step = seed_and_step(numbers)
    # [4, n], of which each element takes the word at its place in the quad
    words = torch.stack(_quads(index // 4, number, step, key))
    return words.gather(0, (index % 4)[None])[0]


def _quads(
    index: torch.Tensor, number: int, step: int, key: tuple[int, int]
) -> tuple[torch.Tensor, ...]:
    # counter: the quad's index in two words, the parameter's number, the step
    rest = (torch.full_like(index, number), torch.full_like(index, step))
    return philox_reference((index & 0xFFFFFFFF, index >> 32, *rest), key)


def weight_bits_reference(words: torch.Tensor) -> torch.Tensor:
    """Returns int32 bits, from 0 to 65535, for a weight or what lies beside it."""
    return (words & 0xFFFF).int()


def moment_bits_reference(words: torch.Tensor, index: int) -> torch.Tensor:
    """Returns int32 bits, from 0 to 65535, for the rule's moment with this index."""
    upper = words >> 16
    if index != 1:
        # times x, index - 1 times, in GF(2**16)
        for _ in range(index - 1):
            upper = (upper << 1) ^ (((upper >> 15) & 1) * POLYNOMIAL)
        upper = upper ^ words
    return (upper & 0xFFFF).int()


@helper
def sixteens(row_ptr, place):
    """A uint32 from two pieces of 16 bits."""
    low = tl.load(row_ptr + place).to(tl.int32)
    high = tl.load(row_ptr + place + 1).to(tl.int32)
    return (low | (high << 16)).to(tl.uint32, bitcast=True)


@helper
def draw_of(column, row_ptr, DRAWS: tl.constexpr):
    """Returns what a tensor's words are made from; row_ptr: to its group's numbers for draws."""
    if DRAWS:
        # seed in two words, and the step; uint32
        key = (sixteens(row_ptr, 0), sixteens(row_ptr, 2), sixteens(row_ptr, 4))
        # the parameter's number, and where its elements lie: first, run, stride, int64
        number = entry(column, NUMBER).to(tl.uint32)
        first = entry(column, FIRST_ELEMENT)
        run = entry(column, RUN)
        stride = entry(column, RUN_STRIDE)
        draw = (key, number, first, run, stride)
    else:
        # placeholders of one shape: nothing draws
        draw = ((0, 0, 0), 0, 0, 0, 0)
    return draw


@helper
def words_of(index, key, number):
    """The four words of the quads with these indices, int64."""
    # counter as the twin's _quads: index low and high, number, step
    low = index.to(tl.uint32)
    high = (index >> 32).to(tl.uint32)
    none = tl.zeros_like(low)
    return philox(low, high, none + number, none + key[2], key[0], key[1])


@helper
def quad_words(index, key, number):
    """The words of quads, [..., 2, 2]."""
    words = words_of(index, key, number)
    # joined to [..., 2, 2], so that flattening gives words 0, 1, 2, 3
    return tl.join(tl.join(words[0], words[2]), tl.join(words[1], words[3]))


@helper
def tile_words(quad, key, number, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """The words of a tile from its first quad on; each thread draws those of its row."""
    # [ROWS], the first quad of each row; WIDTH is 4 or 8, one quad or two
    row = quad + tl.arange(0, ROWS) * (WIDTH // 4)
    word = quad_words(row, key, number)
    if WIDTH == 8:
        # the last dimension, of the two quads, comes to the front of a row's
        word = tl.permute(tl.join(word, quad_words(row + 1, key, number)), (0, 3, 1, 2))
    return word


@helper
def block_words(
    draw,
    start,
    begin,
    offsets,
    DRAWS: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
    IN_QUADS: tl.constexpr,
):
    """int32, the words of a block's elements; 0 without DRAWS.

    Args:
        draw: as draw_of makes it.
        start: int64, the chunk's first element in the tensor.
        begin: the block's first element in the chunk; needed with IN_QUADS.
        offsets: of the block's elements in the chunk.
        DRAWS: whether a format needs random bits.
        SPLIT: whether a tensor may have a stride, whose division takes 14 to 28 registers.
        BLOCK: with IN_QUADS how many elements the block has.
        IN_QUADS: its elements follow each other, and the first is the first of a quad; otherwise
            each element draws its quad's four words and takes one.
    """
    key, number, first, run, stride = draw
    if not DRAWS:
        word = 0
    elif IN_QUADS:
        # whole quads: a thread draws four words by one philox
        quad = (first + start) // 4 + begin // 4
        if len(offsets.shape) == 2:
            word = tile_words(quad, key, number, offsets.shape[0], offsets.shape[1])
        else:
            word = quad_words(quad + tl.arange(0, BLOCK // 4), key, number)
        word = tl.reshape(word, offsets.shape).to(tl.int32, bitcast=True)
    else:
        # one philox an element, of whose four words one is taken
        place = start + offsets
        index = first + place
        if SPLIT and stride != 0:
            index = first + (place // run) * stride + place % run
        # the element's quad, and its lane there
        words = words_of(index >> 2, key, number)
        lane = (index & 3).to(tl.int32)
        lower = tl.where(lane == 0, words[0], words[1])
        upper = tl.where(lane == 2, words[2], words[3])
        word = tl.where(lane < 2, lower, upper).to(tl.int32, bitcast=True)
    return word


@helper
def line_words(draw, begins, DRAWS: tl.constexpr, WIDTH: tl.constexpr):
    """int32 [lines, WIDTH], the words of lines whose first elements are the first of quads.

    begins: int64, these elements' places in the tensor.
    """
    key, number, first, _run, _stride = draw
    if DRAWS:
        # int64 [lines, WIDTH // 4]
        quads = ((first + begins) // 4)[:, None] + tl.arange(0, WIDTH // 4)[None, :]
        word = tl.reshape(quad_words(quads, key, number), (begins.shape[0], WIDTH))
        word = word.to(tl.int32, bitcast=True)
    else:
        word = 0
    return word


@helper
def weight_bits(word):
    """int32, from 0 to 65535."""
    return word & 0xFFFF


@helper
def moment_bits(word, INDEX: tl.constexpr):
    upper = word >> 16
    if INDEX != 1:
        # times x, INDEX - 1 times, in GF(2**16), as moment_bits_reference
        for _ in tl.static_range(INDEX - 1):
            upper = (upper << 1) ^ (((upper >> 15) & 1) * REDUCED_BY)
        upper = upper ^ word
    return upper & 0xFFFF
