"""Regressions of fp8 weights: every recipe, whole, resumed and in ranks; planted differences."""

import json
import re

import pytest
import torch

from megaopt.commands.bits import pack
from megaopt.commands.regression import fake_quantize
from megaopt.commands.regression.processes import RankError
from megaopt.commands.regression.workers import Reply, WorkerTrainer
from megaopt.float8 import RECIPES

CPU = torch.device("cpu")
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
    trials = run(regression)
    assert regression.first_difference() is None
    kinds = {"codes", "scale_inv", "weight", "master_param", "exp_avg", "exp_avg_sq"}
    for recipe in ALL:
        delayed = {"scale", "amax_history"} if recipe == "delayed" else set()
        for name in FORMS:
            trial = trials[f"{recipe}.{name}"]
            assert trial.baseline is trials[f"{recipe}.unfused"]
            assert trial.losses == trial.baseline.losses
            assert len(set(trial.losses)) == regression.config.steps
            assert trial.sha256 == trial.baseline.sha256
            assert set(trial.sha256) == kinds | delayed


@pytest.mark.slow
def test_ranks_and_resumed_runs_equal_the_baseline(build, run):
    forms = {
        "resumed": {"backend": "reference", "resume_after": 2},
        "ranks_2": {"backend": "reference", "ranks": 2},
        "ranks_3": {"backend": "reference", "ranks": 3},
    }
    regression = build(["delayed", "block_128x128"], **forms)
    trials = run(regression)
    assert regression.first_difference() is None
    for trial in trials.values():
        assert trial.sha256 == trials[f"{trial.variant.recipe}.unfused"].sha256
        assert trial.losses == trials[f"{trial.variant.recipe}.unfused"].losses


@pytest.mark.parametrize("kind", ["codes", "scale_inv", "scale", "amax_history", "exp_avg"])
def test_a_flip_planted_in_any_tensor_is_found(build, run, monkeypatch, kind):
    regression = build(["current", "delayed"], **FORMS)
    trial = next(each for each in regression.trials if each.variant.name == "delayed.fp8")
    name, owner = "blocks.0.feed_forward.expand.weight", trial.trainer.owner
    step = owner.step

    def step_and_flip(learning_rate):
        step(learning_rate)
        if trial.trainer.steps_done == 2:
            tensor = owner.snapshot()[name][kind]
            tensor.view(-1).view(torch.uint8)[0] ^= 4

    monkeypatch.setattr(owner, "step", step_and_flip)
    run(regression)
    found = regression.first_difference()
    assert (found.step, found.variant, found.baseline) == (2, "delayed.fp8", "delayed.unfused")
    assert (found.tensor, found.index) == (f"{name} {kind}", 0)
    assert int(found.bits, 16) ^ int(found.baseline_bits, 16) == 4


# --- the baseline is a judge of its own


@pytest.mark.parametrize("recipe", ALL)
def test_other_codes_are_found(build, run, monkeypatch, recipe):
    """The two do not agree by sharing code: a baseline that scales to 240 differs at once."""
    monkeypatch.setattr(fake_quantize, "CODE_MAX", 240.0)
    regression = build([recipe], fp8=FORMS["fp8"])
    run(regression)
    assert regression.first_difference().step == 1


# --- ranks


def test_a_rank_of_other_bits_is_found():
    """All ranks are compared: rank 1's loss, or one code of its, is reported as the variant's."""
    weights = {"a": {"codes": torch.arange(4, dtype=torch.uint8)}}
    other = {"a": {"codes": torch.tensor([0, 1, 6, 3], dtype=torch.uint8)}}

    class Told:
        device = CPU

        def __init__(self, loss, theirs):
            own = Reply(1.5, pack({"a": {**weights["a"], "exp_avg": torch.ones(4)}}))
            self.told = [own, Reply(1.5, pack(weights)), Reply(loss, pack(theirs))]

        def replies(self, name):
            return self.told

    for loss, theirs in ((1.5, weights), (1.25, weights), (1.5, other)):
        trainer = WorkerTrainer("x", Told(loss, theirs))
        assert trainer.train_step(None) == loss
        found = trainer.owner.snapshot()["a"]
        assert torch.equal(found["codes"], theirs["a"]["codes"])
        assert torch.equal(found["exp_avg"], torch.ones(4))


REASONS = {
    "raises": r"(?s)rank 1 failed: .*Expected tensor for argument",
    "ends": r"rank 1 failed: its process ended",
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", REASONS)
def test_a_rank_that_fails_is_told(build, run, monkeypatch, fault):
    regression = build(["current"], ranks={"backend": "reference", "ranks": 2})
    begin = regression.workers.begin

    def spoil(batch):
        if fault == "raises":
            regression.workers._connections[1].send([batch[0].float().numpy(), batch[1].numpy()])
        else:
            regression.workers._processes.all[1].terminate()
        begin(batch)

    monkeypatch.setattr(regression.workers, "begin", spoil)
    with pytest.raises(RankError, match=REASONS[fault]):
        run(regression)
    assert regression.workers._processes.all == []
