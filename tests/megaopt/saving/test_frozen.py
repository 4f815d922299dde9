"""States of frozen parameters, which torch.distributed.checkpoint leaves out as it loads."""

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from runs import assert_same
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from megaopt import FusedAdam

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def give(params, step, pattern):
    """Gradients for those whose place in the pattern is 1."""
    for seed, (param, has) in enumerate(zip(params, pattern, strict=True)):
        generator = torch.Generator().manual_seed(1000 * seed + step)
        grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        param.grad = grad if has == "1" else None


def late_frozen(steps=2, freeze=True, **options):
    """A model whose bias is frozen after some steps."""
    torch.manual_seed(steps)
    model = torch.nn.Linear(3, 2)
    model.bias.data = model.bias.data.bfloat16()
    optimizer = FusedAdam(model.parameters(), 0.1, dtype=torch.float32, **options)
    params = [*model.parameters()]
    for step in range(steps):
        give(params, step, "11")
        optimizer.step()
    model.bias.requires_grad_(not freeze)
    return model, optimizer


def through_a_checkpoint(source, target, folder, options=None, partial=False):
    saved = {"optimizer": get_optimizer_state_dict(*source, options=options)}
    dcp.save(saved, checkpoint_id=folder, no_dist=True)
    found = {"optimizer": get_optimizer_state_dict(*target, options=options)}
    planner = DefaultLoadPlanner(allow_partial_load=partial)
    dcp.load(found, checkpoint_id=folder, planner=planner, no_dist=True)
    before = copy.deepcopy(target[1].state_dict())
    try:
        set_optimizer_state_dict(*target, found["optimizer"], options=options)
    except ValueError:
        assert_same(target[1].state_dict(), before)
        raise


WAYS = {
    "nested": StateDictOptions(),
    "flattened": StateDictOptions(flatten_optimizer_state_dict=True),
    "full": StateDictOptions(full_state_dict=True),
    "copied": StateDictOptions(full_state_dict=True, cpu_offload=True),
}


@pytest.mark.sample(6)
@pytest.mark.parametrize("makes_states", [None, "all"])
@pytest.mark.parametrize("target", ["fresh", "started", "running"])
@pytest.mark.parametrize("way", WAYS)
def test_a_frozen_parameters_state_is_lost_by_no_load(way, target, makes_states, tmp_path):
    source = late_frozen(makes_states=makes_states)
    own = late_frozen(3 if target == "running" else 0, makes_states=makes_states)
    if target == "started":
        own[1].initialize_states()
    message = "parameter 1 of group 0: requires_grad must be True before .*, got False: .*, and the"
    with pytest.raises(ValueError, match=message):
        through_a_checkpoint(source, own, tmp_path, WAYS[way], partial=True)


@pytest.mark.parametrize("way", WAYS)
def test_of_an_older_checkpoint_the_optimizers_own_state_shows_it(way, tmp_path):
    """It does not say which states it has; what it wrote into the optimizer is there."""
    source, own = late_frozen(), late_frozen(3)
    source[0].bias.requires_grad_(True)
    message = "parameter 1 of group 0: requires_grad must be .*, and this optimizer has one"
    with pytest.raises(ValueError, match=message):
        through_a_checkpoint(source, own, tmp_path, WAYS[way])


@pytest.mark.parametrize("way", WAYS)
def test_a_parameter_that_is_not_frozen_meanwhile_gets_its_state(way, tmp_path):
    """As the error says."""
    source, target = late_frozen(), late_frozen(0)
    target[0].bias.requires_grad_(True)
    target[1].initialize_states()
    through_a_checkpoint(source, target, tmp_path, WAYS[way])
    target[0].bias.requires_grad_(False)
    for own, other in zip(source[0].parameters(), target[0].parameters(), strict=True):
        assert_same(target[1].state[other], source[1].state[own])


def test_load_state_dict_takes_a_frozen_parameters_state():
    source, target = late_frozen(), late_frozen(0)
    target[1].load_state_dict(source[1].state_dict())
    assert_same(target[1].state[target[0].bias], source[1].state[source[0].bias])
    set_optimizer_state_dict(*target, source[1].state_dict())  # by places nothing is left out
    assert_same(target[1].state[target[0].bias], source[1].state[source[0].bias])


@pytest.mark.parametrize("initialized", [False, True])
@pytest.mark.parametrize("makes_states", [None, "all"])
@pytest.mark.parametrize("way", WAYS)
def test_a_parameter_that_was_always_frozen_loads(way, makes_states, initialized, tmp_path):
    """Its state, if it has one, is as the next step makes it."""
    runs = []
    for steps in (2, 0):
        model, optimizer = late_frozen(0, makes_states=makes_states)
        if initialized:
            optimizer.initialize_states()
        for step in range(steps):
            give([*model.parameters()], step, "10")
            optimizer.step()
        runs.append((model, optimizer))
    (model, source), (other, target) = runs
    other.load_state_dict(model.state_dict())
    if not initialized:
        target.initialize_state(other.weight)
    through_a_checkpoint(*runs, tmp_path, WAYS[way], partial=True)
    for own, optimizer in ((model, source), (other, target)):
        give([*own.parameters()], 2, "10")
        optimizer.step()
    assert_same(other.state_dict(), model.state_dict())
    assert_same(target.state[other.weight], source.state[model.weight])
