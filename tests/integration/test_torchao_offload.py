"""torchao's CPUOffloadOptimizer by its name: what it makes, where states are, what it refuses."""

import gc
import inspect

import pytest
import torch
from fake_pinning import FakePinning
from runs import BF16, FP32, assert_same, snapshot, train, values

from megaopt import FusedAdam, FusedLion, FusedSGD, GaLoreAdamW
from megaopt.integration import bitsandbytes, torchao
from megaopt.kernels.host_memory import held_bytes, pinned_by

pytestmark = pytest.mark.usefixtures("young_heap")
SHAPES = [(5,), (64, 80), (63, 65)]
"""The second alone has 4,096 elements or more."""
EMPTY = inspect.Parameter.empty
FACE = {"params": EMPTY, "optimizer_class": torch.optim.AdamW, "offload_gradients": False}
FACE |= {"minimal_size": 4096, "kwargs": EMPTY}


@pytest.fixture(autouse=True)
def pinning():
    gc.collect()
    fake = FakePinning()
    with pinned_by(fake):
        yield fake
    gc.collect()


def made():
    return [torch.nn.Parameter(values(shape, i, BF16)) for i, shape in enumerate(SHAPES)]


def test_arguments_have_the_peers_order_and_defaults():
    found = inspect.signature(torchao.CPUOffloadOptimizer).parameters
    assert [(name, each.default) for name, each in found.items()] == list(FACE.items())
    peer = pytest.importorskip("torchao.optim", reason="torchao is not installed")
    theirs = inspect.signature(peer.CPUOffloadOptimizer).parameters
    assert [(name, each.default) for name, each in theirs.items()] == list(FACE.items())


KINDS = {
    "default": ((), {"lr": 0.1, "fused": True}, FusedAdam, {"weight_decay": 0.01}),
    "AdamW": ((torch.optim.AdamW,), {"weight_decay": 0.1}, FusedAdam, {}),
    "Adam": ((torch.optim.Adam,), {"weight_decay": 0.1}, FusedAdam, {"adam_w_mode": False}),
    "SGD": ((torch.optim.SGD,), {"momentum": 0.9}, FusedSGD, {}),
    "ours": ((FusedLion,), {"lr": 0.1, "dtype": FP32}, FusedLion, {}),
    "8 bits": ((torchao.AdamW8bit,), {"seed": 3}, torchao.AdamW8bit, {}),
    "bitsandbytes": ((bitsandbytes.AdamW,), {"lr": 0.1}, bitsandbytes.AdamW, {}),
}


@pytest.mark.parametrize(("kind", "options", "expected", "more"), KINDS.values(), ids=KINDS)
def test_the_bits_are_those_of_the_optimizer_that_it_stands_for(kind, options, expected, more):
    before = held_bytes()
    found = torchao.CPUOffloadOptimizer(made(), *kind, **options)
    assert type(found) is expected
    same = expected(made(), **options, **more)
    for each in (found, same):
        train(each, 3)
    assert_same(snapshot(found)["weights"], snapshot(same)["weights"])
    assert_same(snapshot(found)["states"], snapshot(same)["states"])
    assert held_bytes() > before


def test_torchaos_classes_are_those_of_this_module():
    peer = pytest.importorskip("torchao.optim", reason="torchao is not installed")
    found = torchao.CPUOffloadOptimizer(made(), peer.AdamW8bit, lr=0.5)
    assert type(found) is torchao.AdamW8bit


@pytest.mark.parametrize(("minimal_size", "parts"), [(0, 3), (4095, 2), (10**6, 0)])
def test_small_parameters_keep_their_states_on_the_card(minimal_size, parts):
    """Groups stay whole: state dicts are those of an optimizer without a minimal size."""
    before = held_bytes()
    found = torchao.CPUOffloadOptimizer(iter(made()), minimal_size=minimal_size)
    (group,) = found.param_groups
    train(found, 1)
    homes = [found.stepper.homes.of(param) is not None for param in group["params"]]
    assert homes == [param.numel() >= minimal_size for param in group["params"]]
    assert sum(homes) == parts
    assert (held_bytes() > before) is (parts > 0)


def test_groups_keep_their_numbers():
    first, *others = made()
    groups = [{"params": [first], "lr": 0.5}, {"params": others, "weight_decay": 0.25}]
    found = torchao.CPUOffloadOptimizer(groups, lr=0.1).param_groups
    assert [group["lr"] for group in found] == [0.5, 0.1]
    assert [group["weight_decay"] for group in found] == [0.01, 0.25]


REFUSED = [
    ({"offload_gradients": True}, "offload_gradients must be False, got True"),
    ({"minimal_size": -1}, "minimal_size must be a whole number >= 0, got -1"),
    ({"minimal_size": True}, "minimal_size must be a whole number >= 0, got True"),
    ({"optimizer_class": torch.optim.RMSprop}, "optimizer_class must be torch.optim.AdamW, Adam"),
    ({"optimizer_class": GaLoreAdamW}, "optimizer_class must be torch.optim.AdamW, Adam"),
    ({"optimizer_class": []}, "optimizer_class must be torch.optim.AdamW, Adam"),
    ({"optimizer_class": "AdamW"}, "optimizer_class must be torch.optim.AdamW, Adam"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=str)
def test_what_has_no_meaning_here_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        torchao.CPUOffloadOptimizer(made(), **options)
