"""The launch that projects gradients, beside the twin; precisions; slabs and waves."""

import dataclasses
from dataclasses import replace

import numpy
import pytest
import torch
from bits import assert_same_bits
from lowrank_cases import (
    GROUP,
    KERNEL,
    PLAIN,
    ROW,
    SMALL,
    buffers,
    controls_of,
    formats_of,
    give,
    projections_of,
    steps,
)
from mutants import mutant
from step_cases import assert_same_buffers, copied, hard_values

from megaopt.kernels.formats import GRADS, MOMENTS
from megaopt.kernels.galore import launch, wave
from megaopt.kernels.galore.launch import launched_plan
from megaopt.kernels.galore.products import PRECISIONS, operand_reference, product
from megaopt.kernels.galore.rule import LEFT, RIGHT, LowRank
from megaopt.kernels.galore.tiles import BackTile, ProjectionTiles, ProjectTile
from megaopt.kernels.matrix.plan import MatrixPlan
from megaopt.kernels.rules.galore import GALORE_ADAMW

SHAPES = {RIGHT: [(5, 70), (33, 18), (3, 1040)], LEFT: [(70, 5), (18, 33), (1040, 3)]}
"""Several tiles, parts of some, and two slabs."""
_PROJECT = ProjectTile(16, 512, 16, 4, 1)
_BACK = {RIGHT: BackTile(16, 512, 16, 4, 1, strip=2), LEFT: BackTile(512, 16, 16, 4, 1, strip=2)}
LONG = {side: ProjectionTiles(_PROJECT, back, _PROJECT, back) for side, back in _BACK.items()}
"""Tiles as small as may be but for the side of a slab, of which SMALL ones would be 65."""


def whole_numbers(formats, shapes):
    """Gradients of small whole numbers, and projections of powers of two.

    Their products and sums are exact in every order.
    """
    generator = torch.Generator().manual_seed(5)
    found = buffers(formats, shapes, hard=False)
    for grad in found["grad"]:
        grad.copy_(torch.randint(-8, 9, grad.shape, generator=generator))
    projections = projections_of(formats.matrix.how, shapes, single=True)
    return found, [projection.sign() * 0.5 for projection in projections]


def assert_exact_steps_agree(side, device, grad="float32", rank=5):
    formats = formats_of(PLAIN, LowRank(side, rank), GRADS[grad])
    before, projections = whole_numbers(formats, SHAPES[side])
    found, expected = steps(formats, SHAPES[side], before, projections, device, LONG[side])
    assert_same_buffers(found, expected)


@pytest.mark.parametrize("grad", ["float32", "bfloat16"])
@pytest.mark.parametrize("side", [RIGHT, LEFT])
def test_the_step_is_the_twins_where_products_are_exact(side, grad, device):
    assert_exact_steps_agree(side, device, grad=grad)


@pytest.mark.sample(5)
@pytest.mark.parametrize("kernel", ["grouped", "fused"])
@pytest.mark.parametrize("tiles", [LONG, {}], ids=["small tiles", "tiles of their own"])
@pytest.mark.parametrize("rank", [5, 17])
@pytest.mark.parametrize("grad", ["float32", "bfloat16"])
@pytest.mark.parametrize("precision", ["tf32", "bf16"])
@pytest.mark.parametrize("side", [RIGHT, LEFT])
def test_the_step_is_the_twins(side, precision, grad, rank, tiles, kernel, device):
    """Of any numbers: tensor cores have a specification."""
    formats = formats_of(PLAIN, LowRank(side, rank, precision), GRADS[grad])
    shapes = SHAPES[side]
    own = buffers(formats, shapes, hard=False), projections_of(formats.matrix.how, shapes)
    found, expected = steps(formats, shapes, *own, device, tiles.get(side), kernel)
    assert_same_buffers(found, expected)


NEXT_ROW = GALORE_ADAMW.drawing.row({**GROUP, "step": 4})
FUSED_SHAPES = {RIGHT: [(20, 18), (2, 2080)], LEFT: [(18, 20), (2080, 2)]}
"""Of one slab and of three."""


def fused_and_twin(side, device, moment="float32", precision="bf16", controls=None, **options):
    """Two steps, of the second of which every counter must be as the first found it."""
    low_rank, rows = LowRank(side, 17, precision), [ROW, NEXT_ROW]
    formats = formats_of(PLAIN, low_rank, moment=MOMENTS[moment])
    formats = dataclasses.replace(formats, **options)
    shapes = FUSED_SHAPES[side]
    own = formats, shapes, buffers(formats, shapes, hard=False), projections_of(low_rank, shapes)
    return steps(*own, device, LONG[side], "fused", rows, controls)


@pytest.mark.sample(2)
@pytest.mark.parametrize("few", [0, 128], ids=["one program", "a program for each slab"])
@pytest.mark.parametrize("side", [RIGHT, LEFT])
def test_fused_steps_moments_of_any_order_of_slabs(side, few, device, monkeypatch):
    monkeypatch.setattr(wave, "FEW", few)
    monkeypatch.setattr(wave, "STEPPED", 128)
    assert_same_buffers(*fused_and_twin(side, device))


