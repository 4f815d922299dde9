"""Small whole regressions: every form of FusedAdam against its baseline; planted differences."""

import itertools
import math

import pytest
import torch

from megaopt.commands.toml_tables import ConfigError
from megaopt.kernels.optional_triton import INTERPRETED

FORMS = {
    "reference": ("unfused", {"backend": "reference"}),
    "external_masters": ("unfused", {"backend": "reference", "masters": "external"}),
    "groups_and_views": ("unfused", {"backend": "reference", "layout": "groups_and_views"}),
    "remainders": ("ties_away", {"backend": "reference", "masters": "remainders"}),
}
TRITON_FORMS = {
    name: (baseline, {**options, "backend": "triton"})
    for name, (baseline, options) in FORMS.items()
}


@pytest.fixture
def build(write_run, regression_of):
    return lambda perturb=None, **run: regression_of(write_run(**run), perturb)


@pytest.fixture
def run(run):
    def run_and_count(regression):
        steps = []
        trials = run(regression, steps.append)
        here = regression.config.steps
        assert steps[:here] == list(range(1, here + 1))
        # then what fresh processes tell: it never goes back, and ends at all
        assert steps == sorted(steps)
        assert steps[-1] == regression.total_steps
        return trials

    return run_and_count


@pytest.mark.parametrize("backend", ["reference", pytest.param("triton", marks=pytest.mark.slow)])
def test_every_form_equals_its_baseline(build, run, backend):
    if backend == "triton" and not INTERPRETED:
        pytest.skip("on a CPU, Triton runs on its interpreter only; test_cli runs it on the GPU")
    forms = FORMS if backend == "reference" else TRITON_FORMS
    regression = build(**forms)
    trials = run(regression)
    assert regression.first_difference() is None
    for name, (baseline, _) in forms.items():
        assert trials[name].losses == trials[baseline].losses
        assert trials[name].sha256 == trials[baseline].sha256
        assert len(set(trials[name].losses)) == regression.config.steps


@pytest.mark.slow
def test_a_run_that_reaches_nan_is_identical(build, run):
    """Plain torch operations and FusedAdam leave NaNs of other signs and payloads."""
    forms = {**FORMS, "ranks": ("unfused", {"backend": "reference", "ranks": 2})}
    regression = build(learning_rate=1e20, **forms)
    trials = run(regression)
    assert math.isnan(trials["unfused"].losses[-1])
    assert regression.first_difference() is None
    for name, (baseline, _) in forms.items():
        assert trials[name].sha256 == trials[baseline].sha256
        for kinds in trials[name].final.values():
            assert all(tensor.isnan().all() for tensor in kinds.values())


def test_a_resumed_run_equals_a_straight_one(build, run):
    resumed = ("unfused", {"backend": "reference", "resume_after": 2})
    regression = build(resumed=resumed)
    trials = run(regression)
    assert regression.first_difference() is None
    assert trials["resumed"].losses == trials["unfused"].losses
    assert trials["resumed"].sha256 == trials["unfused"].sha256


@pytest.mark.parametrize("step", [1, 4])
def test_a_perturbed_master_is_found_at_its_step(build, run, step):
    regression = build(perturb=step, **FORMS)
    trials = run(regression)
    found = regression.first_difference()
    matrix = 256 * 16
    assert (found.step, found.variant, found.baseline) == (step, "reference", "unfused")
    assert (found.tensor, found.index) == ("token_embedding.weight master_param", matrix // 2)
    assert int(found.bits, 16) ^ int(found.baseline_bits, 16) == 1
    # the others stay in step, and the one that differs goes on training
    assert [name for name in trials if trials[name].difference] == ["reference"]
    assert len(trials["reference"].losses) == regression.config.steps


@pytest.mark.filterwarnings("ignore:parameter .* was written outside the optimizer:UserWarning")
@pytest.mark.parametrize("kind", ["weight", "exp_avg", "exp_avg_sq"])
def test_a_flip_planted_in_any_tensor_is_found(build, run, monkeypatch, kind):
    regression = build(**FORMS)
    name, index = "blocks.0.feed_forward.expand.weight", 77
    owner = next(x for x in regression.trials if x.variant.name == "groups_and_views").trainer.owner
    step, steps_taken = owner.step, itertools.count(1)

    def step_and_flip(learning_rate):
        step(learning_rate)
        if next(steps_taken) == 2:
            piece = next(p for p in owner.pieces if p.name == name)
            state = owner.optimizer.state[piece.tensor]
            tensor = piece.tensor.detach() if kind == "weight" else state[kind]
            integer = torch.int16 if tensor.element_size() == 2 else torch.int32
            tensor.view(integer).view(-1)[index] ^= 4

    monkeypatch.setattr(owner, "step", step_and_flip)
    run(regression)
    found = regression.first_difference()
    assert (found.step, found.variant) == (2, "groups_and_views")
    assert (found.tensor, found.index) == (f"{name} {kind}", index)
    assert int(found.bits, 16) ^ int(found.baseline_bits, 16) == 4


def test_a_differing_loss_is_found(build, run, monkeypatch):
    regression = build(reference=FORMS["reference"])
    trainer = next(x for x in regression.trials if x.variant.name == "reference").trainer
    train_step = trainer.train_step

    def nudged(batch):
        loss = train_step(batch)
        return loss * (1 + 2**-23) if trainer.steps_done == 3 else loss

    monkeypatch.setattr(trainer, "train_step", nudged)
    run(regression)
    found = regression.first_difference()
    assert (found.step, found.tensor, found.index) == (3, "loss", 0)
    assert 1 <= int(found.bits, 16) - int(found.baseline_bits, 16) <= 2


def test_a_perturbation_without_masters_is_refused(build):
    with pytest.raises(ConfigError, match=r"perturb must be .*fp32 masters.*, got 1"):
        build(perturb=1, remainders=FORMS["remainders"])
