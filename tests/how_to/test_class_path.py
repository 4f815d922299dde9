"""docs/how-to/class_path.md: its YAML makes optimizers by the rules of verl, NeMo-RL and Hydra."""

import re
from collections.abc import Sequence
from importlib import import_module

import pytest
import torch
from modules import REPOSITORY
from runs import assert_same_run

from megaopt import FusedAdam, FusedMuon

yaml = pytest.importorskip("yaml", reason="needs PyYAML, to read the page's YAML")
PAGE = (REPOSITORY / "docs/how-to/class_path.md").read_text(encoding="utf-8")
BLOCKS = {"exp_avg_dtype": "block_e4m3", "exp_avg_sq_dtype": "block_e5m3"}
VOCABULARY = 160


class Listed(Sequence):
    """A list of a configuration library, as OmegaConf's ListConfig, which is no list."""

    def __init__(self, values):
        self.values = values

    def __getitem__(self, index):
        return self.values[index]

    def __len__(self):
        return len(self.values)


def config(heading):
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return yaml.safe_load(re.search(r"```yaml\n(.*?)```", section, re.DOTALL)[1])


def named(path):
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)


def by_verl(config, parameters):
    options = {name: config[name] for name in ("lr", "weight_decay")}
    if "adam" in config["optimizer"].lower():
        options["betas"] = tuple(config["betas"])
    options |= config["override_optimizer_config"]
    return named(f"{config['optimizer_impl']}.{config['optimizer']}")(parameters, **options)


def by_nemo(config, parameters):
    return named(config["name"])((p for p in parameters if p.requires_grad), **config["kwargs"])


def by_hydra(config, parameters):
    own = {k: Listed(v) if isinstance(v, list) else v for k, v in config.items()}
    return named(own.pop("_target_"))(params=parameters, **own)


def trained(make, dtype=torch.float32, between=None):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(VOCABULARY, 128), torch.nn.Linear(128, 128))
    optimizer = make(model.to(dtype).parameters())
    for tokens in torch.arange(60).view(3, 20):
        model(tokens).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if between is not None:
            between(optimizer)
    return optimizer


def test_verl():
    own = config("verl")
    found = trained(lambda params: by_verl(own, params), between=offload)
    options = {"lr": 1e-6, "weight_decay": 0.01, "betas": (0.9, 0.999), **BLOCKS}
    assert_same_run(found, trained(lambda params: FusedAdam(params, **options)))


def offload(optimizer):
    """What verl does between two steps: states go to the host, and come back as other tensors."""
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                state[name] = value.clone()


def test_verl_with_weights_in_bf16():
    own = config("verl")
    own["override_optimizer_config"] |= {"master_weights": True, "store_param_remainders": True}
    found = trained(lambda params: by_verl(own, params), torch.bfloat16, offload)
    options = {"lr": 1e-6, "weight_decay": 0.01, "dtype": torch.float32, **BLOCKS}
    options["store_param_remainders"] = True
    assert_same_run(found, trained(lambda params: FusedAdam(params, **options), torch.bfloat16))


def test_nemo_rl():
    own = config("NeMo-RL")
    options = {"lr": 5e-6, "weight_decay": 0.01, **BLOCKS}
    expected = trained(lambda params: FusedAdam(params, **options))
    assert_same_run(trained(lambda params: by_nemo(own, params)), expected)


def test_hydra():
    own = config("Hydra")
    options = {"lr": 3e-4, "betas": (0.9, 0.95), "weight_decay": 0.1, "dtype": torch.float32}
    expected = trained(lambda params: FusedAdam(params, **options), torch.bfloat16)
    found = trained(lambda params: by_hydra(own, params), torch.bfloat16)
    assert_same_run(found, expected)
    assert type(found.state_dict()["param_groups"][0]["betas"]) is tuple  # for torch.load


def test_muon():
    found = {}
    exec(re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)[1], found)
    options = {"lr": 1e-3, "weight_decay": 0.1}
    own = trained(lambda params: found["muon"](params, vocabulary=VOCABULARY, **options))
    assert [each.rule for each in own.describe()] == ["adamw", "muon", "adamw"]

    def by_groups(params):
        embedding, weight, bias = params
        groups = [{"params": [embedding], "use_muon": False}, {"params": [weight, bias]}]
        return FusedMuon(groups, adjust_lr_fn="match_rms_adamw", **options)

    expected = trained(by_groups)
    for param, other in zip(weights(own), weights(expected), strict=True):
        assert torch.equal(param, other)


def weights(optimizer):
    return [param for group in optimizer.param_groups for param in group["params"]]
