"""flashoptim's names: their faces, what they stand for, and that fused is unfused."""

import copy
import inspect
import pickle
import re

import pytest
import torch
from bits import assert_same_bits
from runs import (
    BF16,
    FP16,
    FP32,
    assert_same,
    assert_same_run,
    parameters,
    snapshot,
    through_a_file,
    train,
    values,
)
from torch import nn

import megaopt
from megaopt import FusedAdam, FusedLion, FusedSGD
from megaopt.integration import flashoptim

EMPTY = inspect.Parameter.empty
COMMON = {
    "quantize": True,
    "compress_state_dict": True,
    "master_weight_bits": 24,
    "check_numerics": False,
    "fused": True,
}
ADAM = {"params": EMPTY, "lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8}
SGD = {
    "params": EMPTY,
    "lr": 1e-3,
    "momentum": 0.0,
    "dampening": 0.0,
    "weight_decay": 0.0,
    "nesterov": False,
}
DECOUPLED = {"decouple_lr": False, **COMMON}
FACES = {
    "FlashAdam": {**ADAM, "weight_decay": 0.0, **COMMON},
    "FlashAdamW": {**ADAM, "weight_decay": 1e-2, **DECOUPLED},
    "FlashLion": {
        "params": EMPTY,
        "lr": 1e-3,
        "betas": (0.9, 0.99),
        "weight_decay": 0.0,
        **DECOUPLED,
    },
    "FlashSGD": {**SGD, **COMMON},
    "FlashSGDW": {**SGD, **DECOUPLED},
}
BITS = {
    24: {"master_weights": True, "master_weight_dtype": "remainder8_stochastic"},
    32: {"master_weights": True, "master_weight_dtype": "remainder16"},
    None: {"master_weights": False, "weight_rounding": "stochastic"},
}
SAME = {
    "FlashAdam": (FusedAdam, {"weight_decay": 0.1}, {"adam_w_mode": False}),
    "FlashAdamW": (FusedAdam, {}, {"weight_decay": 1e-2}),
    "FlashLion": (FusedLion, {"weight_decay": 0.1}, {"lr": 1e-3}),
    "FlashSGD": (FusedSGD, {"momentum": 0.9, "weight_decay": 0.1}, {}),
    "FlashSGDW": (
        FusedSGD,
        {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True},
        {"decoupled_weight_decay": True},
    ),
}
each_class = pytest.mark.parametrize("name", FACES)


def flash(name, params=None, **options):
    params = parameters() if params is None else params
    return getattr(flashoptim, name)(params, **{"quantize": False, **options})


@each_class
def test_arguments_have_the_peers_order_and_defaults(name):
    found = inspect.signature(getattr(flashoptim, name)).parameters
    face = [(own, found[own].default) for own in found]
    assert face == [*FACES[name].items(), ("seed", 0)]
    assert found["seed"].kind is inspect.Parameter.KEYWORD_ONLY


@each_class
def test_flashoptims_own_arguments_are_these(name):
    peer = pytest.importorskip("flashoptim", reason="flashoptim is not installed")
    found = inspect.signature(getattr(peer, name)).parameters
    assert [(own, found[own].default) for own in found] == list(FACES[name].items())


@pytest.mark.parametrize("bits", BITS)
@each_class
def test_the_bits_are_those_of_the_optimizer_that_it_stands_for(name, bits):
    kind, given, fixed = SAME[name]
    found = flash(name, master_weight_bits=bits, seed=3, **given)
    expected = kind(parameters(), **{**given, **fixed}, **BITS[bits], seed=3)
    train(found, 3)
    train(expected, 3)
    assert_same_run(found, expected)
    assert isinstance(found, kind)
    found = pickle.loads(pickle.dumps(found))
    train(found, 2, first=3)
    train(expected, 2, first=3)
    assert_same_run(found, expected)


QUANTIZED = {
    "FlashAdam": {"exp_avg_dtype": "block_e4m3", "exp_avg_sq_dtype": "block_e5m3"},
    "FlashAdamW": {"exp_avg_dtype": "block_e4m3", "exp_avg_sq_dtype": "block_e5m3"},
    "FlashLion": {"exp_avg_dtype": "block_e4m3"},
    "FlashSGD": {"momentum_buffer_dtype": "block_e4m3"},
    "FlashSGDW": {"momentum_buffer_dtype": "block_e4m3"},
}
LARGE = [(33, 128), (5,)]


@pytest.mark.parametrize("compressed", [True, False])
@pytest.mark.parametrize("bits", BITS)
@each_class
def test_quantized_moments_are_those_in_blocks(name, bits, compressed):
    """By default, as in flashoptim; small parameters keep fp32, and a load goes on to the bit."""
    kind, given, fixed = SAME[name]
    own = {"master_weight_bits": bits, "compress_state_dict": compressed, "seed": 3}
    found = getattr(flashoptim, name)(parameters(LARGE), **given, **own)
    options = {**given, **fixed, **BITS[bits], **QUANTIZED[name], "seed": 3}
    expected = kind(parameters(LARGE), **options)
    train(found, 3)
    train(expected, 3)
    assert_same_run(found, expected)
    moments = [own.removesuffix("_dtype") for own in QUANTIZED[name]]
    for param, dtype in zip(found.param_groups[0]["params"], (torch.uint8, FP32), strict=True):
        assert {found.state[param][moment].dtype for moment in moments} == {dtype}
    copied = parameters(LARGE)
    for param, trained in zip(copied, found.param_groups[0]["params"], strict=True):
        param.data.copy_(trained.detach())
    loaded = getattr(flashoptim, name)(copied, **given, **own, quantize=True)
    loaded.load_state_dict(through_a_file(found.state_dict()))
    train(loaded, 2, first=3)
    train(expected, 2, first=3)
    assert_same_run(loaded, expected)


def test_classes_inherit_as_there():
    assert issubclass(flashoptim.FlashAdamW, flashoptim.FlashAdam)
    assert issubclass(flashoptim.FlashSGDW, flashoptim.FlashSGD)


# --- fused and unfused: flashoptim's issue 2


class Perceptron(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 4))
        for seed, param in enumerate(self.parameters()):
            param.data = values(param.shape, seed) * 0.3
        self.to(BF16)

    def forward(self, x):
        return self.layers(x)


