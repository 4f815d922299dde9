"""Muon's launches beside their twin: formats, company, order, layout, workspace, controls."""

import math

import pytest
import torch
from bits import assert_same_bits
from muon_cases import FORMS, ROW, SHAPES, SIMPLE, buffers, formats_of, how_of, stepped
from step_cases import PAIRS, assert_same_buffers, copied

from megaopt.kernels.formats import GRADS, MASTERS, MOMENTS, WEIGHTS
from megaopt.kernels.muon import launch, orthogonal
from megaopt.kernels.muon.layout import Layout, parts_of
from megaopt.kernels.muon.orthogonal import Orthogonal
from megaopt.kernels.muon.plan import muon_plan
from megaopt.kernels.norm.bins import new_bins
from megaopt.kernels.norm.reference import total_reference
from megaopt.kernels.place import Place
from megaopt.kernels.step.controls import COEFFICIENT, COUNT, INVERSE_SCALE, SKIP

BF16 = WEIGHTS["bfloat16"], MASTERS["float32"]
FEW = [(24, 40), (40, 24), (17, 33)]
_SLOW = pytest.mark.slow
STANDARD, GRAM = (
    pytest.mark.parametrize(
        "form", [each if each == quick else pytest.param(each, marks=_SLOW) for each in FORMS]
    )
    for quick in ("standard bf16", "gram fp16")
)
"""All forms, of which one is not slow: each of the two in half of the tests."""


def short(form="standard bf16", **others):
    """Three steps of an iteration instead of five, with a first, another and a last one.

    In Gram's form a restart, and behind it a step that goes on, too.
    """
    return how_of(form, **{"coefficients": SIMPLE[:3], "restarts": (1,), **others})


def shortest(form="standard bf16", **others):
    """One step, where the iteration is not the question."""
    return how_of(form, coefficients=SIMPLE[:1], **others)


def assert_launches_are_the_twin(formats, shapes, device, hard=False, kept=None, **options):
    """Returns the buffers before and after."""
    before = buffers(formats, shapes, hard=hard)
    own = kept and [{name: each.clone().to(device) for name, each in some.items()} for some in kept]
    found = stepped("triton", formats, shapes, before, device, kept=own, **options)
    twin = stepped("reference", formats, shapes, before, "cpu", kept=kept, **options)
    assert_same_buffers({slot: [t.cpu() for t in each] for slot, each in found.items()}, twin)
    for one, other in zip(own or [], kept or [], strict=True):
        assert_same_bits(one["variance_neuron"].cpu(), other["variance_neuron"])
    is_stepped = not any(map(torch.equal, before["weight"], twin["weight"]))
    assert is_stepped or options.get("controls") is not None
    return before, twin


@pytest.mark.parametrize("form", FORMS)
def test_the_launches_are_the_twin(form, device):
    formats = formats_of(how_of(form, adjust="spectral"), BF16, GRADS["bfloat16"])
    assert_launches_are_the_twin(formats, SHAPES, device, steps=1)


@pytest.mark.parametrize("form", FORMS)
def test_one_step_of_a_matrix_of_many_numbers(form, device):
    """Its first product is its last; some of its numbers are whole blocks of a cast."""
    how = shortest(form, adjust="match_rms_adamw")
    shapes = [(130, 128), (7, 9)]
    assert_launches_are_the_twin(formats_of(how), shapes, device, steps=1)


@STANDARD
def test_second_moments(form, device):
    shapes = [*FEW[1:], (3, 300), (300, 3)]
    kept = [{"variance_neuron": torch.rand(rows)} for rows, _ in shapes]
    formats = formats_of(short(form, second_moment="normuon", adjust="original"))
    assert_launches_are_the_twin(formats, shapes, device, kept=kept, steps=1)


@pytest.mark.sample(3)
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: "-".join(f.name for f in pair))
def test_weights_and_masters_of_every_format(pair, device):
    """Hard values; masters with a scale for the whole tensor, too."""
    formats = formats_of(shortest(), pair, GRADS["bfloat16"], MOMENTS["bfloat16_stochastic"])
    assert_launches_are_the_twin(formats, FEW[:2], device, hard=True, steps=1)


