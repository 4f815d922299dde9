"""axolotl's trainer is Hugging Face's; where it is absent, a class stands for its BasePlugin."""

import sys
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace

import pytest
import torch
from how_to import everything, needs, script
from runs import assert_same

pytestmark = needs("transformers", "accelerate")


@pytest.fixture
def plugin(monkeypatch):
    if find_spec("axolotl") is None:
        for name in ("axolotl", "axolotl.integrations", "axolotl.integrations.base"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        sys.modules["axolotl.integrations.base"].BasePlugin = object
    return script("axolotl_plugin").Megaopt()


def test_the_plugin_sets_the_trainers_optimizer(plugin, tmp_path):
    how_to = script("hugging_face")
    found, expected = (how_to.build_trainer(tmp_path / name) for name in ("plugin", "plain"))
    found.optimizer_cls_and_kwargs = (torch.optim.AdamW, {"lr": 1e-2})  # as if it were axolotl's
    plugin.post_trainer_create(SimpleNamespace(learning_rate=1e-2), found)
    for trainer in (found, expected):
        trainer.train()
    assert_same(*(everything(each.model, each.optimizer) for each in (found, expected)))