def script(kind, steps, device, **options):
    """Trains in bf16; losses, weights and states."""
    model = Perceptron().to(device)
    optimizer = kind(model.parameters(), lr=1e-2, **options)
    losses = []
    for step in range(steps):
        x = values((8, 12), 2 * step + 50, BF16).to(device)
        y = values((8, 4), 2 * step + 51, BF16).to(device)
        loss = nn.functional.mse_loss(model(x).float(), y.float())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    states = [optimizer.state[param] for param in model.parameters()]
    return losses, [param.detach() for param in model.parameters()], states


RULES = {
    "adam": (FusedAdam, {}, ("exp_avg", "exp_avg_sq")),
    "lion": (FusedLion, {}, ("exp_avg",)),
    "sgd": (FusedSGD, {"momentum": 0.9}, ("momentum_buffer",)),
}


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("rule", RULES)
def test_fused_and_unfused_differ_by_nothing(rule, bits, device):
    """The kernels against plain torch: the largest difference is 0, and states are fp32."""
    kind, options, moments = RULES[rule]
    options = {**options, **BITS[bits]}
    fused = script(kind, 8, device, backend="triton", **options)
    unfused = script(kind, 8, device, backend="reference", **options)
    assert_same(fused, unfused)
    for found, expected in zip(fused[1], unfused[1], strict=True):
        assert float((found.float() - expected.float()).abs().max()) == 0.0
    for found, expected in zip(fused[2], unfused[2], strict=True):
        for moment in moments:
            assert found[moment].dtype == FP32
            assert not torch.equal(found[moment], found[moment].to(BF16).float())
            assert float((found[moment] - expected[moment]).abs().max()) == 0.0
    assert float(fused[0][-1]) != float(fused[0][0])


@each_class
def test_the_argument_fused_moves_no_bit(name):
    fused, unfused = flash(name), flash(name, fused=False)
    assert (fused.options.backend, unfused.options.backend) == ("auto", "reference")
    train(fused, 2)
    train(unfused, 2)
    assert_same_run(fused, unfused)


# --- refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"check_numerics": True},
            "check_numerics must be False, as no such .*, got True",
        ),
        ({"master_weight_bits": 16}, "master_weight_bits must be one of 24, 32, None, got 16"),
        ({"compress_state_dict": None}, "compress_state_dict must be one of True, False, got None"),
        ({"quantize": 8}, "quantize must be one of True, False, got 8"),
        ({"fused": 1}, "fused must be one of True, False, got 1"),
        ({"lr": -1.0}, "lr must be a finite number >= 0"),
    ],
)
@each_class
def test_what_has_no_meaning_here_is_refused(name, options, message):
    with pytest.raises(ValueError, match=message):
        flash(name, **options)


