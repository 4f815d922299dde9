"""Small whole regressions of FusedMuon: its runs are one, and a planted difference is seen."""

import pytest
from interpreted import interpreted
from tiny_runs import UNFUSED, tiny_run, variant

from megaopt.lab.toml_tables import ConfigError


def muon(name, baseline=None, **keys):
    own = keys if baseline is None else {"baseline": baseline, **keys}
    return variant(name, "muon", **own)


FORMS = muon("again", "first") + muon("groups", "first", layout="groups")
RESUMED = muon("resumed", "first", resume_after=2)


@pytest.fixture
def build(tmp_path, regression_of):
    def build(text, steps=4, perturb=None):
        path = tmp_path / "tiny.toml"
        path.write_text(tiny_run(steps) + text, encoding="utf-8")
        return regression_of(path, perturb)

    return build


def test_runs_are_one_for_any_groups_and_resumed(build, run):
    outcomes = run(build(muon("first") + FORMS + RESUMED))
    found = outcomes["first"].digests(4)
    for outcome in outcomes.values():
        assert (outcome.difference, outcome.failure) == (None, None)
        assert outcome.digests(4) == found
    kinds = {tuple(each.rsplit(" ", 1)) for each in found}
    assert ("token_embedding.weight", "exp_avg_sq") in kinds
    assert {name for name, kind in kinds if kind == "momentum_buffer"} == {
        name for name, kind in kinds if kind == "weight" and name.startswith("blocks.")
        and "norm" not in name
    }  # fmt: skip


@pytest.mark.slow
def test_ranks_that_have_rows_of_the_weights_train_as_one(build, run):
    outcomes = run(build(muon("first") + muon("ranks", "first", ranks=3), steps=2))
    found = outcomes["ranks"]
    assert (found.difference, found.failure) == (None, None)
    assert found.digests(2) == outcomes["first"].digests(2)


def test_momentum_in_blocks_and_fp16_are_another_run(build, run):
    own = {"precision": "fp16", "momentum": "bfloat16_stochastic"}
    outcomes = run(build(muon("first") + muon("other", "first", **own)))
    assert outcomes["other"].difference.step == 1


def test_a_flipped_bit_is_seen(build, run):
    outcomes = run(build(muon("first") + muon("again", "first"), perturb=2))
    assert outcomes["again"].difference.step == 2
    assert outcomes["again"].difference.tensor.endswith(" master")


REFUSED = {
    "another kind's baseline": (
        UNFUSED + muon("first") + muon("again", "unfused"),
        r"again.baseline must be the name of a baseline variant: first, got 'unfused'",
    ),
    "a baseline that stops": (
        muon("first", resume_after=1),
        r"resume_after must be left out of a baseline, got 1",
    ),
    "ranks that stop": (
        muon("first") + muon("ranks", "first", ranks=2, resume_after=1),
        r"resume_after must be left out with ranks, got 1",
    ),
    "momentum": (muon("first", momentum="fp8"), r"muon.momentum: Input should be .*, got 'fp8'"),
}  # fmt: skip


@pytest.mark.parametrize(("text", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_allowed(build, text, message):
    with pytest.raises(ConfigError, match=message):
        build(text)


@pytest.mark.slow
@interpreted
def test_launches_too(build, run):
    regression = build(muon("first") + muon("launches", "first", backend="triton"), steps=2)
    run(regression)
    assert regression.first_difference() is None
