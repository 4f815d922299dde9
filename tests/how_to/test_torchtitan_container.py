import dataclasses
import math
import shutil

import pytest
import torch
from how_to import needs
from runs import assert_same
from torch.optim.lr_scheduler import LambdaLR

from megaopt import FusedAdam, FusedMuon

pytestmark = [
    needs("torchtitan"),
    # torchtitan 0.3 asks a schedule for its rate outside of a step, when it loads one
    pytest.mark.filterwarnings("ignore:To get the last learning rate:UserWarning"),
]

MASTERS = {"dtype": torch.float32}
FP16_MOMENTS = {**MASTERS, "exp_avg_dtype": torch.float16, "exp_avg_sq_dtype": torch.float16}
RATES = [1 / 3, 2 / 3, 1.0, 1.0, *(0.5 * (1 + math.cos(math.pi * i / 3)) for i in (1, 2, 3))]
"""Of torchtitan's schedule in the script: three steps of warmup, the cosine, and after the end."""


@pytest.fixture(params=[MASTERS, FP16_MOMENTS], ids=["masters", "fp16_moments"])
def options(how_to, request, monkeypatch):
    """The script's container, made with these options."""
    config = how_to.optimizer_config()
    factory = {"FusedAdam": request.param}
    config = dataclasses.replace(config, optimizer_factory_kwargs_by_name=factory)
    monkeypatch.setattr(how_to, "optimizer_config", lambda: config)
    return request.param


def everything(model, optimizer):
    states = [dict(optimizer.state[p]) for g in optimizer.param_groups for p in g["params"]]
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    return {"model": dict(model.state_dict()), "states": states, "groups": groups}


def test_resumed_is_straight(how_to, options, tmp_path):
    model, container = how_to.main(["--folder", str(tmp_path)])
    straight = everything(model, *container.optimizers)
    shutil.rmtree(tmp_path / "checkpoint" / "step-6")
    model, container = how_to.main(["--folder", str(tmp_path)])
    assert_same(everything(model, *container.optimizers), straight)


def plain_loop(how_to, options):
    model = how_to.build_model()
    groups = [
        {"params": [model[0].bias, model[2].bias], "weight_decay": 0.0},
        {"params": [model[0].weight, model[2].weight], "weight_decay": 0.1},
    ]
    optimizer = FusedAdam(groups, lr=1e-2, betas=(0.9, 0.95), **options)
    schedule = LambdaLR(optimizer, RATES.__getitem__)
    for step in range(how_to.STEPS):
        batch = how_to.batch_of(step)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(batch), batch).backward()
        optimizer.step()
        schedule.step()
    return everything(model, optimizer)


def test_the_container_has_the_bits_of_a_plain_loop(how_to, options, tmp_path):
    model, container = how_to.main(["--folder", str(tmp_path)])
    found, expected = everything(model, *container.optimizers), plain_loop(how_to, options)
    names = ("param_names", "fused", "foreach")  # torchtitan's own keys
    found["groups"] = [{k: v for k, v in g.items() if k not in names} for g in found["groups"]]
    assert_same(found, expected)


def test_muon_goes_on_from_its_checkpoint_and_steps_as_a_plain_loop(how_to, tmp_path):
    options = ["--folder", str(tmp_path), "--muon"]
    model, container = how_to.main(options)
    straight = everything(model, *container.optimizers)
    shutil.rmtree(tmp_path / "checkpoint" / "step-6")
    model, container = how_to.main(options)
    assert_same(everything(model, *container.optimizers), straight)
    assert_same(dict(model.state_dict()), muon_loop(how_to))


def muon_loop(how_to):
    model = how_to.build_model()
    first, _, last = model
    groups = [
        {"params": [first.bias, last.weight, last.bias], "use_muon": False},
        {"params": [first.weight], "use_muon": True},
    ]
    options = {"lr": 1e-2, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}
    optimizer = FusedMuon(groups, dtype=torch.float32, **options)
    schedule = LambdaLR(optimizer, RATES.__getitem__)
    for step in range(how_to.STEPS):
        batch = how_to.batch_of(step)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(batch), batch).backward()
        optimizer.step()
        schedule.step()
    return dict(model.state_dict())


def test_what_holds_for_all_groups_is_refused_in_one(how_to):
    config = how_to.optimizer_config()
    config.param_groups[0].optimizer_kwargs.update(MASTERS)
    config = dataclasses.replace(config, optimizer_factory_kwargs_by_name={})
    message = "group 0: dtype must be None, the optimizer's own argument"
    with pytest.raises(ValueError, match=message):
        config.build(model_parts=[how_to.build_model()])