@pytest.mark.sample(3)
@pytest.mark.parametrize("moment", MOMENTS.values(), ids=lambda form: form.name)
def test_momentum_of_every_format(moment, device):
    """Moments in blocks: of rows of whole blocks."""
    shapes = [(24, 128), (64, 64)] if moment.block else FEW
    formats = formats_of(shortest(), BF16, moment=moment)
    assert_launches_are_the_twin(formats, shapes, device, steps=1)


@pytest.mark.parametrize("grad", GRADS.values(), ids=lambda form: form.name)
def test_gradients_of_every_format(grad, device):
    formats = formats_of(shortest("standard fp16"), BF16, grad)
    assert_launches_are_the_twin(formats, FEW, device)


def is_launched(formats, shapes, device):
    sizes = [*map(torch.Size, shapes)]
    return not muon_plan("triton", formats, sizes, [0] * len(sizes), None, device).many_calls


@pytest.mark.parametrize(
    ("second_moment", "momentum"),
    [
        (None, "float32"),
        pytest.param("normuon", "float32", marks=pytest.mark.slow),
        ("normuon", "scaled_float16"),
    ],
)
def test_parameters_of_several_matrices(second_moment, momentum, device):
    """Rows split, batches of matrices, convolutions: in launches as one by one."""
    how = short(split_sizes=(6, 10), second_moment=second_moment, adjust="original")
    shapes = [(16, 24), (3, 16, 8), (16, 2, 3, 3)]
    kept = [{"variance_neuron": torch.rand(rows)} for rows in (16, 48, 16)]
    formats = formats_of(how, moment=MOMENTS[momentum])
    assert is_launched(formats, shapes, device)
    assert_launches_are_the_twin(formats, shapes, device, kept=kept, steps=1)


@pytest.mark.parametrize("moment", ["float32", "bfloat16_stochastic", "block64_e4m3"])
@pytest.mark.sample(2)
def test_rows_that_come_again_are_launched(moment, device):
    """Those of query groups: a matrix's rows do not follow each other."""
    how = shortest("standard fp16", split_sizes=(2, 1, 1), adjust="original")
    formats = formats_of(how, BF16, moment=MOMENTS[moment])
    shapes = [(12, 64), (2, 8, 64)]
    assert is_launched(formats, shapes, device)
    assert_launches_are_the_twin(formats, shapes, device)


@pytest.mark.parametrize("momentum", ["float32", "scaled_float16"])
def test_matrices_of_a_parameter_have_their_own_forms(momentum, device, monkeypatch):
    """Of few rows Gram's, of more the standard one."""
    monkeypatch.setattr(orthogonal, "GRAM_SHORT", 4)
    how = short("standard fp16", method="auto", split_sizes=(16, 6, 6), restarts=(1,))
    assert {how.is_gram(shape) for shape in how.pieces((28, 24))} == {True, False}
    moment = MOMENTS[momentum]
    formats = formats_of(how, BF16, moment=moment)
    assert is_launched(formats, [(28, 24)], device) is (momentum == "float32")
    assert_launches_are_the_twin(formats, [(28, 24), (2, 28, 24)], device)


def test_blocks_of_several_matrices_are_stepped_one_by_one(device):
    """A matrix of a batch has whole blocks, its rows have not."""
    whole, cut = (
        formats_of(short(split_sizes=sizes), BF16, moment=MOMENTS["block64_e4m3"])
        for sizes in (None, (1, 3))
    )
    shapes = [(3, 4, 16)]
    assert [is_launched(each, shapes, device) for each in (whole, cut)] == [True, False]
    assert_launches_are_the_twin(cut, shapes, device)


def test_a_batch_of_matrices_is_cut_where_there_is_no_room(device):
    """Its moments in blocks of 8 and of 4 bits, and rounded by random bits."""
    shapes, how = [(3, 8, 64), (4, 6), (2, 5, 64)], shortest(second_moment="normuon")
    kept = [{"variance_neuron": torch.rand(rows)} for rows in (24, 4, 10)]
    for name in ("block64_e4m3", "block32_e3m0", "bfloat16_stochastic"):
        formats = formats_of(how, BF16, moment=MOMENTS[name])
        assert_launches_are_the_twin(formats, shapes, device, kept=kept, steps=1, room=1)


# --- what shows in no bit