@pytest.mark.sample(2)
@pytest.mark.parametrize("moment", ["bfloat16", "bfloat16_stochastic"])
@pytest.mark.parametrize("side", [RIGHT, LEFT])
def test_fused_steps_moments_of_other_formats(side, moment, device):
    assert_same_buffers(*fused_and_twin(side, device, moment))


@pytest.mark.parametrize("side", [RIGHT, LEFT])
def test_fused_goes_by_controls_and_the_direction(side, device):
    """Loss scale and clip coefficient; the gradient that a step writes is no projected one."""
    flags = {"maximize": True, "rounds_grad": True, "writes_grad": True}
    assert_same_buffers(*fused_and_twin(side, device, controls=controls_of(), **flags))


def test_a_step_that_is_left_out_changes_nothing_and_the_next_one_is_whole(device):
    low_rank, shapes = LowRank(RIGHT, 17, "bf16"), FUSED_SHAPES[RIGHT]
    formats = formats_of(PLAIN, low_rank)
    before, projections = buffers(formats, shapes, hard=False), projections_of(low_rank, shapes)
    own = {slot: [each.to(device) for each in own] for slot, own in copied(before).items()}
    sizes = [torch.Size(shape) for shape in shapes]
    plan = launched_plan(formats, sizes, [0, 0], device, kernel="fused", tiles=LONG[RIGHT])
    give(plan, [projection.to(device) for projection in projections])
    plan.look(own)
    plan.step([ROW], controls_of(skip=1.0).to(device))
    assert_same_buffers(own, before)
    plan.look(own)
    plan.step([ROW])
    twin = MatrixPlan(formats, [0, 0])
    give(twin, projections)
    twin.look(before)
    twin.step([ROW])
    assert_same_buffers(own, before)


@pytest.mark.parametrize("side", [RIGHT, LEFT])
def test_fused_has_the_bits_of_grouped_of_ieee_products(side, device):
    """Numbers whose sums are not exact."""
    formats, shapes = formats_of(PLAIN, LowRank(side, 17)), FUSED_SHAPES[side]
    own = formats, shapes, buffers(formats, shapes), projections_of(formats.matrix.how, shapes)
    found = [steps(*own, device, LONG[side], kernel)[0] for kernel in ("grouped", "fused")]
    assert_same_buffers(*found)


@pytest.mark.parametrize("slot", ["exp_avg", "exp_avg_sq"])
def test_alignment_of_moments_shows_in_no_bit(slot, device):
    """Of whole tiles; a GPU refuses loads of what does not begin at whole 16 bytes itself."""
    low_rank, shapes = LowRank(RIGHT, 16, "bf16"), [(32, 64)]
    formats = formats_of(PLAIN, low_rank)
    before, projections = buffers(formats, shapes, hard=False), projections_of(low_rank, shapes)
    own = {slot: [each.to(device) for each in own] for slot, own in copied(before).items()}
    memory = torch.empty(own[slot][0].numel() + 1, device=device)
    own[slot][0] = memory[1:].view(own[slot][0].shape).copy_(own[slot][0])
    sizes = [torch.Size(shape) for shape in shapes]
    plan = launched_plan(formats, sizes, [0], device, kernel="fused", tiles=SMALL)
    give(plan, [projection.to(device) for projection in projections])
    plan.look(own)
    plan.step([ROW])
    assert_same_buffers(own, steps(formats, shapes, before, projections, device)[1])


def assert_roundings_agree(precision, device, tiles=SMALL):
    """Of sums with one number that is not 0, of gradients with all their bits."""
    formats = formats_of(PLAIN, LowRank(RIGHT, 16, precision))
    before = buffers(formats, [(40, 16)], hard=False)
    found, expected = steps(formats, [(40, 16)], before, [torch.eye(16) / 3], device, tiles)
    assert_same_buffers(found, expected)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_numbers_are_rounded_as_the_precision_says(precision, device):
    assert_roundings_agree(precision, device)


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_projections_that_are_rounded_ahead_show_in_no_bit(precision, device):
    assert_roundings_agree(precision, device, replace(SMALL, ahead=True))


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_rounded_numbers_are_the_nearest(precision):
    """By fp64: the nearest of 11 or 8 significant bits, ties to even; other numbers stay."""
    values = hard_values(2000, torch.Generator().manual_seed(1))
    ties = torch.arange(1, 64).float() * 2.0**-12 + 1
    values = torch.cat([values, ties, -ties, 1 + torch.arange(1, 64) * 2.0**-9])
    values = values[values.isnan() | values.isinf() | (values.abs() >= 2.0**-126)]
    found, wide = operand_reference(values, precision), values.double().numpy()
    mantissa, exponent = numpy.frexp(wide)
    bits = 11 if precision == "tf32" else 8
    expected = numpy.ldexp(numpy.round(numpy.ldexp(mantissa, bits)), exponent - bits)
    expected = torch.from_numpy(expected).float()  # too large for fp32: infinity
    assert_same_bits(found.nan_to_num(nan=7.0), expected.nan_to_num(nan=7.0), precision)
    assert bool((found.isnan() == values.isnan()).all())


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("setting", ["highest", "high", "medium"])
def test_a_product_goes_by_its_precision_alone(setting, precision, device):
    generator = torch.Generator().manual_seed(0)
    some, others = (torch.randn(64, 64, generator=generator).to(device) for _ in range(2))
    expected, was = product(some, others, precision), torch.get_float32_matmul_precision()
    place = torch.backends.cuda.matmul
    try:
        torch.set_float32_matmul_precision(setting)
        before = (place.fp32_precision, place.allow_bf16_reduced_precision_reduction)
        assert_same_bits(product(some, others, precision), expected, "product")
        assert (place.fp32_precision, place.allow_bf16_reduced_precision_reduction) == before
        assert torch.get_float32_matmul_precision() == setting
    finally:
        torch.set_float32_matmul_precision(was)