@pytest.mark.parametrize("name", ["FlashAdamW", "FlashLion", "FlashSGDW"])
def test_decouple_lr_is_refused_with_what_decays_alike(name):
    with pytest.raises(ValueError, match=r"decouple_lr must be False, got True: weight_decay / lr"):
        flash(name, decouple_lr=True)


@pytest.mark.parametrize("bits", [24, 32])
@each_class
def test_weights_that_have_no_such_masters_are_refused(name, bits):
    with pytest.raises(ValueError, match=f"master_weight_bits must be None where .*, got {bits}"):
        flash(name, parameters(dtype=FP32), master_weight_bits=bits)
    message = f"parameter 0 of group 0: master_weight_bits must be None for torch.float16 .*{bits}"
    with pytest.raises(ValueError, match=message):
        flash(name, parameters(dtype=FP16), master_weight_bits=bits)
    mixed = [*parameters(), *parameters(dtype=FP32)]
    train(flash(name, mixed, master_weight_bits=bits), 1)
    for dtype in (FP32, FP16):
        train(flash(name, parameters(dtype=dtype), master_weight_bits=None), 1)


@pytest.mark.parametrize("bits", [24, 32])
@each_class
def test_flashoptims_variable_allows_bits_for_fp32_weights(name, bits, monkeypatch):
    """They have no effect then: the run is the one without."""
    monkeypatch.setenv("FLASHOPTIM_ALLOW_INEFFECTIVE_MASTER_WEIGHT_BITS", "1")
    found = flash(name, parameters(dtype=FP32), master_weight_bits=bits)
    expected = flash(name, parameters(dtype=FP32), master_weight_bits=None)
    for optimizer in (found, expected):
        train(optimizer, 3)
    for part in ("weights", "states"):
        assert_same(snapshot(found)[part], snapshot(expected)[part])
    monkeypatch.setenv("FLASHOPTIM_ALLOW_INEFFECTIVE_MASTER_WEIGHT_BITS", "")
    with pytest.raises(ValueError, match="unless the environment has FLASHOPTIM_ALLOW"):
        flash(name, parameters(dtype=FP32), master_weight_bits=bits)


@pytest.mark.gpu
@pytest.mark.parametrize("allowed", [False, True])
@each_class
def test_flashoptim_refuses_its_default_for_fp32_weights(name, allowed, monkeypatch):
    peer = pytest.importorskip("flashoptim", reason="flashoptim is not installed")
    monkeypatch.setenv("FLASHOPTIM_ALLOW_INEFFECTIVE_MASTER_WEIGHT_BITS", "1" if allowed else "")
    for library in (peer, flashoptim):
        params = [torch.nn.Parameter(torch.zeros(3, device="cuda"))]
        if allowed:
            getattr(library, name)(params)
            continue
        with pytest.raises(ValueError, match="master_weight_bits"):
            getattr(library, name)(params)


# --- helpers


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
    optimizer = flash("FlashAdamW", model.parameters(), master_weight_bits=bits)
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
    expected, found = (flash("FlashAdamW", model.parameters()) for model in models)
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
        with pytest.raises(ValueError, match=f"{name} must be None: each parameter"):
            flashoptim.enable_gradient_release(models[1], found, **{name: value})


@pytest.mark.parametrize("name", [name for name in flashoptim.__all__ if name.startswith("Flash")])
def test_help_names_every_argument(name):
    kind = getattr(flashoptim, name)
    shown = inspect.getdoc(kind)
    own = shown[shown.index("Args:") : shown.index("Raises:")]
    for argument in list(inspect.signature(kind).parameters):
        assert re.search(rf"(^ {{4}}|, ){argument}[,:]", own, re.MULTILINE), argument
    assert ("decouple_lr" in shown) is ("decouple_lr" in inspect.signature(kind).parameters)
    assert "{" not in shown
    assert max(map(len, shown.splitlines())) <= 100
    assert "_Flash" not in shown


def test_a_class_of_ones_own_keeps_its_docstring():
    class Own(flashoptim.FlashAdamW):
        """Mine."""

    assert inspect.getdoc(Own) == "Mine."
