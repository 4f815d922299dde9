"""One block of the step: load and decode, update, encode and store."""

from __future__ import annotations

from megaopt.kernels.optional_triton import helper, tl
from megaopt.kernels.rules.adam_ieee import canonical
from megaopt.kernels.step.blocks import load_block, store_block, store_where, stored_moments
from megaopt.kernels.step.codes import loaded_moments, loaded_param
from megaopt.kernels.step.draws import weight_bits
from megaopt.kernels.step.rows import VECTORIZED


@helper
def controlled_grad(
    grad_ptr,
    grad,
    controls,
    offsets,
    mask,
    FORMATS: tl.constexpr,
    RULE: tl.constexpr,
    CONTROLLED: tl.constexpr,
    MASKED: tl.constexpr,
    WRITES_GRAD: tl.constexpr,
):
    """The gradient unscaled and clipped, each with one rounding, or with a second one."""
    if CONTROLLED:
        grad_scale, inverse_scale, coefficient, unscaled = controls
        grad = RULE.unscale(grad, grad_scale, inverse_scale)
        if WRITES_GRAD:
            code = FORMATS.grad.encode(canonical(grad), 1.0)
            # a mask, as a branch takes 90 registers where this takes 64
            store_where(unscaled.to(tl.int32), grad_ptr, offsets, code, mask, MASKED)
        grad = rounded_grad(rounded_grad(grad, FORMATS) * coefficient, FORMATS)
    return grad


@helper
def rounded_grad(grad, FORMATS: tl.constexpr):
    if FORMATS.rounds_grad:
        grad = FORMATS.grad.decode(FORMATS.grad.encode(grad, 1.0), 1.0)
    return grad


@helper
def first_lane(table_ptr, tensors, tensor, start, offsets):
    """Whether torch's kernel takes an element as the first of a thread's four (adam_torch)."""
    vectorized = tl.load(table_ptr + VECTORIZED * tensors + tensor)
    index = (start % 65536).to(tl.int32) + offsets
    return tl.where(vectorized != 0, index, index // 512) % 4 == 0


@helper
def step_grad(
    grad_ptr,
    grad,
    controls,
    offsets,
    mask,
    FORMATS: tl.constexpr,
    RULE: tl.constexpr,
    CONTROLLED: tl.constexpr,
    MASKED: tl.constexpr,
    WRITES_GRAD: tl.constexpr,
):
    """The gradient that the rule takes; with WRITES_GRAD one that is unscaled is stored so."""
    grad = controlled_grad(
        grad_ptr, grad, controls, offsets, mask, FORMATS, RULE, CONTROLLED, MASKED, WRITES_GRAD
    )
    if FORMATS.maximize:
        grad = grad * -1.0
    return grad


@helper
def loaded_and_updated(
    table_ptr,
    place,
    pointers,
    scales,
    scalars,
    controls,
    offsets,
    rows,
    elements,
    mask,
    FORMATS: tl.constexpr,
    RULE: tl.constexpr,
    CONTROLLED: tl.constexpr,
    MASKED: tl.constexpr,
    WITH_PARAM: tl.constexpr,
    WRITES_GRAD: tl.constexpr,
):
    """The new fp32 param and moments of one block; of these nothing is stored.

    Without WITH_PARAM param is neither loaded nor meant: for what of a rule does not need it.
    """
    grad_ptr, weight_ptr, master_ptr, moment_ptrs = pointers
    grad = FORMATS.grad.decode(load_block(grad_ptr, offsets, mask, MASKED), 1.0)
    grad = step_grad(
        grad_ptr, grad, controls, offsets, mask, FORMATS, RULE, CONTROLLED, MASKED, WRITES_GRAD
    )
    moments = loaded_moments(moment_ptrs, scales[1], offsets, rows, elements, mask, FORMATS, MASKED)
    if WITH_PARAM:
        param = loaded_param(weight_ptr, master_ptr, scales[0], offsets, mask, FORMATS, MASKED)
    else:
        param = tl.zeros_like(grad)
    return updated(
        table_ptr,
        place,
        grad,
        param,
        moments,
        scalars,
        controls,
        offsets,
        FORMATS,
        RULE,
        CONTROLLED,
    )


@helper
def updated(
    table_ptr,
    place,
    grad,
    param,
    moments,
    scalars,
    controls,
    offsets,
    FORMATS: tl.constexpr,
    RULE: tl.constexpr,
    CONTROLLED: tl.constexpr,
):
    """The new fp32 param and moments."""
    tensors, tensor, start = place
    if RULE.lanes:
        is_rounded = first_lane(table_ptr, tensors, tensor, start, offsets)
        if FORMATS.maximize:
            is_rounded = offsets >= 0
        if CONTROLLED:
            is_rounded = is_rounded & (controls[3] + tl.zeros_like(grad) == 0)
        values = RULE.update(param, moments, grad, scalars, is_rounded)
    else:
        values = RULE.update(param, moments, grad, scalars)
    if RULE.makes_nan_canonical:
        values = canonical_values(values, FORMATS)
    return values


@helper
def canonical_values(values, FORMATS: tl.constexpr):
    """The same, NaNs as one pattern where their bits can be seen."""
    param, moments = values
    COUNT: tl.constexpr = FORMATS.moment_count
    if FORMATS.master.present or not FORMATS.weight.one_nan:
        param = canonical(param)
    made = ()
    for index in tl.static_range(COUNT):
        made += (canonical_moment(moments[index], FORMATS, index),)
    return param, made


@helper
def canonical_moment(value, FORMATS: tl.constexpr, INDEX: tl.constexpr):
    FORMAT: tl.constexpr = FORMATS.moments[INDEX]
    if not FORMAT.one_nan:
        value = canonical(value)
    return value


@helper
def stored_block(
    pointers,
    inverses,
    values,
    weight_scale,
    amax_bits,
    words,
    offsets,
    rows,
    elements,
    mask,
    FORMATS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Encodes and stores what `updated` gave; raises the bits of amaxes, if any are kept."""
    _, weight_ptr, master_ptr, moment_ptrs = pointers
    master_inverse, moment_inverses = inverses
    param, moments = values
    if FORMATS.in_place:
        amax_bits = FORMATS.store.put_codes(
            weight_ptr, master_ptr, param, weight_scale, amax_bits, words, offsets, mask, FORMATS,
            MASKED,
        )  # fmt: skip
    elif FORMATS.master.joined:
        weight_code, master_code = encoded_jointly(param, words, FORMATS)
        store_block(master_ptr, offsets, master_code, mask, MASKED)
        store_block(weight_ptr, offsets, weight_code, mask, MASKED)
    else:
        if FORMATS.master.present:
            master_code = FORMATS.master.encode(param, master_inverse)
            store_block(master_ptr, offsets, master_code, mask, MASKED)
        amax_bits = FORMATS.store.put(
            weight_ptr, param, weight_scale, amax_bits, words, offsets, mask, FORMATS, MASKED
        )
    stored_moments(
        moment_ptrs, moments, moment_inverses, words, offsets, rows, elements, mask, FORMATS, MASKED
    )
    return amax_bits


@helper
def encoded_jointly(param, words, FORMATS: tl.constexpr):
    """The codes of a weight and of the master that lies beside it."""
    if FORMATS.master.draws:
        codes = FORMATS.master.encode(param, weight_bits(words))
    else:
        codes = FORMATS.master.encode(param)
    return codes
