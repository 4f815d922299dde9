import torch
from how_to import everything, needs
from runs import assert_same

from megaopt import FusedMuon

pytestmark = needs("transformers", "accelerate")

OPTIONS = {"betas": (0.9, 0.95), "dtype": torch.float32}


def groups(trainer, model):
    """The Trainer's own rule of what decays, by name."""
    decays = set(trainer.get_decay_parameter_names(model))
    named = list(model.named_parameters())
    return [
        {"params": [p for n, p in named if n in decays], "weight_decay": 0.1},
        {"params": [p for n, p in named if n not in decays], "weight_decay": 0.0},
    ]


def plain_loop(how_to, trainer):
    from transformers import get_scheduler

    model = how_to.build_model().train()
    kind = type(trainer.optimizer.optimizer)
    options = OPTIONS
    if kind is FusedMuon:
        options = {**OPTIONS, "adjust_lr_fn": "match_rms_adamw"}
        for name in ("model.embed_tokens", "lm_head"):
            model.get_submodule(name).weight.use_muon = False
    optimizer = kind(groups(trainer, model), lr=1e-2, **options)
    schedule = get_scheduler("cosine", optimizer, how_to.WARMUP, how_to.STEPS)
    rows = [example["input_ids"] for example in how_to.examples()]
    for step in range(how_to.STEPS):
        tokens = torch.stack(rows[how_to.BATCH * step : how_to.BATCH * (step + 1)])
        optimizer.zero_grad()
        # the Trainer has the model divide the sum by the number of predicted tokens
        predicted = torch.tensor(tokens[:, 1:].numel())
        model(input_ids=tokens, labels=tokens, num_items_in_batch=predicted).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return everything(model, optimizer)


def test_the_trainer_has_the_bits_of_a_plain_loop(how_to, straight):
    trainer, _ = straight
    found = everything(trainer.model, trainer.optimizer)
    assert_same(found, plain_loop(how_to, trainer))


def test_the_trainer_steps_matrices_by_muon(how_to, tmp_path):
    trainer = how_to.main(["--folder", str(tmp_path), "--muon"])
    rules = {each.name: each.rule for each in trainer.optimizer.optimizer.describe()}
    assert sorted(set(rules.values())) == ["adamw", "muon"]
    found = everything(trainer.model, trainer.optimizer)
    assert_same(found, plain_loop(how_to, trainer))


def test_resumed_is_straight(how_to, straight, tmp_path):
    trainer, folder = straight
    resumed = how_to.main(["--folder", str(tmp_path), "--resume", str(folder / "checkpoint-3")])
    assert [file.name for file in tmp_path.iterdir()] == ["checkpoint-6"]
    assert_same(*(everything(t.model, t.optimizer) for t in (resumed, trainer)))
