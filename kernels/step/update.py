"""One block of the step: load and decode, update, encode and store."""

from __future__ import annotations

from megaopt.kernels.chunks.blocks import load_block, store_block, store_where, stored_moments
from megaopt.kernels.chunks.chunk import entry
from megaopt.kernels.chunks.codes import loaded_moments, loaded_param
from megaopt.kernels.chunks.rows import VECTORIZED
from megaopt.kernels.chunks.store import joined_codes
from megaopt.kernels.optional_triton import helper, tl
from megaopt.kernels.rules.adam_ieee import canonical


@helper
def controlled_grad(grad, chunk, block, SPEC: tl.constexpr):
    """The gradient unscaled and clipped, each with one rounding, or with a second one.

    One that is unscaled is stored so where the formats write gradients.
    """
    if SPEC.controlled:
        FORMATS: tl.constexpr = SPEC.formats
        grad_scale, inverse_scale, coefficient, unscaled = chunk.controls
        # fp32; the rule says whether by a product or a division
        grad = SPEC.rule.unscale(grad, grad_scale, inverse_scale)
        if SPEC.writes_grad:
            # in the gradient's place goes the unscaled one, not yet clipped
            code = FORMATS.grad.encode(canonical(grad), 1.0)
            # a mask, as a branch takes 90 registers where this takes 64
            unscaled = unscaled.to(tl.int32)
            store_where(unscaled, chunk.pointers.grad, block.offsets, code, block.mask)
        # clipped; through the gradient's format before and after where that is asked for
        grad = rounded_grad(rounded_grad(grad, FORMATS) * coefficient, FORMATS)
    return grad


@helper
def rounded_grad(grad, FORMATS: tl.constexpr):
    if FORMATS.rounds_grad:
        grad = FORMATS.grad.decode(FORMATS.grad.encode(grad, 1.0), 1.0)
    return grad


@helper
def first_lane(chunk, offsets):
    """Returns whether torch's kernel takes an element as a thread's first of four (adam_torch)."""
    vectorized = entry(chunk.column, VECTORIZED)
    # the place modulo 65,536 is enough: 4 * 512 divides that
    index = (chunk.start % 65536).to(tl.int32) + offsets
    # neighbours in fours, or four that lie 512 apart
    return tl.where(vectorized != 0, index, index // 512) % 4 == 0


@helper
def loaded_and_updated(chunk, scales, block, SPEC: tl.constexpr):
    """The new fp32 param and moments of one block; of these nothing is stored.

    Where SPEC does not read param it is neither loaded nor meant.
    """
    FORMATS: tl.constexpr = SPEC.formats
    # fp32 gradient, unscaled and clipped
    grad = FORMATS.grad.decode(load_block(chunk.pointers.grad, block.offsets, block.mask), 1.0)
    grad = controlled_grad(grad, chunk, block, SPEC)
    # fp32 moments, then the value that the rule updates
    moments = loaded_moments(chunk, scales.moments, block, FORMATS)
    if SPEC.reads_param:
        param = loaded_param(chunk.pointers, scales.param, block.offsets, block.mask, FORMATS)
    else:
        param = tl.zeros_like(grad)
    return updated(grad, param, moments, chunk, block.offsets, SPEC)


@helper
def updated(grad, param, moments, chunk, offsets, SPEC: tl.constexpr):
    """The new fp32 param and moments."""
    FORMATS: tl.constexpr = SPEC.formats
    # Triton's -grad is 0 - grad, which makes +0 of both zeros
    if FORMATS.maximize:
        grad = grad * -1.0
    if SPEC.rule.lanes:
        # which elements torch's kernel does not contract (rules/lanes.py)
        is_rounded = first_lane(chunk, offsets)
        if FORMATS.maximize:
            # with maximize all are rounded
            is_rounded = offsets >= 0
        if SPEC.controlled:
            # an unscaled gradient is contracted for every element
            is_rounded = is_rounded & (chunk.controls[3] + tl.zeros_like(grad) == 0)
        values = SPEC.rule.update(param, moments, grad, chunk.scalars, is_rounded)
    else:
        values = SPEC.rule.update(param, moments, grad, chunk.scalars)
    if SPEC.rule.makes_nan_canonical:
        values = canonical_values(values, FORMATS)
    return values


@helper
def canonical_values(values, FORMATS: tl.constexpr):
    """The same, NaNs as one pattern where their bits can be seen."""
    param, moments = values
    COUNT: tl.constexpr = FORMATS.moment_count
    if FORMATS.master.present or not FORMATS.weight.one_nan:
        param = canonical(param)
    new_moments = ()
    for index in tl.static_range(COUNT):
        new_moments += (canonical_moment(moments[index], FORMATS, index),)
    return param, new_moments


@helper
def canonical_moment(value, FORMATS: tl.constexpr, INDEX: tl.constexpr):
    FORMAT: tl.constexpr = FORMATS.moments[INDEX]
    if not FORMAT.one_nan:
        value = canonical(value)
    return value


@helper
def stored_block(chunk, scales, block, values, amax_bits, words, FORMATS: tl.constexpr):
    """Encodes and stores what `updated` gave; raises the bits of amaxes, if any are kept."""
    param, moments = values
    if FORMATS.master.joined and not FORMATS.in_place:
        MASTER: tl.constexpr = FORMATS.master
        # one encoding gives both: the weight, and what lies beside it
        weight_code, master_code = joined_codes(param, words, MASTER)
        store_block(chunk.pointers.master, block.offsets, master_code, block.mask)
        store_block(chunk.pointers.weight, block.offsets, weight_code, block.mask)
    else:
        # a master with codes and, maybe, a scale of its own
        if FORMATS.master.present and not FORMATS.in_place:
            master_code = FORMATS.master.encode(param, scales.master_inverse)
            store_block(chunk.pointers.master, block.offsets, master_code, block.mask)
        # the weight as its store has it: plain codes, fp8 codes, or nothing for now
        amax_bits = FORMATS.store.put(
            chunk.pointers, block, param, scales.weight, amax_bits, words, FORMATS
        )
    # moments last, with their block scales where they have any
    stored_moments(chunk, block, moments, scales.moment_inverses, words, FORMATS)
    return amax_bits
