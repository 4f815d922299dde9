"""Weights in fp8 as tensors: what operations return, what is refused, and to_float8."""

import copy
import logging
import pickle

import pytest
import torch
from bits import assert_same_bits
from float8_models import BF16, FP32, assert_same_parts, assert_same_weight, model, parts
from torch import nn

import megaopt
from megaopt.float8 import RECIPES, Float8Weight

every_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)


def test_what_operations_return():
    weight = Float8Weight.from_values(torch.randn(32, 48).bfloat16(), "block_128x128")
    dense = weight.dequantize()
    for name, operation in {
        "plus": lambda w: w + 1,
        "norm": lambda w: w.float().norm(),
        "view": lambda w: w.view(-1),
        "t": lambda w: w.t().contiguous(),
        "cat": lambda w: torch.cat([w, w]),
        "foreach": lambda w: torch._foreach_mul([w, w], 2.0)[1],
        "index": lambda w: w[3, ::2].contiguous(),
        "zeros_like": torch.zeros_like,
        "full_like": lambda w: torch.full_like(w, 3.0),
        "to": lambda w: w.to(FP32),
        "new_ones": lambda w: w.new_ones(3),
    }.items():
        found = operation(weight)
        assert type(found) is torch.Tensor, name
        assert_same_bits(found, operation(dense), name)
    empty = torch.empty_like(weight)
    assert (type(empty), empty.shape, empty.dtype) == (torch.Tensor, weight.shape, BF16)
    for same in (weight.detach(), weight.clone(), weight.data):
        assert_same_weight(same, weight)
    assert weight.detach().data8 is weight.data8
    assert weight.clone().data8.data_ptr() != weight.data8.data_ptr()


IN_PLACE = {
    "add_": lambda w: w.add_(1),
    "data": lambda w: w.data.mul_(2),
    "zero_": lambda w: w.zero_(),
    "item": lambda w: w.__setitem__(0, 1.0),
    "out": lambda w: torch.add(torch.ones(160, 48), 1, out=w.detach()),
    "foreach": lambda w: torch._foreach_add_([w], 1.0),
    "init": lambda w: nn.init.normal_(w),
    "data=": lambda w: setattr(w, "data", torch.zeros(160, 48).bfloat16()),
    "data_ptr": lambda w: w.data_ptr(),
}


@pytest.mark.parametrize("change", IN_PLACE.values(), ids=IN_PLACE)
def test_operations_in_place_are_refused(change):
    weight = megaopt.to_float8(model(), "current")[0].weight
    before = parts(weight)
    with torch.no_grad(), pytest.raises(TypeError, match="Float8Weight"):
        change(weight)
    assert_same_parts(parts(weight), before)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1, foreach=True),
        lambda p: torch.optim.AdamW(p, lr=0.1),
        lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
        lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    ],
    ids=["sgd", "sgd foreach", "adamw", "adamw foreach", "adamw fused"],
)
def test_other_optimizers_are_refused(make):
    net = megaopt.to_float8(model(), "current")
    before = parts(net[0].weight)
    optimizer = make(net.parameters())
    net(torch.randn(3, 48).bfloat16()).sum().backward()
    with pytest.raises(TypeError, match=r"in place on a Float8Weight.* an optimizer must know fp8"):
        optimizer.step()
    assert_same_parts(parts(net[0].weight), before)


def test_another_dtype_of_the_module_is_refused():
    net = megaopt.to_float8(model(), "current")
    with pytest.raises(TypeError, match="so its module takes no other dtype"):
        net.float()
    net.to(BF16)


def test_quantize_refuses_before_it_changes():
    weight = Float8Weight.from_values(torch.ones(3, 4), "delayed")
    before = parts(weight)
    for values in (torch.ones(4, 3), torch.ones(3, 4, dtype=torch.int32)):
        with pytest.raises(ValueError, match=r"values must have shape \(3, 4\) and a floating"):
            weight.quantize_(values)
    assert_same_parts(parts(weight), before)


def test_parts_that_do_not_fit_are_refused():
    weight = Float8Weight.from_values(torch.ones(40, 40), "mxfp8")
    other = weight.data8.view(torch.float8_e5m2)
    with pytest.raises(ValueError, match=r"data8 must .*, got \(torch.float8_e5m2, \(40, 40\)\)"):
        Float8Weight(other, weight.scale_inv, None, None, weight.recipe)
    with pytest.raises(ValueError, match=r"scale_inv must be .* with scaling='current', got"):
        Float8Weight(weight.data8, weight.scale_inv, None, None, RECIPES["current"])
    with pytest.raises(ValueError, match=r"scale must be .* with scaling='delayed', got None"):
        Float8Weight(weight.data8, torch.ones(1), None, None, RECIPES["delayed"])


