"""Small whole regressions: every form of FusedAdam against its baseline; planted differences."""

import math

import numpy
import pytest

from megaopt.kernels.optional_triton import INTERPRETED
from megaopt.lab.config import read_config
from megaopt.lab.regression.outcome import TrialOutcome
from megaopt.lab.regression.parts import open_recording
from megaopt.lab.regression.plan import TrainingJob, Trial
from megaopt.lab.toml_tables import ConfigError
from megaopt.recording.files import ROW, Value

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
EXPAND = "blocks.0.feed_forward.expand.weight"


@pytest.fixture
def build(write_run, regression_of):
    return lambda perturb=None, **run: regression_of(write_run(**run), perturb)


def assert_equal(outcomes, forms):
    for name, (baseline, _) in forms.items():
        assert (outcomes[name].failure, outcomes[name].difference) == (None, None)
        own, other = outcomes[name], outcomes[baseline]
        assert own.losses == other.losses or math.isnan(own.losses[-1])
        last = own.trial.jobs[-1].last
        assert own.digests(last) == other.digests(last)


@pytest.mark.parametrize("backend", ["reference", pytest.param("triton", marks=pytest.mark.slow)])
def test_every_form_equals_its_baseline(build, run, backend):
    if backend == "triton" and not INTERPRETED:
        pytest.skip("on a CPU, Triton runs on its interpreter only; test_cli runs it on the GPU")
    forms = FORMS if backend == "reference" else TRITON_FORMS
    outcomes = run(build(**forms))
    assert_equal(outcomes, forms)
    assert list(outcomes) == ["unfused", "ties_away", *forms]
    assert all(len(set(outcome.losses)) == 4 for outcome in outcomes.values())
    found = {name.rpartition(" ")[2] for name in outcomes["remainders"].digests(4)}
    assert found == {"weight", "master", "exp_avg", "exp_avg_sq"}


@pytest.mark.slow
def test_a_run_that_reaches_nan_is_identical(build, run):
    """Plain torch operations and FusedAdam leave NaNs of other signs and payloads."""
    forms = {**FORMS, "ranks": ("unfused", {"backend": "reference", "ranks": 2})}
    outcomes = run(build(learning_rate=1e20, **forms))
    assert_equal(outcomes, forms)
    for outcome in outcomes.values():
        assert math.isnan(outcome.losses[-1])
        recording = outcome.recording_at(4)
        for (name, quantity), found in recording.digests(4).items():
            value = recording.values[name, quantity]
            assert found.digest.nonfinite == math.prod(value.shape)


def test_a_resumed_run_equals_a_straight_one(build, run):
    """It goes on where a straight one of equal settings was saved; or makes its own beginning."""
    forms = {"resumed": ("unfused", {"backend": "reference", "resume_after": 2})}
    assert_equal(run(build(**forms)), forms)


def test_a_beginning_is_shared(build, run, tmp_path):
    forms = {**FORMS, "resumed": ("unfused", {"backend": "reference", "resume_after": 2})}
    outcomes = run(build(**forms))
    assert_equal(outcomes, forms)
    begin, rest = outcomes["resumed"].trial.jobs
    assert begin == outcomes["reference"].trial.jobs[0]
    assert (rest.first, rest.load) == (3, "reference-after-2")
    assert (tmp_path / "reference-after-2").exists()


@pytest.mark.parametrize("step", [1, 4])
def test_a_perturbed_master_is_found_at_its_step(build, run, step):
    regression = build(perturb=step, **FORMS)
    outcomes = run(regression)
    found = regression.first_difference()
    assert (found.step, found.variant, found.baseline) == (step, "reference", "unfused")
    assert found.tensor == "token_embedding.weight master"
    assert found.bits == outcomes["reference"].digests(step)[found.tensor]
    assert found.baseline_bits == outcomes["unfused"].digests(step)[found.tensor] != found.bits
    # the others stay in step, and the one that differs goes on training
    assert [name for name in outcomes if outcomes[name].difference] == ["reference"]
    assert len(outcomes["reference"].losses) == 4


@pytest.mark.sample(2)
@pytest.mark.filterwarnings("ignore:parameter .* was written outside the optimizer:UserWarning")
@pytest.mark.parametrize("index", [0, 1023])
@pytest.mark.parametrize("quantity", ["weight", "exp_avg", "exp_avg_sq", "master"])
def test_a_flip_planted_in_any_tensor_is_found(build, run, plant_flip, quantity, index):
    """Of views in either."""
    plant_flip("groups_and_views", 2, EXPAND, quantity, index)
    regression = build(**FORMS)
    run(regression)
    found = regression.first_difference()
    assert (found.step, found.variant) == (2, "groups_and_views")
    assert found.tensor == f"{EXPAND} {quantity}"


