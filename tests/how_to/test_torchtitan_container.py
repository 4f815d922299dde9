import dataclasses
import shutil

import pytest
import torch
from how_to import script
from runs import assert_same
from torch.optim.lr_scheduler import LambdaLR

pytest.importorskip("torchtitan.components.optimizer", reason="needs torchtitan")
pytest.importorskip("torchtitan.components.checkpoint", reason="needs torchtitan's requirements")

from megaopt import FusedAdam

pytestmark = [
    # torchtitan 0.3 asks a schedule for its rate outside of a step, when it loads one
    pytest.mark.filterwarnings("ignore:To get the last learning rate:UserWarning"),
]

MASTERS = {"dtype": torch.float32}
FP16_MOMENTS = {**MASTERS, "exp_avg_dtype": torch.float16, "exp_avg_sq_dtype": torch.float16}
RATES = [1 / 3, 2 / 3, 1.0, 1.0, 0.75, 0.25]


@pytest.fixture(scope="module")
def how_to():
    return script("torchtitan_container")


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
