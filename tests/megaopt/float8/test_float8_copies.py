"""Weights in fp8 saved, loaded and copied, with their initial values or without."""

import copy
import gc
import io
import pickle
import subprocess
import sys
import weakref

import pytest
import torch
from bits import assert_same_bits
from float8_models import BF16, FP32, assert_same_parts, assert_same_weight, model, parts
from torch import nn

import megaopt
from megaopt.float8 import RECIPES, Float8Recipe, Float8Weight

every_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)


def awkward(recipe):
    """A model whose scales are not those that its values would give now."""
    net = megaopt.to_float8(model(), recipe)
    weight = net[0].weight
    if recipe.scaling == "delayed":
        weight.scale.fill_(0.3)
        weight.amax_history.copy_(torch.rand(1024))
    elif recipe.scaling == "mxfp8":
        weight.scale_inv += 1
    else:
        weight.scale_inv *= 1.7
    weight.data8.view(torch.uint8)[0, 0] = 0xFF  # a NaN that no encoder writes
    net[2].weight.requires_grad_(False)
    return net


@every_recipe
def test_a_state_dict_keeps_every_bit(recipe):
    net = awkward(recipe)
    file = io.BytesIO()
    torch.save(net.state_dict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    for assign in (False, True):
        other = megaopt.to_float8(model(seed=1), recipe)
        other.load_state_dict(saved, strict=True, assign=assign)
        for index in (0, 2):
            assert_same_parts(parts(other[index].weight), parts(net[index].weight))
        assert isinstance(other[0].weight, nn.Parameter)
        assert other[0].weight.requires_grad
    x = torch.randn(3, 48).bfloat16()
    assert_same_bits(other(x), net(x))


@every_recipe
def test_copies_keep_every_bit_and_share_nothing(recipe):
    net = awkward(recipe)
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    copies = {
        "deepcopy": copy.deepcopy(net),
        "pickle": pickle.loads(pickle.dumps(net)),
        "torch.save": torch.load(file, weights_only=False),
    }
    for other in copies.values():
        for index in (0, 2):
            own, theirs = net[index].weight, other[index].weight
            assert_same_weight(theirs, own)
            before = parts(own)
            theirs.quantize_(torch.randn(own.shape))
            assert_same_parts(parts(own), before)


def test_a_file_is_read_in_a_process_that_has_only_imported_the_package(tmp_path):
    net = awkward(RECIPES["mxfp8"])
    torch.save(net.state_dict(), tmp_path / "s.pt")
    code = (
        "import sys, torch, megaopt.float8\n"
        "weight = torch.load(sys.argv[1], weights_only=True)['0.weight']\n"
        "print(int(weight.data8.view(torch.uint8).int().sum()))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "s.pt")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) == int(net[0].weight.data8.view(torch.uint8).int().sum())


def test_a_plain_model_loads_the_dequantized_values_and_a_float8_model_quantizes_plain_ones():
    net, plain = megaopt.to_float8(model(), "current"), model(seed=1)
    plain.load_state_dict(net.state_dict(), strict=True)
    assert type(plain[0].weight) is nn.Parameter
    assert_same_bits(plain[0].weight.detach(), net[0].weight.dequantize())
    plain = model(seed=2)
    net.load_state_dict(plain.state_dict(), strict=True)
    assert_same_parts(
        parts(net[0].weight), parts(Float8Weight.from_values(plain[0].weight, "current"))
    )


def test_a_state_of_another_recipe_is_refused():
    net, other = (megaopt.to_float8(model(), name) for name in ("current", "block_128x128"))
    before = parts(net[0].weight)
    with pytest.raises(RuntimeError, match="codes would be others"):
        net.load_state_dict(other.state_dict())
    assert_same_parts(parts(net[0].weight), before)


def test_tied_weights_stay_tied_in_copies():
    net = model()
    net[2] = nn.Linear(48, 160, bias=False)
    net[2].weight = net[0].weight
    net = megaopt.to_float8(net, "current")
    assert net[2].weight is net[0].weight
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert other[2].weight is other[0].weight


def test_moving_to_another_device():
    net = megaopt.to_float8(model(), "delayed")
    moved = copy.deepcopy(net).to("meta")
    for name, tensor in moved[0].weight.tensors().items():
        assert tensor.is_meta, name
    assert isinstance(moved[0].weight, nn.Parameter)
    assert type(moved[0].weight) is Float8Weight
    assert moved(torch.ones(3, 48, dtype=BF16, device="meta")).shape == (3, 10)


@pytest.mark.gpu
@every_recipe
def test_there_and_back_again(recipe):
    net = awkward(recipe)
    before, values = parts(net[0].weight), net[0].weight.dequantize()
    there = net.cuda()
    assert_same_bits(there[0].weight.dequantize().cpu(), values)
    for name, tensor in there[0].weight.tensors().items():
        assert tensor.is_cuda, name
    assert_same_parts(parts(there.cpu()[0].weight), before)


def test_shared_memory():
    net = megaopt.to_float8(model(), "current").share_memory()
    assert all(tensor.is_shared() for tensor in net[0].weight.tensors().values())


# --- the initial value


def test_the_initial_value_stays_until_it_is_dropped():
    plain = model(FP32)
    net = megaopt.to_float8(copy.deepcopy(plain), Float8Recipe("current"))
    weight = net[0].weight
    for place in (weight, weight.detach(), copy.deepcopy(net)[0].weight, weight.data):
        assert_same_bits(place.high_precision_initial_value(), plain[0].weight.detach())
    gone = weakref.ref(weight.high_precision_initial_value())
    weight.detach().drop_high_precision_initial_value()
    assert weight.high_precision_initial_value() is None
    gc.collect()
    assert gone() is None  # freed


@pytest.mark.parametrize("change", ["quantize_", "copy_ plain", "copy_ fp8", "load_state_dict"])
def test_the_initial_value_goes_when_the_weight_changes(change):
    """A master made of it would bring the old weight back."""
    net, other = (megaopt.to_float8(model(seed=seed), "current") for seed in (0, 1))
    weight = net[0].weight
    with torch.no_grad():
        {
            "quantize_": lambda: weight.quantize_(torch.zeros(160, 48)),
            "copy_ plain": lambda: weight.copy_(torch.zeros(160, 48)),
            "copy_ fp8": lambda: weight.copy_(other[0].weight),
            "load_state_dict": lambda: net.load_state_dict(other.state_dict()),
        }[change]()
    assert weight.high_precision_initial_value() is None