@pytest.mark.parametrize("step", [3, 4])
def test_a_flip_after_a_resume_is_found(build, run, plant_flip, step):
    plant_flip("resumed", step, EXPAND, "exp_avg", 5)
    regression = build(resumed=("unfused", {"backend": "reference", "resume_after": 2}))
    run(regression)
    found = regression.first_difference()
    assert (found.step, found.variant) == (step, "resumed")
    assert found.tensor == f"{EXPAND} exp_avg"


def test_a_differing_loss_is_found(build, run, plant):
    def nudge(training, scalars):
        (loss,) = scalars["losses"]
        scalars["losses"] = [(float.fromhex(loss) * (1 + 2**-23)).hex()]

    plant("reference", 3, nudge)
    regression = build(reference=FORMS["reference"])
    run(regression)
    found = regression.first_difference()
    assert (found.step, found.tensor) == (3, "loss")
    own, other = map(float.fromhex, (found.bits, found.baseline_bits))
    assert own == other * (1 + 2**-23)


def test_a_variant_that_fails_is_told_and_the_others_go_on(build, run, plant):
    def fail(training, scalars):
        raise ValueError("no more")

    plant("reference", 2, fail)
    resumed = {"resumed": ("unfused", {"backend": "reference", "resume_after": 2})}
    regression = build(**FORMS, **resumed)
    outcomes = run(regression)
    assert [each.trial.name for each in regression.failed] == ["reference", "resumed"]
    assert {each.failure for each in regression.failed} == {"no more"}
    assert outcomes["remainders"].difference is None
    assert outcomes["reference"].losses == []


def test_a_perturbation_without_masters_is_refused(build):
    with pytest.raises(ConfigError, match=r"perturb must be .*fp32 masters.*, got 1"):
        build(perturb=1, remainders=FORMS["remainders"])


# --- ranks


@pytest.fixture
def outcome_of(tmp_path, write_run):
    """What ranks told of two tensors: a weight that each has, and a moment that they share."""
    (unfused, *_) = read_config(write_run()).runs

    def outcome_of(name, ranks, baseline=None):
        job = TrainingJob(name, unfused, len(ranks), 1, 1)
        for number, (loss, weight, moment) in enumerate(ranks):
            writer, share = open_recording(tmp_path / name, number, len(ranks), {}), 6 // len(ranks)
            own = Value("a", "weight", "float32", (6,), (0, 0, 0, 6))
            part = Value("a", "exp_avg", "float32", (6,), (number * share, 0, 0, share))
            rows = numpy.array(
                [(writer.number(own), 0, weight, 1), (writer.number(part), 0, moment, 0)], ROW
            )
            writer.step(1, 0, {"losses": [loss], "grad_norm": None}, rows)
            writer.close()
        trial = Trial(name, "whole", unfused, (job,))
        return TrialOutcome(trial, tmp_path, baseline)

    return outcome_of


OTHERS = {
    "a weight": [("1.5", 7, 4), ("1.5", 8, 4), ("1.5", 7, 4)],
    "a exp_avg": [("1.5", 7, 4), ("1.5", 7, 5), ("1.5", 7, 4)],
    "loss": [("1.5", 7, 4), ("1.25", 7, 4), ("1.5", 7, 4)],
}


@pytest.mark.parametrize("tensor", OTHERS)
def test_a_rank_of_other_bits_is_found(outcome_of, tensor):
    """Parts add up, replicas are compared: rank 1's loss, or weight, counts as the variant's."""
    whole = outcome_of("whole", [("1.5", 7, 12)])
    assert outcome_of("alike", [("1.5", 7, 4)] * 3, whole).difference is None
    found = outcome_of("other", OTHERS[tensor], whole).difference
    assert (found.step, found.tensor) == (1, tensor)
    assert ("(ranks 0, 2 and 1 differ)" in found.bits) == (tensor == "a weight")


def test_other_tensors_are_not_compared(outcome_of):
    whole, other = (outcome_of(name, [("1.5", 7, 12)]) for name in ("whole", "other"))
    other.quantities = lambda step: {**whole.quantities(step), "b weight": "0"}
    assert outcome_of("own", [("1.5", 7, 12)], other).failure == (
        "step 1: only one of the two has ['b weight']"
    )