# --- to_float8


class Own(nn.Linear):
    """A class of a user's own, which stays."""


def test_which_weights_become_fp8():
    assert type(megaopt.to_float8(Own(32, 32), "current")) is Own
    net = nn.ModuleDict(
        {
            "fits": nn.Linear(32, 48), "odd": nn.Linear(30, 48), "table": nn.Embedding(32, 48),
            "norm": nn.LayerNorm(32),
        }
    ).to(BF16)  # fmt: skip
    kept = {name: param for name, param in net.named_parameters() if name != "fits.weight"}
    assert megaopt.to_float8(net, "current") is net
    assert type(net["fits"].weight) is Float8Weight
    assert all(net.get_parameter(name) is param for name, param in kept.items())
    megaopt.to_float8(net, "mxfp8", filter=lambda name, layer: name in ("odd", "fits"))
    assert net["odd"].weight.recipe.scaling == "mxfp8"
    assert net["fits"].weight.recipe.scaling == "current"  # it was fp8 already


def test_a_parameter_keeps_what_it_was_marked_with():
    net = nn.Linear(16, 16)
    net.weight.requires_grad_(False)
    net.weight.tensor_model_parallel = True
    megaopt.to_float8(net, "current")
    assert net.weight.tensor_model_parallel
    assert not net.weight.requires_grad
    assert net.weight.dtype == FP32


def test_to_float8_refuses_before_it_changes():
    net = nn.ModuleDict({"table": nn.Embedding(32, 48), "head": nn.Linear(48, 32, bias=False)})
    net["head"].weight = net["table"].weight
    with pytest.raises(ValueError, match=r"the weight of 'head' .* also 'weight' of 'table'"):
        megaopt.to_float8(net, "current")
    assert type(net["head"].weight) is nn.Parameter
    with pytest.raises(ValueError, match=r"recipe must be one of delayed, .* got 'fp8'"):
        megaopt.to_float8(net, "fp8")
    with pytest.raises(TypeError, match="recipe must be a Float8Recipe or a name, got None"):
        megaopt.to_float8(net, None)
    double = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16).double())
    with pytest.raises(ValueError, match=r"values.dtype must be .*, got torch.float64"):
        megaopt.to_float8(double, "current")
    assert type(double[0].weight) is nn.Parameter


# --- it says what it did, a model shows it, and an optimizer made too early is told


def small_model():
    return nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 17)).bfloat16()


def test_layers_that_nobody_chose_to_leave_are_named(caplog):
    """Those that a filter left are no warning."""
    with caplog.at_level(logging.INFO, "megaopt"):
        megaopt.to_float8(small_model(), "current")
        megaopt.to_float8(small_model(), "current", filter=lambda name, layer: name == "0")
    left, chosen = caplog.records
    assert [left.levelno, chosen.levelno] == [logging.WARNING, logging.INFO]
    assert left.getMessage() == (
        "to_float8: 1 linear layers have fp8 weights now (current); 1 stay as they are, as a size "
        "is no multiple of 16: 2 (17 x 48)"
    )
    assert chosen.getMessage().startswith("to_float8: 1 linear layers have fp8 weights now")


def test_a_printed_model_shows_what_is_in_fp8():
    net = megaopt.to_float8(small_model(), "block_128x128")
    lines = str(net).splitlines()
    assert "(0): Float8Linear(in_features=32" in lines[1]
    assert "fp8 weight=block_128x128" in lines[1]
    assert "(2): Linear(" in lines[3]
    assert "fp8" not in lines[3]
    for again in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert str(again) == str(net)
        x = torch.randn(3, 32).bfloat16()
        assert torch.equal(again(x), net(x))


@pytest.mark.parametrize("stepped_before", [False, True])
def test_an_optimizer_of_the_weights_before_is_told_at_its_next_step(stepped_before):
    net = small_model()
    optimizer = megaopt.FusedAdam(net.parameters(), dtype=torch.float32, backend="reference")
    x = torch.randn(4, 32).bfloat16()
    if stepped_before:
        net(x).sum().backward()
        optimizer.step()
    megaopt.to_float8(net, "current")
    optimizer.zero_grad()
    net(x).sum().backward()
    message = r"parameter 0 of group 0 must be a weight of the model.*replaced, '0\.weight'"
    with pytest.raises(RuntimeError, match=message):
        optimizer.step()
