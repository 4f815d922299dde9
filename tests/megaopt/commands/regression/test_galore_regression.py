"""Small whole regressions of GaLoreAdamW: its runs are one; planted differences."""

import pytest
from interpreted import interpreted
from tiny_runs import UNFUSED, tiny_run, variant

from megaopt.commands.regression.galore import GaLoreWeights
from megaopt.commands.toml_tables import ConfigError

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
    trials = run(build(GALORE + galore("first") + FORMS + more, steps=14))
    for trial in trials.values():
        assert trial.difference is None
        assert trial.sha256 == trials["first"].sha256
    assert {"projection", "captured_energy", "exp_avg"} <= trials["first"].sha256.keys()


@pytest.mark.slow
@interpreted
def test_kernels_too(build, run):
    text = galore("first", kernel="hybrid") + FORMS.replace(
        '"galore"', '"galore"\nkernel = "hybrid"'
    )
    regression = build(GALORE + text)
    run(regression)
    assert regression.first_difference() is None


def test_a_flipped_bit_is_seen(build, run):
    regression = build(GALORE + galore("first") + galore("again", "first"), perturb=2)
    trials = run(regression)
    assert trials["again"].difference.step == 2
    assert "master_param" in trials["again"].difference.tensor


@pytest.mark.parametrize("part", ["projection", "order of numbers"])
def test_what_a_run_depends_on_is_seen(build, run, monkeypatch, part):
    """A projection that a resume would lose; a turn that goes by the place in groups."""
    step = GaLoreWeights.step

    def lose(self, learning_rate):
        if part == "projection" and self.optimizer.param_groups[0]["step"] == 1:
            for state in self.optimizer.state.values():
                state.pop("projection", None)
        for group in self.optimizer.param_groups if part != "projection" else ():
            group.pop("param_numbers", None)
        step(self, learning_rate)

    regression = build(GALORE + galore("first") + galore("other", "first", layout="groups"))
    (_, other) = regression.trials
    monkeypatch.setattr(other.trainer.owner, "step", lose.__get__(other.trainer.owner))
    run(regression)
    assert other.difference is not None


TWO = galore("first") + galore("again", "first")
REFUSED = {
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
