"""Loads and decodes what a block of the step has in memory."""

from __future__ import annotations

from megaopt.kernels.chunks.blocks import load_block, load_pairs, load_scale
from megaopt.kernels.formats.block8 import factor
from megaopt.kernels.optional_triton import cuda_capability_geq, helper, tl


@helper
def loaded_moments(chunk, scales, block, FORMATS: tl.constexpr):
    """fp32; scales: of the tensors, or pointers to those of blocks."""
    COUNT: tl.constexpr = FORMATS.moment_count
    moments = ()
    for index in tl.static_range(COUNT):
        moments += (loaded_moment(chunk, scales[index], block, FORMATS, index),)
    return moments


@helper
def loaded_moment(chunk, scale, block, FORMATS: tl.constexpr, INDEX: tl.constexpr):
    FORMAT: tl.constexpr = FORMATS.moments[INDEX]
    if FORMAT.block:
        MASKED: tl.constexpr = block.mask is not None
        # one scale byte a row, then its factor for the row's elements, fp32 [rows, 1]
        code = load_scale(scale, block.rows, chunk.elements, FORMATS, INDEX, MASKED)
        scale = factor(code)[:, None]
    # codes, of 4 bits in int32, otherwise in the format's element type
    if FORMAT.packed == 2:
        code = load_pairs(chunk.pointers.moments[INDEX], block.offsets, block.rows, block.mask)
    else:
        code = load_block(chunk.pointers.moments[INDEX], block.offsets, block.mask)
    return FORMAT.decode(code, scale)


@helper
def loaded_param(pointers, master_scale, offsets, mask, FORMATS: tl.constexpr):
    """The fp32 value that the rule updates: the master's where there is one, else the weight's."""
    # a code that is not loaded stays 0, and is not decoded
    weight_code, master_code = 0, 0
    if FORMATS.reads_weight:
        weight_code = load_block(pointers.weight, offsets, mask)
    if FORMATS.master.present:
        master_code = load_block(pointers.master, offsets, mask)
    return param_of_codes(weight_code, master_code, master_scale, FORMATS)


@helper
def param_of_codes(weight_code, master_code, master_scale, FORMATS: tl.constexpr):
    """The same of codes; of those that are not needed 0."""
    # a master that lies beside its weight needs both codes
    if FORMATS.master.joined:
        param = FORMATS.master.decode(weight_code, master_code)
    elif FORMATS.master.present:
        # a master by itself, times its scale where it has one
        param = FORMATS.master.decode(master_code, master_scale)
    else:
        # no master: the weight is the value
        param = FORMATS.weight.decode(weight_code, 1.0)
    if FORMATS.in_place:
        param *= master_scale  # scale_inv of the codes
    return param


# --- the codes of a tile's rows as words of 32 bits, several in each
#
# What is loaded a turn of the loop before it is needed lies in registers meanwhile, and the
# compiler gives each code there a register of its own. As words they keep to theirs.


@helper
def load_words(pointers, scales, rows, SPEC: tl.constexpr):
    """Loads the words of whole rows: gradient, weight, master, tuples of moments and their scales.

    What is not there or not needed is 0.
    """
    FORMATS: tl.constexpr = SPEC.formats
    WIDTH: tl.constexpr = SPEC.width
    COUNT: tl.constexpr = FORMATS.moment_count
    GRAD: tl.constexpr = FORMATS.grad
    # int32 [rows, words of a row] each
    grad = words_at(pointers.grad, rows, GRAD, WIDTH)
    # of each moment the words, and one scale byte a row
    moments, moment_scales = (), ()
    for index in tl.static_range(COUNT):
        moments += (moment_words(pointers.moments[index], rows, FORMATS, index, WIDTH),)
        moment_scales += (load_scale(scales[index], rows, 0, FORMATS, index, False),)
    # weight and master, each only where the value is made of it
    weight, master = 0, 0
    if SPEC.reads_param:
        WEIGHT: tl.constexpr = FORMATS.weight
        MASTER: tl.constexpr = FORMATS.master
        if FORMATS.reads_weight:
            weight = words_at(pointers.weight, rows, WEIGHT, WIDTH)
        if MASTER.present:
            master = words_at(pointers.master, rows, MASTER, WIDTH)
    return grad, weight, master, moments, moment_scales


@helper
def moment_words(moment_ptr, rows, FORMATS: tl.constexpr, INDEX: tl.constexpr, WIDTH: tl.constexpr):
    FORMAT: tl.constexpr = FORMATS.moments[INDEX]
    return words_at(moment_ptr, rows, FORMAT, WIDTH)


