"""Every bit is Megatron's own under its other parallel layouts and kinds of parameters."""

import pytest
from how_to import needs
from megatron_gpt import (
    Case,
    Trainer,
    load_and_train,
    train,
    train_and_save,
)


def zero_gradients(case):
    """Whether each optimizer is without parameters, after its gradients are zeroed either way."""
    optimizer = Trainer(case).optimizer
    for to_none in (False, True):
        optimizer.zero_grad(set_to_none=to_none)
    return [each.is_stub_optimizer for each in optimizer.chained_optimizers]


pytestmark = needs("megatron")
MODES = ("main_shards", "precision_aware")
KINDS = ("dp_reshardable", "dp_zero_gather_scatter")

LAYOUTS = {
    "pipeline": (2, {"pipeline": 2}),
    "tied over the pipeline": (2, {"pipeline": 2, "tied": True}),
    "virtual pipeline": (2, {"pipeline": 2, "virtual": 2}),
    "pipeline of data-parallel stages": (4, {"pipeline": 2}),
    "context parallel": (2, {"context": 2}),
    "two instances": (2, {"instances": 2, "overlap": False}),
    "two instances, overlap": (2, {"instances": 2}),
    "two instances of two": (4, {"instances": 2, "overlap": False}),
    "shared experts": (2, {"experts": 2, "shared_experts": True}),
    "frozen": (2, {"frozen": "layernorm"}),
    "a frozen stage": (2, {"pipeline": 2, "trained": "embedding", "clip_grad": 0.01}),
    "only experts trained": (2, {"experts": 2, "trained": "experts"}),
    "decoupled lr": (2, {"decoupled_lr": 1e-3}),
    "mtp": (2, {"mtp": True, "clip_grad": 0.02}),
    "mtp over the pipeline": (2, {"mtp": True, "pipeline": 2, "clip_grad": 0.02}),
}


def is_slow(place, name, mode):
    """Each layout is quick in one of the modes."""
    return LAYOUTS[name][0] > 3 or mode != MODES[place % 2]


@pytest.mark.parametrize(
    ("mode", "name"),
    [
        pytest.param(mode, name, marks=[pytest.mark.slow] * is_slow(place, name, mode))
        for mode in MODES
        for place, name in enumerate(LAYOUTS)
    ],
)
def test_layouts(pools, once, mode, name):
    world, settings = LAYOUTS[name]
    if "instances" in settings:
        pytest.importorskip("einops", reason="Megatron's groups of several instances need einops")
    expected = once(world, train, Case(**settings), 3)
    found = pools(world)(train, Case(plug=mode, **settings), 3)
    assert found == expected
    assert len({step[0] for step in found[0]["steps"]}) == 3


@pytest.mark.parametrize(("mode", "kind"), [*zip(MODES, KINDS, strict=True)])
def test_an_optimizer_without_parameters_beside_another(pools, tmp_path, mode, kind):
    """That of the dense parameters, all of them frozen: nothing of it is saved, or loaded."""
    case = Case(plug=mode, experts=2, trained="experts")
    assert pools(2)(zero_gradients, case) == [[True, False]] * 2
    saved = pools(2)(train_and_save, case, tmp_path / "a", kind)
    back = pools(2)(load_and_train, case, tmp_path / "a", kind)
    assert [each["loaded"] for each in back] == saved
