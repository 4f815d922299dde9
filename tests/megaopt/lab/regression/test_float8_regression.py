"""Regressions of fp8 weights: every recipe, whole, resumed and in ranks; planted differences."""

import json
import re
from dataclasses import replace

import pytest

from megaopt.float8 import RECIPES
from megaopt.lab.regression import fake_quantize
from megaopt.lab.regression.processes import Group

ALL = list(RECIPES)
FORMS = {
    "fp8": {"backend": "reference"},
    "external": {"backend": "reference", "masters": "external"},
}


@pytest.fixture
def write_float8(write_run):
    """Writes a very small run: write_float8(recipes, name={key: value}, ...)."""

    def write(recipes, scaled=False, steps=4, learning_rate=3e-3, **variants):
        forms = {name: ("unfused", v) for name, v in variants.items()}
        path = write_run(steps, learning_rate=learning_rate, **forms)
        text = re.sub(r'\[\[variant]]\nname = "ties_away"[^[]*', "", path.read_text())
        float8 = (
            f"[float8]\nrecipes = {json.dumps(recipes)}\nscaled_matmul = {str(scaled).lower()}\n"
        )
        path.write_text(text.replace("[[variant]]", f"{float8}\n[[variant]]", 1))
        return path

    return write


@pytest.fixture
def build(write_float8, regression_of):
    return lambda recipes=ALL, **run: regression_of(write_float8(recipes, **run))


@pytest.mark.parametrize("scaled", [False, True])
def test_every_recipe_equals_fake_quantization(build, run, scaled):
    regression = build(scaled=scaled, **FORMS)
    outcomes = run(regression)
    assert regression.first_difference() is None
    kinds = {"codes", "scale_inv", "weight", "master", "exp_avg", "exp_avg_sq"}
    for recipe in ALL:
        delayed = {"scale", "amax_history"} if recipe == "delayed" else set()
        for name in FORMS:
            outcome = outcomes[f"{recipe}.{name}"]
            assert outcome.baseline is outcomes[f"{recipe}.unfused"]
            assert outcome.losses == outcome.baseline.losses
            assert len(set(outcome.losses)) == 4
            found = outcome.digests(4)
            assert found == outcome.baseline.digests(4)
            assert {each.rpartition(" ")[2] for each in found} == kinds | delayed


@pytest.mark.slow
def test_ranks_and_resumed_runs_equal_the_baseline(build, run):
    forms = {
        "resumed": {"backend": "reference", "resume_after": 2},
        "ranks_2": {"backend": "reference", "ranks": 2},
        "ranks_3": {"backend": "reference", "ranks": 3},
    }
    regression = build(["delayed", "block_128x128"], **forms)
    outcomes = run(regression)
    assert (regression.first_difference(), regression.failed) == (None, [])
    for outcome in outcomes.values():
        baseline = outcomes[f"{outcome.trial.recipe}.unfused"]
        assert outcome.digests(4) == baseline.digests(4)
        assert outcome.losses == baseline.losses


@pytest.mark.parametrize("kind", ["codes", "scale_inv", "scale", "amax_history", "exp_avg"])
def test_a_flip_planted_in_any_tensor_is_found(build, run, plant_flip, kind):
    name = "blocks.0.feed_forward.expand.weight"
    plant_flip("delayed.fp8", 2, name, kind)
    regression = build(["current", "delayed"], **FORMS)
    run(regression)
    found = regression.first_difference()
    assert (found.step, found.variant, found.baseline) == (2, "delayed.fp8", "delayed.unfused")
    assert found.tensor == f"{name} {kind}"


def test_a_flip_after_a_resume_is_found(build, run, plant_flip):
    """Of a history, which a resumed run must have."""
    name = "blocks.0.feed_forward.expand.weight"
    plant_flip("delayed.resumed", 4, name, "amax_history")
    regression = build(["delayed"], resumed={"backend": "reference", "resume_after": 2})
    run(regression)
    found = regression.first_difference()
    assert (found.step, found.tensor) == (4, f"{name} amax_history")


# --- the baseline is a judge of its own


@pytest.mark.parametrize("recipe", ALL)
def test_other_codes_are_found(build, run, monkeypatch, recipe):
    """The two do not agree by sharing code: a baseline that scales to 240 differs at once."""
    monkeypatch.setattr(fake_quantize, "CODE_MAX", 240.0)
    regression = build([recipe], fp8=FORMS["fp8"])
    run(regression)
    assert regression.first_difference().step == 1


# --- ranks


@pytest.mark.slow
@pytest.mark.parametrize("on_rank", [0, 1])
def test_a_flip_on_one_rank_is_found(build, run, monkeypatch, on_rank):
    """A master's, of the part that this rank alone has."""
    regression = build(["current"], ranks={"backend": "reference", "ranks": 2})
    tasks_of = regression._tasks

    def perturb(job):
        tasks = tasks_of(job)
        if job.ranks > 1:
            tasks[on_rank] = replace(tasks[on_rank], perturb=2)
        return tasks

    monkeypatch.setattr(regression, "_tasks", perturb)
    run(regression)
    found = regression.first_difference()
    assert (found.step, found.variant) == (2, "current.ranks")
    assert found.tensor.endswith(" master")


@pytest.mark.slow
def test_a_rank_that_ends_is_told(build, run, monkeypatch):
    regression = build(["current"], ranks={"backend": "reference", "ranks": 2})
    look, groups = Group.look, []

    def kill(self):
        if len(self.processes) > 1 and self not in groups:
            groups.append(self)
            self.processes[1].kill()
        return look(self)

    monkeypatch.setattr(Group, "look", kill)
    outcomes = run(regression)
    assert "rank 1 of current.ranks failed" in outcomes["current.ranks"].failure
    assert not any(process.is_alive() for process in groups[0].processes)
    assert outcomes["current.unfused"].failure is None