@helper
def words_at(ptr, rows, FORMAT: tl.constexpr, WIDTH: tl.constexpr):
    """int32 [rows, words of a row]; of codes of 32 bits the codes, [rows, WIDTH]."""
    EACH: tl.constexpr = FORMAT.codes_a_word
    if EACH > 1:
        # as words: rows are whole, so that no word holds elements of two rows
        ptr = ptr.to(tl.pointer_type(tl.int32))
    words = ptr + rows[:, None] // EACH + tl.arange(0, WIDTH // EACH)[None, :]
    return tl.load(tl.multiple_of(words, [16, 16]))


@helper
def numbers_of(words, scales, SPEC: tl.constexpr):
    """The fp32 gradient, param and moments."""
    FORMATS: tl.constexpr = SPEC.formats
    WIDTH: tl.constexpr = SPEC.width
    grad_words, weight, master, moment_words, scale_codes = words
    COUNT: tl.constexpr = FORMATS.moment_count
    GRAD: tl.constexpr = FORMATS.grad
    # fp32 [rows, WIDTH], as are moments and param
    grad = decoded(grad_words, 1.0, GRAD, WIDTH)
    moments = ()
    for index in tl.static_range(COUNT):
        moments += (
            decoded_moment(
                moment_words[index],
                scales.moments[index],
                scale_codes[index],
                FORMATS,
                index,
                WIDTH,
            ),
        )
    if SPEC.reads_param:
        param = decoded_param(weight, master, scales.param, FORMATS, WIDTH)
    else:
        # the rule reads no param
        param = tl.zeros_like(grad)
    return grad, param, moments


@helper
def decoded_moment(
    words, scale, scale_code, FORMATS: tl.constexpr, INDEX: tl.constexpr, WIDTH: tl.constexpr
):
    FORMAT: tl.constexpr = FORMATS.moments[INDEX]
    if FORMAT.block:
        scale = factor(scale_code)[:, None]
    return decoded(words, scale, FORMAT, WIDTH)


@helper
def decoded_param(weight, master, master_scale, FORMATS: tl.constexpr, WIDTH: tl.constexpr):
    WEIGHT: tl.constexpr = FORMATS.weight
    MASTER: tl.constexpr = FORMATS.master
    if MASTER.joined:
        # joined codes have no words to decode together: one by one
        param = MASTER.decode(
            codes_of_words(weight, WEIGHT, WIDTH), codes_of_words(master, MASTER, WIDTH)
        )
    elif MASTER.present:
        param = decoded(master, master_scale, MASTER, WIDTH)
    else:
        param = decoded(weight, 1.0, WEIGHT, WIDTH)
    if FORMATS.in_place:
        param *= master_scale  # scale_inv of the codes
    return param


@helper
def decoded(words, scale, FORMAT: tl.constexpr, WIDTH: tl.constexpr):
    """The numbers of rows of words, fp32 [rows, WIDTH]."""
    if cuda_capability_geq(9, 0) and FORMAT.decode_words is not None:
        # several codes of a word at once, by instructions of Hopper
        numbers = in_order(FORMAT.decode_words(words, scale), FORMAT.codes_a_word, WIDTH)
    else:
        # elsewhere codes are shifted out of the words first
        numbers = FORMAT.decode(codes_of_words(words, FORMAT, WIDTH), scale)
    return numbers


@helper
def codes_of_words(words, FORMAT: tl.constexpr, WIDTH: tl.constexpr):
    """[rows, WIDTH]."""
    EACH: tl.constexpr = FORMAT.codes_a_word
    if EACH > 1:
        # the first code of a word lies in its lowest bits
        codes = ()
        for place in tl.static_range(EACH):
            codes += (code_of(words >> (32 // EACH * place), FORMAT),)
        words = in_order(codes, EACH, WIDTH)
    return words


@helper
def code_of(word, FORMAT: tl.constexpr):
    """The code in a word's lower bits."""
    return word & 15 if FORMAT.packed == 2 else word.to(FORMAT.element)


@helper
def in_order(parts, COUNT: tl.constexpr, WIDTH: tl.constexpr):
    """Puts what words have at their first, second, ... place, [rows, words] each, in order.

    The result is of shape [rows, WIDTH].
    """
    # joins put a new dimension last: of two, then of four, then of eight
    if COUNT == 2:
        tile = tl.join(parts[0], parts[1])
    elif COUNT == 4:
        tile = in_fours(parts[0], parts[1], parts[2], parts[3])
    else:
        # places 0 2 4 6, then 1 3 5 7 between them
        even = in_fours(parts[0], parts[2], parts[4], parts[6])
        tile = tl.join(even, in_fours(parts[1], parts[3], parts[5], parts[7]))
    return tl.reshape(tile, (tile.shape[0], WIDTH))


@helper
def in_fours(first, second, third, fourth):
    return tl.join(tl.join(first, third), tl.join(second, fourth))