@pytest.mark.parametrize("side", [RIGHT, LEFT])
def test_slabs_of_their_own_programs_and_waves_show_in_no_bit(side, device, monkeypatch):
    """Numbers whose sums are not exact: the order of sums is the same."""
    formats, shapes = formats_of(PLAIN, LowRank(side, 5)), SHAPES[side]
    before, projections = buffers(formats, shapes), projections_of(formats.matrix.how, shapes)
    own = (formats, shapes, before, projections, device, LONG[side])
    apart, _ = steps(*own)
    monkeypatch.setattr(launch, "ROOM", 1)
    monkeypatch.setattr(launch, "PART", 0.0)
    assert_same_buffers(steps(*own)[0], apart)  # a wave for each matrix
    monkeypatch.setattr(wave, "FEW", 0)
    assert_same_buffers(steps(*own)[0], apart)


FUSED_MUTANTS = {
    "the first slab's program goes on": ("1) != SLABS - 1:", "1) != 0:"),
    "a counter that stays": ("tl.atomic_xchg(arrived_ptr, 0)", "pass"),
    "one slab alone": ("SLABS if APART else 1\n", "1\n"),
    "no clipping": ("grad = controlled_grad(total, chunk, block, STEP)", "grad = total"),
    "another tile's random bits": ("chunk.start, 0, offsets, FORMATS.draws, False, 0, False)\n"
                                   "    stored_moments",
                                   "0, 0, offsets, FORMATS.draws, False, 0, False)\n"
                                   "    stored_moments"),
    "moments of other places": ("pointers_of(low, start,", "pointers_of(low, start * 0,"),
    "rows of another piece": ("low_places(first, ends, stride, AT",
                              "low_places(first * 0, ends, stride, AT"),
}  # fmt: skip


@pytest.mark.sample(3)
@pytest.mark.parametrize("change", FUSED_MUTANTS.values(), ids=FUSED_MUTANTS)
def test_a_mutant_of_the_fused_step_is_noticed(change, tmp_path, device, monkeypatch):
    monkeypatch.setattr(wave, "kernel", mutant(KERNEL, change, tmp_path))
    monkeypatch.setattr(wave, "STEPPED", 128)
    options = {"moment": "bfloat16_stochastic", "controls": controls_of()}
    with pytest.raises(AssertionError, match="differ"):
        assert_same_buffers(*fused_and_twin(RIGHT, device, **options))


# What the comparison with the twin has to notice.
MUTANTS = {
    "the last terms dropped": ("last = tl.minimum(first + SLAB, terms)",
                               "last = tl.minimum(first + SLAB, terms - 1)"),
    "a slab dropped": ("slab in tl.static_range(SLABS)", "slab in tl.static_range(SLABS - 1)"),
    "slabs added twice": ("total = total + tl.load(", "total = total + 2.0 * tl.load("),
    "a slab begins early": ("first = (part + slab) * SLAB",
                            "first = tl.maximum((part + slab) * SLAB - 1, 0)"),
    "only the last part of a sum": ("right, total, PRECISION)\n        grad_ptr",
                                    "right, 0 * total, PRECISION)\n        grad_ptr"),
    "the rows of another tile": ("tile // BLOCKS * OUTER", "tile // BLOCKS * 0"),
    "a rank's other tile": ("tile % BLOCKS * RANKS", "tile % BLOCKS * 0"),
}  # fmt: skip


@pytest.mark.sample(2)
@pytest.mark.parametrize("change", MUTANTS.values(), ids=MUTANTS)
def test_a_mutant_is_noticed(change, tmp_path, device, monkeypatch):
    monkeypatch.setattr(wave, "kernel", mutant(KERNEL, change, tmp_path))
    with pytest.raises(AssertionError, match="differ"):
        assert_exact_steps_agree(RIGHT, device, rank=17)


def test_a_rounding_that_is_not_there_is_noticed(device, monkeypatch):
    """The kernel's own: in the twin numbers are rounded."""
    product = wave.Products._product
    monkeypatch.setattr(
        wave.Products,
        "_product",
        lambda *own: dataclasses.replace(product(*own), precision="ieee"),
    )
    with pytest.raises(AssertionError, match="differ"):
        assert_roundings_agree("tf32", device)
