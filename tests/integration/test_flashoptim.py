"""flashoptim's helpers; test_drop_in_classes.py has its optimizers."""

import copy

import pytest
import torch
from bits import assert_same_bits
from runs import (
    BF16,
    FP16,
    FP32,
    assert_same,
    assert_same_run,
    train,
    values,
)
from torch import nn

import megaopt
from megaopt.integration import flashoptim


class Perceptron(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 4))
        for seed, param in enumerate(self.parameters()):
            param.data = values(param.shape, seed) * 0.3
        self.to(BF16)

    def forward(self, x):
        return self.layers(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.BatchNorm1d(4))
        self.middle = nn.Linear(4, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.middle(self.inner(x)))


def fp32_names(model):
    return {name for name, value in model.named_parameters() if value.dtype == FP32}


def test_cast_model_keeps_layers_with_running_statistics():
    model = Model()
    assert flashoptim.cast_model(model) is None
    assert fp32_names(model) == {"inner.2.weight", "inner.2.bias"}
    assert model.inner[2].running_mean.dtype == FP32
    assert model(torch.ones(3, 4, dtype=BF16)).dtype == BF16
    model = Model()
    flashoptim.cast_model(model, FP16, selective=False)
    assert {value.dtype for value in model.parameters()} == {FP16}


def test_cast_model_keeps_the_layers_that_it_is_told():
    model = Model()
    flashoptim.cast_model(
        model,
        full_precision_layers=["he*"],
        full_precision_recast_layers=[model.middle, "inner.1"],
    )
    kept = ("head", "middle", "inner.1", "inner.2")
    assert fp32_names(model) == {f"{n}.{own}" for n in kept for own in ("weight", "bias")}
    x = torch.ones(3, 4, dtype=BF16)
    assert model(x).dtype == FP32
    assert model.middle(x).dtype == BF16
    expected = nn.functional.linear(x.float(), model.middle.weight, model.middle.bias)
    assert_same_bits(model.middle(x), expected.to(BF16))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dtype": FP32}, "dtype must be one of torch.bfloat16, torch.float16"),
        ({"selective": None}, "selective must be one of True, False, got None"),
        ({"full_precision_layers": ["haed"]}, "full_precision_layers must be modules of the model"),
        ({"full_precision_recast_layers": [nn.Linear(1, 1)]}, "full_precision_recast_layers must"),
    ],
)
def test_cast_model_refuses_before_anything_has_changed(arguments, message):
    model = Model()
    with pytest.raises(ValueError, match=message):
        flashoptim.cast_model(model, **arguments)
    assert {value.dtype for value in model.parameters()} == {FP32}


@pytest.mark.parametrize("bits", [24, 32])
def test_fp32_state_dicts_are_methods(bits):
    model = Model().to(BF16)
    optimizer = flashoptim.FlashAdamW(model.parameters(), master_weight_bits=bits)
    train(optimizer, 2)
    found = optimizer.get_fp32_model_state_dict(model)
    assert_same(dict(found), dict(megaopt.get_fp32_model_state_dict(model, optimizer)))
    saved = copy.deepcopy(found)
    train(optimizer, 1, first=2)
    optimizer.set_fp32_model_state_dict(model, {"head.bias": saved["head.bias"]})
    assert_same_bits(optimizer.get_fp32_model_state_dict(model)["head.bias"], saved["head.bias"])
    optimizer.set_fp32_model_state_dict(model, saved)
    assert_same(dict(optimizer.get_fp32_model_state_dict(model)), dict(saved))


def test_gradient_release_under_its_name():
    models = [Perceptron(), Perceptron()]
    expected, found = (flashoptim.FlashAdamW(model.parameters()) for model in models)
    handle = flashoptim.enable_gradient_release(models[1], found)
    assert isinstance(handle, flashoptim.GradientReleaseHandle)
    for model, optimizer in zip(models, (expected, found), strict=True):
        for step in range(3):
            model(values((8, 12), step, BF16)).float().pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same_run(found, expected)
    assert handle.active
    handle.remove()
    assert not handle.active
    for name, value in {"grad_scaler": 1, "pre_step": print}.items():
        with pytest.raises(ValueError, match=f"{name} must be None, got"):
            flashoptim.enable_gradient_release(models[1], found, **{name: value})
