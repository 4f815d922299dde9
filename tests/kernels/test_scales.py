"""Formats with a scale per tensor in one launch: the order of work, and what it leaves behind."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from step_cases import (
    CURATED,
    GROUP,
    assert_same_buffers,
    buffers,
    copied,
    name_of,
    reference_step,
    rows_of,
)

from megaopt.kernels.chunks.scales import AMAX_PHASE, STEP_PHASE
from megaopt.kernels.chunks.table import Geometry, chunk_rows, two_phase_chunk_rows
from megaopt.kernels.rules import RULES
from megaopt.kernels.step import launch
from megaopt.kernels.step.controls import COEFFICIENT, COUNT, GRAD_SCALE, INVERSE_SCALE, SKIP
from megaopt.kernels.step.launch import TritonPlan
from megaopt.kernels.step.reference import ReferencePlan

IEEE = RULES["adamw", "ieee"]
SCALED = [formats for formats in CURATED if formats.scaled]
SMALL = Geometry(64, 2)
COUNTS = [1, 128, 129, 0, 300, 63]


@given(
    st.lists(st.integers(0, 2000), min_size=1, max_size=30), st.integers(0, 60), st.integers(1, 4)
)
@settings(deadline=None)
def test_every_chunk_has_both_phases_and_amaxes_come_first(numels, lag, iterations):
    once = chunk_rows(numels, Geometry(32, iterations))
    twice = two_phase_chunk_rows(once, lag)
    places = [(tensor, place) for tensor, place in once.T.tolist()]
    order = {}
    for program, (tensor, place, phase) in enumerate(twice.T.tolist()):
        assert order.setdefault((tensor, place, phase), program) == program, "twice"
    phases = (AMAX_PHASE.value, STEP_PHASE.value)
    assert set(order) == {(*place, phase) for place in places for phase in phases}
    last_amax = {}
    for (tensor, _, phase), program in order.items():
        if phase == AMAX_PHASE.value:
            last_amax[tensor] = max(last_amax.get(tensor, 0), program)
    for (tensor, _, phase), program in order.items():
        assert phase == AMAX_PHASE.value or program > last_amax[tensor]


@pytest.mark.parametrize("lag", [1, 5, 40])
def test_steps_lag_where_there_is_other_work(lag):
    """Between a tensor's last amax and first step are `lag` programs, unless the end is near."""
    twice = two_phase_chunk_rows(chunk_rows([70] * 200, Geometry(32, 1)), lag)
    for tensor in range(200):
        own = np.flatnonzero(twice[0] == tensor)
        amaxes, steps = (own[twice[2][own] == phase.value] for phase in (AMAX_PHASE, STEP_PHASE))
        between = steps.min() - amaxes.max() - 1
        assert between >= lag or (twice[2][amaxes.max() + 1 :] == STEP_PHASE.value).any()
        if tensor < 150:
            assert between >= lag


def plan_of(formats, tensors, lag, monkeypatch, rule=IEEE, groups=None):
    monkeypatch.setattr(launch, "LAG", lag)
    counts = [weight.numel() for weight in tensors["weight"]]
    rule, _ = rows_of(formats, rule, [])
    device = tensors["weight"][0].device
    return TritonPlan(formats, rule, counts, groups or [0] * len(counts), device, SMALL)


def assert_ready(plan):
    """Counters and amaxes are zero; the old scales may be anything."""
    rows = plan._scratch[:-1].view(-1, len(COUNTS)).clone()
    states = 1 + plan.formats.moment_count
    assert len(rows) == 2 * states + 1
    rows[states : 2 * states] = 0
    assert not rows.any(), rows
    assert plan._scratch[-1] == 0, "the ticket"


def controls_of(device, skip=0.0, scale=1.0):
    controls = torch.ones(1, COUNT, device=device)
    controls[:, [GRAD_SCALE, INVERSE_SCALE, SKIP]] = torch.tensor(
        [scale, 1 / scale, skip], device=device
    )
    return controls


@pytest.mark.parametrize(
    ("formats", "lag"),
    [
        *(
            pytest.param(formats, 3, marks=[pytest.mark.slow] * (i > 1))
            for i, formats in enumerate(SCALED)
        ),
        (SCALED[0], 0),
        (SCALED[0], 2112),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else name_of(value),
)
def test_steps_in_a_row_are_the_twins(formats, lag, device, monkeypatch):
    """8 chunks: with a lag below, programs of both phases take turns."""
    rule = RULES["adam" if formats.master.scaled else "adamw", "ieee"]
    found = buffers(formats, COUNTS, device)
    expected = copied(found)
    plan = plan_of(formats, found, lag, monkeypatch, rule)
    for step in (3, 4):
        group = {**GROUP, "step": step}
        plan.look(found)
        plan.step(rows_of(formats, rule, group)[1])
        assert_ready(plan)
        reference_step(expected, formats, rule, group)
        assert_same_buffers(found, expected)


@pytest.mark.parametrize("formats", SCALED[:2], ids=name_of)
def test_a_skipped_step_leaves_everything_as_it_is(formats, device, monkeypatch):
    found = buffers(formats, COUNTS, device)
    before = copied(found)
    plan = plan_of(formats, found, 3, monkeypatch)
    plan.look(found)
    plan.step(rows_of(formats, IEEE, GROUP)[1], controls_of(device, skip=1.0))
    assert_same_buffers(found, before)
    assert_ready(plan)
    plan.step(rows_of(formats, IEEE, GROUP)[1], controls_of(device))
    reference_step(before, formats, IEEE, GROUP)
    assert_same_buffers(found, before)


@pytest.mark.parametrize("formats", SCALED[:2], ids=name_of)
def test_a_skipped_group_leaves_nothing_in_the_scratch(formats, device, monkeypatch):
    """Its programs take tickets as the others do."""
    found = buffers(formats, COUNTS, device)
    expected = copied(found)
    groups = [index % 2 for index in range(len(COUNTS))]
    plan = plan_of(formats, found, 3, monkeypatch, groups=groups)
    rows = rows_of(formats, IEEE, [GROUP, {**GROUP, "lr": 0.5}])[1]
    twin = ReferencePlan(formats, IEEE, groups)
    for skips in (0, 1, None, 0):
        controls = controls_of(device).repeat(2, 1)
        if skips is not None:
            controls[skips, SKIP] = 1.0
        for each, tensors in ((plan, found), (twin, expected)):
            each.look(tensors)
            each.step(rows, controls)
        assert_ready(plan)
        assert_same_buffers(found, expected)


FP32_GRADS = [formats for formats in SCALED if formats.grad.name == "float32"]


@pytest.mark.parametrize(
    "formats",
    [
        pytest.param(formats, marks=[pytest.mark.slow] * (i > 1))
        for i, formats in enumerate(FP32_GRADS)
    ],
    ids=name_of,
)
def test_both_phases_unscale_and_clip(formats, device, monkeypatch):
    """Were one of them to forget, codes would not fit their scale."""
    found = buffers(formats, COUNTS, device)
    expected = copied(found)
    plan = plan_of(formats, found, 3, monkeypatch)
    plan.look(found)
    controls = controls_of(device, scale=3.0)
    controls[:, COEFFICIENT] = 0.3
    plan.step(rows_of(formats, IEEE, GROUP)[1], controls)
    for grad in expected["grad"]:
        grad.mul_(controls[0, INVERSE_SCALE]).mul_(controls[0, COEFFICIENT])
    reference_step(expected, formats, IEEE, GROUP)
    del found["grad"], expected["grad"]  # the hand changed these alone
    assert_same_buffers(found, expected)