@GRAM
def test_company_order_and_workspace_show_in_no_bit(form, device):
    """Alone, among others, permuted, in waves of one parameter, of two and of all."""
    formats = formats_of(short(form), BF16, GRADS["bfloat16"])
    shapes = [*FEW[:2], (24, 40), (9, 1)]
    before = buffers(formats, shapes)
    places = [Place(number) for number in range(len(shapes))]
    once = {"steps": 1}
    together = stepped("triton", formats, shapes, before, device, places=places, **once)
    how = formats.matrix.how
    parts = parts_of(formats, [*map(torch.Size, shapes)])
    needed = [Layout(how, [part], "gram" in form).used for part in parts]
    for room in (1, 2 * max(needed)):
        found = stepped("triton", formats, shapes, before, device, room=room, places=places, **once)
        assert_same_buffers(found, together)
    order = [3, 0, 2, 1]
    turned = {slot: [each[i] for i in order] for slot, each in before.items()}
    own = [shapes[i] for i in order], turned, device
    found = stepped("triton", formats, *own, places=[places[i] for i in order], **once)
    wanted = {slot: [each[i] for i in order] for slot, each in together.items()}
    assert_same_buffers(found, wanted)
    for index, shape in enumerate(shapes):
        alone = {slot: [each[index]] for slot, each in before.items()}
        found = stepped("triton", formats, [shape], alone, device, places=[places[index]], **once)
        assert_same_buffers(found, {slot: [each[index]] for slot, each in together.items()})


@STANDARD
def test_alignment_and_padding_show_in_no_bit(form, device):
    """Buffers at odd addresses; a matrix of whole 16 bytes a row as a part of none."""
    formats = formats_of(short(form))
    before = buffers(formats, FEW)
    expected = stepped("triton", formats, FEW, before, device)
    moved = {}
    for slot, each in before.items():
        rooms = [torch.zeros(own.numel() + 1, dtype=own.dtype, device=device) for own in each]
        parts = zip(rooms, each, strict=True)
        moved[slot] = [room[1:].view(own.shape).copy_(own) for room, own in parts]
    plan = muon_plan(
        "triton", formats, [torch.Size(s) for s in FEW], [0] * 3, None, torch.device(device)
    )
    for _ in range(2):
        plan.look(moved)
        plan.step([ROW])
    assert_same_buffers(moved, expected)


def test_a_workspace_that_moves_shows_in_no_bit(device, monkeypatch):
    """What was noted at the first step is of another place in memory at the next ones."""
    formats = formats_of(short("gram fp16"))
    before = buffers(formats, FEW)
    expected = stepped("triton", formats, FEW, before, device, steps=3)
    places, empty = [], torch.empty

    def elsewhere(*size, dtype=None, **options):
        if dtype != torch.uint8:
            return empty(*size, dtype=dtype, **options)
        first = 256 * len(places)
        places.append(empty(size[0] + 1024, dtype=dtype, **options))
        return places[-1][first:]

    monkeypatch.setattr(launch.torch, "empty", elsewhere)
    found = stepped("triton", formats, FEW, before, device, steps=3)
    monkeypatch.undo()
    assert len({each.data_ptr() for each in places}) == 3
    assert_same_buffers(found, expected)


def test_waves_are_bounded():
    how = Orthogonal(how_of().coefficients, precision="fp16")
    shapes = [torch.Size(shape) for shape in [(4096, 4096)] * 5 + [(14336, 4096)] * 5]
    found = list(launch.waves(how, parts_of(formats_of(how), shapes), launch.ROOM))
    assert sorted(run.param for layout in found for run in layout.runs) == list(range(10))
    for layout in found:
        assert layout.used <= launch.ROOM or len(layout.runs) == 1
        assert {layout.is_gram} == {run.param >= 5 for run in layout.runs}


# --- what a step is told


def controls_of(**places):
    row = [1.0, 1.0, 1.0, 0.0, 0.0]
    for place, value in places.items():
        row[{"inverse": INVERSE_SCALE, "coefficient": COEFFICIENT, "skip": SKIP}[place]] = value
    assert len(row) == COUNT
    return row


