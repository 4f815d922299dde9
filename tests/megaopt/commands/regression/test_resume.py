import pytest
import torch

from megaopt.commands.config import read_config
from megaopt.commands.regression.compare import find_mismatch
from megaopt.commands.regression.resume import load_result, load_trainer, save_trainer
from megaopt.commands.regression.single import train
from megaopt.commands.regression.variants import build_trainer
from megaopt.commands.toml_tables import ConfigError
from megaopt.commands.training.determinism import deterministic
from megaopt.commands.training.text import batches_of, load_corpus
from megaopt.saving.checkpoint import CheckpointError

CPU = torch.device("cpu")
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
    losses, snapshot = load_result(files[0], CPU)
    resumed_losses, resumed = load_result(files[2], CPU)
    assert len(losses) == 4
    assert resumed_losses == losses[2:]
    assert find_mismatch(resumed, snapshot) is None


@pytest.fixture
def saved(write_run, tmp_path):
    config = read_config(write_run(whole=REFERENCE, other=REFERENCE))
    variant = config.find_variant("whole")
    trainer = build_trainer(config, variant, CPU)
    with deterministic(1):
        trainer.train_step(batches_of(config, load_corpus()).at(1))
    save_trainer(tmp_path / "saved", config, variant, trainer)
    return tmp_path / "saved"


def refusal(path, config, variant="whole"):
    chosen = config.find_variant(variant)
    trainer = build_trainer(config, chosen, CPU)
    with pytest.raises((ConfigError, CheckpointError)) as caught:
        load_trainer(path, config, chosen, trainer)
    assert trainer.steps_done == 0
    return str(caught.value)


def test_a_checkpoint_of_another_run_is_refused(write_run, saved):
    other_decay = read_config(write_run(optimizer="beta1 = 0.8", whole=REFERENCE))
    message = refusal(saved, other_decay)
    assert "of this run, whose optimizer.beta1 is 0.8, got " in message
    assert message.endswith("saved', whose optimizer.beta1 is 0.9")


def test_a_checkpoint_of_another_variant_is_refused(write_run, saved):
    config = read_config(write_run(whole=REFERENCE, other=REFERENCE))
    message = refusal(saved, config, "other")
    assert "whose variant.name is 'other', got " in message
    assert message.endswith("whose variant.name is 'whole'")
