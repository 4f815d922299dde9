"""Philox4x32 and the random bits of a step, from their definitions: numpy's uint64, no wrapping.

Salmon, Moraes, Dror & Shaw 2011, section 3.3. Nothing of megaopt is used here.
"""

import numpy as np

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 7
WORD = 2**32


def philox(counter, key, rounds=ROUNDS):
    """Four words, uint64 below 2**32: of a counter of four such arrays and a key of two numbers."""
    first, second, third, fourth = (np.asarray(each, np.uint64) for each in counter)
    for done in range(rounds):
        keys = [np.uint64((own + done * weyl) % WORD) for own, weyl in zip(key, WEYL, strict=True)]
        high_1, low_1 = np.divmod(first * np.uint64(MULTIPLIERS[0]), np.uint64(WORD))
        high_3, low_3 = np.divmod(third * np.uint64(MULTIPLIERS[1]), np.uint64(WORD))
        first, second = high_3 ^ second ^ keys[0], low_3
        third, fourth = high_1 ^ fourth ^ keys[1], low_1
    return first, second, third, fourth


def elements(place, count):
    """Of a tensor, the index of each element in the whole parameter."""
    _, first, run, stride = place
    return [first + (i // run * stride + i % run if stride else i) for i in range(count)]


def words(place, count, seed, step):
    """The word of each of a tensor's elements, uint64 below 2**32.

    place: the parameter's number, the tensor's first element, elements in a run, and from one run
    to the next.
    """
    indices = elements(place, count)
    quads = [index // 4 for index in indices]
    counter = (
        [quad % WORD for quad in quads],
        [quad // WORD for quad in quads],
        [place[0]] * count,
        [step] * count,
    )
    four = philox(counter, (seed % WORD, seed // WORD))
    lanes = [index % 4 for index in indices]
    return np.stack(four)[lanes, np.arange(count)]


def times_x(half, power):
    """half * x**power modulo x**16 + x**12 + x**3 + x + 1, bit by bit from the top."""
    product = half << np.uint64(power)
    for degree in range(15 + power, 15, -1):
        has = (product >> np.uint64(degree)) & np.uint64(1)
        product = product ^ has * np.uint64(0b1_0001_0000_0000_1011 << (degree - 16))
    return product


def bits_by_slot(found, moments):
    """What each slot draws: 16 bits of the word, or two halves' exclusive or."""
    low, high = found % np.uint64(2**16), found // np.uint64(2**16)
    # the first moment's, the second's, then those of the others: products in GF(2**16)
    own = [low ^ high, high, *(low ^ times_x(high, place) for place in range(1, len(moments)))]
    halves = {"weight": low, **dict(zip(moments, own, strict=False))}
    return {slot: half.astype(np.int64) for slot, half in halves.items()}