@pytest.mark.parametrize("form", FORMS)
def test_clipped_and_unscaled_gradients_and_those_left_out(form, device):
    """Three groups, of which one is left out: the others' bits are those without it."""
    rows = [ROW, (0.5, *ROW[1:]), ROW]
    controls = torch.tensor(
        [controls_of(inverse=1 / 3, coefficient=0.7), controls_of(skip=1.0), controls_of()]
    )
    formats = formats_of(short(form), BF16, GRADS["bfloat16"])
    own = {"groups": [0, 1, 2], "rows": rows, "controls": controls}
    before, after = assert_launches_are_the_twin(formats, FEW, device, **own)
    for slot, each in after.items():
        assert_same_bits(each[1], before[slot][1], slot)
        if slot != "grad":
            assert not torch.equal(each[0], before[slot][0])


def test_a_step_left_out_leaves_second_moments(device):
    kept = [{"variance_neuron": torch.rand(rows)} for rows, _ in FEW]
    before = [each["variance_neuron"].clone() for each in kept]
    formats = formats_of(shortest(second_moment="normuon"))
    controls = torch.tensor([controls_of(skip=1.0), controls_of()])
    own = {"groups": [0, 1, 0], "rows": [ROW] * 2, "controls": controls, "kept": kept}
    assert_launches_are_the_twin(formats, FEW, device, **own)
    same = [torch.equal(one["variance_neuron"], two) for one, two in zip(kept, before, strict=True)]
    assert same == [True, False, True]


@GRAM
def test_what_is_not_finite_stays_in_its_matrix(form, device):
    formats, shapes = formats_of(short(form), BF16, GRADS["bfloat16"]), [*FEW[:2], (24, 40)]
    before = buffers(formats, shapes)
    plain = stepped("triton", formats, shapes, before, device)
    for value in (math.nan, math.inf):
        own = copied(before)
        own["grad"][1][3, 5] = value
        found = stepped("triton", formats, shapes, own, device)
        twin = stepped("reference", formats, shapes, own, "cpu")
        assert_same_buffers({s: [t.cpu() for t in each] for s, each in found.items()}, twin)
        assert found["weight"][1].isnan().any()
        for index in (0, 2):
            assert_same_bits(found["weight"][index], plain["weight"][index])


def test_zero_gradients_and_those_below_eps(device):
    """The weight decays, and else stays."""
    for form in FORMS:
        formats, shapes = formats_of(short(form)), [(24, 40), (7, 5)]
        before = buffers(formats, shapes)
        for own in (before["grad"], before["momentum_buffer"]):
            for each in own:
                each.zero_()
        before["grad"][1].fill_(1e-30)
        found = stepped("triton", formats, shapes, before, device, steps=1)
        kept = torch.tensor(ROW[4])
        assert_same_bits(found["weight"][0].cpu(), before["weight"][0] * kept)
        twin = stepped("reference", formats, shapes, before, "cpu", steps=1)
        assert_same_bits(found["weight"][1].cpu(), twin["weight"][1])


def test_the_norm_of_all_gradients(device):
    formats, sizes = formats_of(how_of()), [torch.Size(shape) for shape in FEW]
    before = {s: [t.to(device) for t in each] for s, each in buffers(formats, FEW).items()}
    found = []
    for backend in ("triton", "reference"):
        plan = muon_plan(backend, formats, sizes, [0] * 3, None, torch.device(device))
        plan.look(before)
        bins = new_bins(torch.device(device))
        plan.accumulate(bins)
        found.append(total_reference(bins)[0])
    assert_same_bits(*found)
    norm = torch.cat([each.flatten() for each in before["grad"]]).double().norm()
    assert abs(found[0] - norm) <= 2.0**-23 * norm


def test_of_no_matrix_with_a_number(device):
    """A rank's part may have none."""
    formats, shapes = formats_of(how_of()), [(0, 5), (4, 6)]
    before = buffers(formats, shapes)
    found = stepped("triton", formats, shapes, before, device)
    twin = stepped("reference", formats, shapes, before, "cpu")
    assert_same_buffers({s: [t.cpu() for t in each] for s, each in found.items()}, twin)
    empty = [torch.Size((0, 5))]
    plan = muon_plan("triton", formats, empty, [0], None, torch.device(device))
    plan.look({slot: each[:1] for slot, each in found.items()})
    plan.step([ROW])
