from pathlib import Path

import pytest
import torch

from megaopt.lab.config import ModelConfig, read_config
from megaopt.lab.toml_tables import ConfigError
from megaopt.lab.training import machine
from megaopt.lab.training.machine import choose_device, count_parameters, least_bytes
from megaopt.lab.training.model import GPT, build_model

CONFIG = ModelConfig(layers=2, heads=2, width=16, context=12, vocabulary_size=256)
CPU = torch.device("cpu")


def test_a_seed_gives_the_same_bits_and_another_gives_others():
    torch.manual_seed(7)
    first = build_model(CONFIG, 1, CPU).state_dict()
    torch.manual_seed(8)
    second = build_model(CONFIG, 1, CPU).state_dict()
    other = build_model(CONFIG, 2, CPU).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["token_embedding.weight"], other["token_embedding.weight"])


def read_config_of_the_tiny_run(name="gpt_tiny"):
    return read_config(Path(__file__).parents[4] / "configs" / f"{name}.toml")


def test_parameters_are_counted_as_they_are_built():
    for layers, heads, width, context, vocabulary in ((1, 1, 1, 1, 256), (3, 2, 10, 7, 300)):
        config = ModelConfig(
            layers=layers, heads=heads, width=width, context=context, vocabulary_size=vocabulary
        )
        built = sum(parameter.numel() for parameter in GPT(config).parameters())
        assert count_parameters(config) == built


def test_a_run_larger_than_the_memory_is_refused(monkeypatch):
    config = read_config_of_the_tiny_run()
    variant = config.runs[0]
    needed = least_bytes(config, variant)
    assert needed > 12 * count_parameters(config.model)
    monkeypatch.setattr(machine, "memory_of", lambda device: needed)
    machine.require_room(config, variant, CPU)
    monkeypatch.setattr(machine, "memory_of", lambda device: needed - 1)
    with pytest.raises(ConfigError, match=r"must be small enough for the .* on this cpu, got a"):
        machine.require_room(config, variant, CPU)
    monkeypatch.setattr(machine, "memory_of", lambda device: None)  # the system does not tell
    machine.require_room(config, variant, CPU)


def test_a_gpu_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = read_config_of_the_tiny_run()
    assert choose_device(config) == CPU
    with pytest.raises(ConfigError, match=r"device must be .*no CUDA GPU is visible, got 'cuda'"):
        choose_device(config.model_copy(update={"device": "cuda"}))
