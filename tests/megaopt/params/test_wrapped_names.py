"""Names of parameters with what torch.compile, DDP, FSDP and checkpointing put into them."""

import pytest
import torch
from handling import refused
from runs import MASTER, assert_same, parameters, snapshot, train
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from megaopt import (
    FusedAdam,
    cast_model,
    get_fp32_model_state_dict,
    set_fp32_model_state_dict,
)
from megaopt.integration.flashoptim import FlashAdamW
from megaopt.params.names import plain_names

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script_method")
PLAIN = ["embedding.weight", "layers.0.weight", "layers.0.bias", "scale"]
WRAPPED = {
    "compiled": [f"_orig_mod.{name}" for name in PLAIN],
    "DDP": [f"module.{name}" for name in PLAIN],
    "both": [f"_orig_mod.module.{name}" for name in PLAIN],
    "DDP of a compiled model": [f"module._orig_mod.{name}" for name in PLAIN],
    "layers": [name.replace("0.", "0._orig_mod.") for name in PLAIN],
    "FSDP1": [f"_fsdp_wrapped_module.{name.replace('0.', '0._fsdp_wrapped_module.')}"
              for name in PLAIN],
    "checkpointed": [name.replace("0.", "0._checkpoint_wrapped_module.") for name in PLAIN],
}  # fmt: skip


def named(*names):
    """Each list of names a group."""
    params = iter(parameters())
    groups = [{"params": [(name, next(params)) for name in own]} for own in names]
    return FusedAdam(groups, **MASTER)


@pytest.mark.parametrize("way", ["into plain", "from plain"])
@pytest.mark.parametrize("names", WRAPPED.values(), ids=WRAPPED)
def test_a_resume_with_or_without_a_wrapper(names, way):
    """torch.compile switched on between, say. Each side keeps its own names."""
    pair = (PLAIN, names) if way == "from plain" else (names, PLAIN)
    source, target = named(pair[0]), named(pair[1])
    train(source, 2)
    target.load_state_dict(source.state_dict())
    assert target.param_groups[0]["param_names"] == pair[1]
    assert_same(snapshot(target)["states"], snapshot(source)["states"])


@pytest.mark.parametrize(
    ("saved", "own"),
    [
        ([["module.a", "a"], ["b", "c"]], [["a", "module.a"], ["b", "c"]]),
        ([["module.a"], ["a"], ["b", "c"]], [["a"], ["module.a"], ["b", "c"]]),
        ([["_orig_mod.a", "b"], ["c", "a"]], [["a", "b"], ["c", "_orig_mod.a"]]),
        ([["module.a"], ["b", "c", "d"]], [["a"], ["b", "c", "module.d.module.x"]]),
        ([["layer.module.a"], ["b", "c", "d"]], [["layer.a"], ["b", "c", "d"]]),
    ],
    ids=["changed places", "in groups", "only one side", "another", "a module of that name"],
)
def test_names_that_would_become_one_are_kept_apart(saved, own):
    source, target = named(*saved), named(*own)
    train(source, 1)
    with refused(target, "group .: param_names of the state dict must be this optimizer's"):
        target.load_state_dict(source.state_dict())


def test_equal_names_with_parts_of_wrappers_load():
    names = [["module.a", "a"], ["_orig_mod.a", "b"]]
    source, target = named(*names), named(*names)
    train(source, 1)
    target.load_state_dict(source.state_dict())
    assert_same(snapshot(target)["states"], snapshot(source)["states"])


def test_plain_names():
    names = ["_orig_mod.a.module.w", "module.module.b", "module", "_orig_mod", "c", "module.c"]
    assert [*plain_names(names).values()] == [
        *("a.module.w", "b", "module", "_orig_mod", "c", "module.c")
    ]


# --- values of models


def model_of(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).bfloat16()


def in_layers(model):
    model[0] = checkpoint_wrapper(model[0])
    return model


@pytest.mark.parametrize("wrap", [torch.compile, in_layers, nn.DataParallel])
@pytest.mark.parametrize("way", ["into plain", "from plain"])
def test_fp32_values_go_by_names_without_wrappers(wrap, way):
    models = [model_of(0), model_of(1)]
    optimizers = [FusedAdam(model.parameters(), **MASTER) for model in models]
    train(optimizers[0], 2)
    place = int(way == "from plain")
    models[place] = wrap(models[place])
    values = get_fp32_model_state_dict(models[0], optimizers[0])
    set_fp32_model_state_dict(models[1], optimizers[1], values)
    found = get_fp32_model_state_dict(models[1], optimizers[1])
    assert_same([*found.values()], [*values.values()])


def test_flashoptims_values_go_by_them_too():
    """It takes what fits: of a compiled model's names nothing did."""
    models = [torch.compile(model_of(0)), model_of(1)]
    optimizers = [FlashAdamW(model.parameters()) for model in models]
    values = optimizers[0].get_fp32_model_state_dict(models[0])
    optimizers[1].set_fp32_model_state_dict(models[1], values)
    found = optimizers[1].get_fp32_model_state_dict(models[1])
    assert_same([*found.values()], [*values.values()])


def test_names_of_values_that_would_become_one_are_unexpected():
    model = model_of(0)
    optimizer = FusedAdam(model.parameters(), **MASTER)
    values = get_fp32_model_state_dict(model, optimizer)
    values["module.0.weight"] = values["0.weight"] + 1
    with pytest.raises(ValueError, match=r"has module\.0\.weight"):
        set_fp32_model_state_dict(model, optimizer, values)
    values["_orig_mod.0.weight"] = values.pop("0.weight")
    with pytest.raises(ValueError, match=r"lacks 0\.weight and has .*module.0.weight"):
        set_fp32_model_state_dict(model, optimizer, values)


def test_modules_that_are_kept_go_by_names_without_wrappers():
    model = torch.compile(nn.ModuleDict({"head": nn.Linear(2, 2), "body": nn.Linear(2, 2)}))
    cast_model(model, torch.bfloat16, keep="head")
    dtypes = [param.dtype for param in model.parameters()]
    assert dtypes == [*[torch.float32] * 2, *[torch.bfloat16] * 2]
