"""Small whole regressions of GaLoreAdamW: its runs are one; planted differences."""

import pytest
from interpreted import interpreted
from tiny_runs import UNFUSED, tiny_run, variant

from megaopt.lab.regression import fused
from megaopt.lab.toml_tables import ConfigError

GALORE = "\n[galore]\nrank = 4\nupdate_proj_gap = 12\nscale = 0.5\n"


def galore(name, baseline=None, **keys):
    own = keys if baseline is None else {"baseline": baseline, **keys}
    return variant(name, "galore", **own)


FORMS = galore("again", "first") + galore("groups", "first", layout="groups")
BETWEEN, AT = (galore("resumed", "first", resume_after=after) for after in (11, 12))


@pytest.fixture
def build(tmp_path, regression_of):
    def build(text, steps=3, perturb=None):
        path = tmp_path / "tiny.toml"
        path.write_text(tiny_run(steps) + text, encoding="utf-8")
        return regression_of(path, perturb)

    return build


@pytest.mark.parametrize(
    "more", [BETWEEN, pytest.param(AT, marks=pytest.mark.slow)], ids=["between", "at"]
)
def test_runs_are_one_for_any_groups_and_resumed(build, run, more):
    """Between two refreshes, and at one."""
    outcomes = run(build(GALORE + galore("first") + FORMS + more, steps=14))
    found = outcomes["first"].digests(14)
    for outcome in outcomes.values():
        assert (outcome.difference, outcome.failure) == (None, None)
        assert outcome.digests(14) == found
    kinds = {each.rpartition(" ")[2] for each in found}
    assert {"projection", "captured_energy", "exp_avg"} <= kinds


@pytest.mark.slow
@interpreted
def test_kernels_too(build, run):
    text = galore("first", kernel="hybrid") + FORMS.replace(
        '"galore"', '"galore"\nkernel = "hybrid"'
    )
    regression = build(GALORE + text)
    run(regression)
    assert regression.first_difference() is None


@pytest.mark.slow
def test_ranks_that_have_rows_of_the_weights_train_as_one(build, run):
    """Projected on the left, over refreshes of some."""
    text = galore("first") + galore("ranks", "first", ranks=3)
    left = GALORE.replace("12", "3") + 'proj_type = "left"\n'
    outcomes = run(build(left + text, steps=4))
    found = outcomes["ranks"]
    assert (found.difference, found.failure) == (None, None)
    assert found.digests(4) == outcomes["first"].digests(4)
    assert {"projection", "exp_avg"} <= {each.rpartition(" ")[2] for each in found.digests(4)}


def test_a_flipped_bit_is_seen(build, run):
    regression = build(GALORE + galore("first") + galore("again", "first"), perturb=2)
    outcomes = run(regression)
    assert outcomes["again"].difference.step == 2
    assert outcomes["again"].difference.tensor.endswith(" master")


@pytest.mark.parametrize("part", ["projection", "order of numbers"])
def test_what_a_run_depends_on_is_seen(build, run, plant, monkeypatch, part):
    """A projection that a resume would lose; a turn that goes by the place in groups."""
    groups = fused.numbered_groups

    def without_numbers(pieces, config, layout):
        own = groups(pieces, config, layout)
        for group in own if layout == "groups" else ():
            del group["param_numbers"]
        return own

    def lose(training, scalars):
        for state in training.owner.optimizer.state.values():
            state.pop("projection", None)

    if part == "projection":
        plant("other", 1, lose)
    else:
        monkeypatch.setattr(fused, "numbered_groups", without_numbers)
    regression = build(GALORE + galore("first") + galore("other", "first", layout="groups"))
    outcome = run(regression)["other"]
    assert outcome.difference is not None or "only one of the two has" in outcome.failure


TWO = galore("first") + galore("again", "first")
REFUSED = {
    "ranks that stop": (
        GALORE + galore("first") + galore("ranks", "first", ranks=2, resume_after=1),
        r"resume_after must be left out with ranks, got 1",
    ),
    "no table": (TWO, "galore must be a table"),
    "another kind's baseline": (
        GALORE + UNFUSED + galore("first") + galore("again", "unfused"),
        r"again.baseline must be the name of a baseline variant: first, got 'unfused'",
    ),
    "a baseline that stops": (
        GALORE + galore("first", resume_after=1),
        r"resume_after must be left out of a baseline, got 1",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("text", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_allowed(build, text, message):
    with pytest.raises(ConfigError, match=message):
        build(text)
