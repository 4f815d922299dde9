import pytest

from megaopt.lab.regression.single import train
from megaopt.lab.toml_tables import ConfigError
from megaopt.recording.files import Recording
from megaopt.saving import checkpoint

REFERENCE = ("unfused", {"backend": "reference"})
FORMS = {
    "whole": REFERENCE,
    "views": ("unfused", {"backend": "reference", "layout": "groups_and_views"}),
    "remainders": ("ties_away", {"backend": "reference", "masters": "remainders"}),
}


@pytest.mark.parametrize("variant", ["unfused", *FORMS])
def test_straight_equals_saved_and_resumed(write_run, tmp_path, variant):
    path = write_run(**FORMS)
    files = [tmp_path / name for name in ("straight", "half", "resumed")]
    train(path, variant=variant, result=files[0])
    train(path, variant=variant, steps=2, save=files[1])
    train(path, variant=variant, resume=files[1], result=files[2])
    straight, resumed = Recording(files[0]), Recording(files[2])
    assert (straight.steps, resumed.steps) == ([1, 2, 3, 4], [3, 4])
    for step in resumed.steps:
        assert resumed.scalars(step) == straight.scalars(step)
        assert resumed.digests(step) == straight.digests(step)
    assert straight.digests(3) != straight.digests(4)


@pytest.fixture
def saved(write_run, tmp_path):
    path = write_run(whole=REFERENCE, other=REFERENCE)
    train(path, variant="whole", steps=1, save=tmp_path / "saved")
    return tmp_path / "saved"


def refusal(path, config, variant="whole"):
    with pytest.raises(ConfigError) as caught:
        train(config, variant=variant, resume=path)
    return str(caught.value)


def test_a_checkpoint_of_another_run_is_refused(write_run, saved):
    message = refusal(saved, write_run(optimizer="beta1 = 0.8", whole=REFERENCE))
    assert "of this run, whose optimizer.beta1 is 0.8, got " in message
    assert message.endswith("saved', whose optimizer.beta1 is 0.9")


def test_a_checkpoint_of_another_variant_is_refused(write_run, saved):
    message = refusal(saved, write_run(whole=REFERENCE, other=REFERENCE), "other")
    assert "whose variant.name is 'other', got " in message
    assert message.endswith("whose variant.name is 'whole'")


def test_another_file_is_refused(write_run, tmp_path):
    checkpoint.save(tmp_path / "other", {"model": 1})
    message = refusal(tmp_path / "other", write_run(whole=REFERENCE))
    assert message.startswith("resume must be a checkpoint of `megaopt train`, got ")
