"""A clip coefficient, a loss scale and a found_inf for each group: it is stepped as if alone."""

import pytest
import torch
from interpreted import marks_of
from kinds import KINDS, made, params_for
from runs import BF16, FP32, assert_same, give_gradients, parameters, params_of, snapshot, values

from megaopt import FusedAdam, GaLoreAdamW

COEFFICIENTS, SCALES = (0.5, 1.0), (3.0, 4.0)
LEFT_OUT = ((0, 0), (0, 1), (1, 0), (1, 1), (0, 0))
"""In each step for each group whether it is skipped."""
RANKED = {"rank": 3, "update_proj_gap": 2, "scale": 0.25, "stagger": False, "weight_decay": 0.1}
GALORE = {
    "twin": {"backend": "reference"},
    "torch": {"backend": "triton", "kernel": "torch"},
    "hybrid": {"backend": "triton", "kernel": "hybrid"},
    "grouped": {"backend": "triton", "kernel": "grouped", "precision": "bf16"},
    "fused": {"backend": "triton", "kernel": "fused", "precision": "bf16"},
}
both_modes = pytest.mark.parametrize("capturable", [False, True], ids=["host", "capturable"])


def take_step(optimizer, number, chosen=None):
    """A step with each group's own numbers, or with those of one for all."""
    given = (torch.tensor(each, dtype=FP32) for each in (LEFT_OUT[number], SCALES, COEFFICIENTS))
    if chosen is not None:
        given = (each[chosen] for each in given)
    give_gradients(params_of(optimizer), number)
    if number == 1:  # the last of each group rests, and has another count then
        for group in optimizer.param_groups:
            group["params"][-1].grad = None
    optimizer.found_inf, optimizer.grad_scale, coefficient = given
    optimizer.step(clip_coefficient=coefficient)


def part_of(optimizer, chosen):
    """A group: itself, its weights and their states."""
    whole, counts = snapshot(optimizer), [len(each["params"]) for each in optimizer.param_groups]
    first = sum(counts[:chosen])
    own = {name: whole[name][first : first + counts[chosen]] for name in ("weights", "states")}
    return {**own, "group": whole["groups"][chosen]}


def assert_stepped_as_alone(make):
    """Fails unless a group is what it becomes where all groups have its numbers."""
    found = make()
    for number in range(len(LEFT_OUT)):
        take_step(found, number)
    for chosen in range(len(COEFFICIENTS)):
        expected = make()
        for number in range(len(LEFT_OUT)):
            take_step(expected, number, chosen)
        assert_same(part_of(found, chosen), part_of(expected, chosen), f"group {chosen}")


@pytest.mark.parametrize("kind", KINDS)
@both_modes
@pytest.mark.parametrize(
    "backend",
    [
        pytest.param("reference", marks=pytest.mark.sample(6)),
        pytest.param("triton", marks=pytest.mark.sample(30)),
    ],
)
@pytest.mark.thirds
def test_groups_are_stepped_as_if_alone(kind, capturable, backend):
    def make():
        groups = [{"params": params_for(kind), "lr": 0.01 * (1 + each)} for each in range(2)]
        return made(kind, groups, backend=backend, capturable=capturable)

    assert_stepped_as_alone(make)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(own, id=kind, marks=[*marks_of(own), pytest.mark.sample(1 + 3 * (number > 1))])
        for number, (kind, own) in enumerate(GALORE.items())
    ],
)
@both_modes
def test_projections_of_a_skipped_group_stay(options, capturable):
    """A group's own count says when its projections are made anew."""

    def make():
        weights = [values(shape, 5, BF16) for shape in ((24, 10), (6, 30), (9,))]
        groups = [{"params": [torch.nn.Parameter(w.clone()) for w in weights]} for _ in range(2)]
        return GaLoreAdamW(groups, capturable=capturable, **RANKED, **options)

    assert_stepped_as_alone(make)


def test_a_scale_for_each_group_is_no_scale_of_their_norm():
    optimizer = FusedAdam([{"params": parameters()}, {"params": parameters()}])
    give_gradients(params_of(optimizer), 0)
    optimizer.grad_scale, before = torch.ones(2), snapshot(optimizer)
    with pytest.raises(ValueError, match="grad_scale must be one number in a step that measures"):
        optimizer.step(clip_norm=1.0)
    assert_same(snapshot(optimizer), before)
